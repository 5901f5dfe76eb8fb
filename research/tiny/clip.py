"""Training of the tiny CLIP, which scores panels against texts: `python -m research.tiny.clip OUT VAE`.

It is a transformers `CLIPModel` with its tokenizer and image processor, trained by CLIP's contrastive loss on drawn
panels and their VAE reconstructions. At CLIP's final temperature small differences of cosines decide, so that nothing
drives a nearly right text far from its panel: cosines vary little for their size, as the released models' do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKL
from tests.twins.parts import clip_tokenizer_of, vocabulary

from pacorl.tiny.world import VALUES, Panel, draw, panels_of, split_of_hero, with_another
from research.tiny.stage import Stage, publish, seeded
from research.tiny.vae import reconstructed

SIDE = 32
"""Pixels of an image."""
TEXT = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "patch_size": 8,
}
WIDTH = 64
"""Dimensions of the shared space."""
SCALE = 100.0
"""Inverse temperature: CLIP's learned one rises to this bound (arXiv 2103.00020, §2.5)."""
SIZES = (32, 48, 64, 96)
"""Pixels of a drawn panel."""
STEPS = 600
BATCH = 128
GROUP = 4
"""A panel and its neighbours, each of which differs from it in one attribute."""


def text_of(panel: Panel) -> str:
    """Name every attribute of a panel: `red round hero, crown, sunset, meadow, waving, flag`."""
    return f"{panel.colour} {panel.shape} hero, {panel.hat}, {panel.palette}, {panel.place}, {panel.scene}"


def tiny_clip_model() -> tuple[Any, Any, Any]:
    """Build a small `CLIPModel` with random weights, its tokenizer and its image processor."""
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = clip_tokenizer_of([*vocabulary(), *(text_of(panel) for panel in panels_of("train")[::64])])
    ids = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = CLIPConfig(
        text_config={**TEXT, **ids},
        vision_config={**VISION, "image_size": SIDE},
        projection_dim=WIDTH,
        logit_scale_init_value=math.log(SCALE),
    )
    processor = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return CLIPModel(config), tokenizer, processor


def pretrain_clip(out: Path, *, vae: Path) -> None:
    """Train on the heroes of the training split."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer, processor = tiny_clip_model()
    model.logit_scale.requires_grad_(False)
    autoencoder = AutoencoderKL.from_pretrained(vae)

    stage = Stage([model], lr=1e-3, steps=STEPS, log=out / "log.jsonl", ema=0.99)
    while stage.step < STEPS:
        rng = seeded(stage.step)
        panels = list(islice(neighbours(rng), BATCH))
        tokens = tokenizer([text_of(panel) for panel in panels], padding=True, return_tensors="pt")
        size = rng.choice(SIZES)
        images = reconstructed([draw(panel, size) for panel in panels], autoencoder, rng)
        found = model(**tokens, **processor(images=images, return_tensors="pt"), return_loss=True)
        right = (found.logits_per_image.argmax(1) == torch.arange(BATCH)).float().mean()
        stage.update(found.loss, right=right.item(), cosine=found.logits_per_image.diagonal().mean().item() / SCALE)
    stage.use_average()

    publish(model.half(), out)
    tokenizer.save_pretrained(out)
    processor.save_pretrained(out)


def neighbours(rng: Random) -> Iterator[Panel]:
    """Yield distinct training panels without end: of each GROUP, the others differ from the first in one attribute.

    Without such neighbours a batch is told apart by palettes and colours alone.
    """
    pool = panels_of("train")
    seen: set[Panel] = set()
    while True:
        group = [rng.choice(pool)]
        while len(group) < GROUP:
            other = with_another(group[0], rng.choice(tuple(VALUES)), rng)
            if other not in group and split_of_hero(other.colour, other.shape, other.hat) == "train":
                group.append(other)
        # A panel that a batch has twice would be its own wrong answer.
        if seen.isdisjoint(group):
            seen.update(group)
            yield from group
