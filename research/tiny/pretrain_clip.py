"""Training of the tiny CLIP, which scores panels against texts: `python -m research.tiny clip`.

It is a transformers `CLIPModel` with its tokenizer and image processor, trained by CLIP's contrastive loss on drawn
panels and their VAE reconstructions. At CLIP's final temperature small differences of cosines decide, so that nothing
drives a nearly right text far from its panel: cosines vary little for their size, as the released models' do.

Legend: B batch, N images, C channels, H height, W width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKL
from tests.twins.parts import clip_tokenizer_of
from torch import Tensor

from pacorl.tiny import characters
from pacorl.tiny.characters import VALUES, Panel, split_of
from research.tiny.defects import reconstructed
from research.tiny.pretrain import PANEL_SIZES, Stage, publish, seeded

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
STEPS = 800
BATCH = 128
GROUP = 4
"""A panel and its neighbours, each of which differs from it in one attribute."""


def tiny_clip_model() -> tuple[Any, Any, Any]:
    """Build a small `CLIPModel` with random weights, its tokenizer and its image processor."""
    from transformers import CLIPConfig, CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = clip_tokenizer_of(characters.vocabulary())
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


def pretrain_clip(out: Path, *, vae: AutoencoderKL, share: float) -> None:
    """Train on the characters of the training split; `share` scales the steps, for a quick try."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    model, tokenizer, processor = tiny_clip_model()
    model.logit_scale.requires_grad_(False)
    pool = characters.panels_of("train")
    index = {panel: number for number, panel in enumerate(pool)}
    pixels_VNCHW = prepared_panels(processor, vae, pool)

    steps = round(share * STEPS)
    stage = Stage([model], lr=1e-3, steps=steps, log=out / "log.jsonl", ema=0.99)
    while stage.step < steps:
        panels = list(islice(neighbours(seeded(stage.step)), BATCH))
        tokens = tokenizer([panel.text for panel in panels], padding=True, return_tensors="pt")
        versions = torch.randint(len(pixels_VNCHW), (BATCH,))
        pixels_BCHW = pixels_VNCHW[versions, [index[panel] for panel in panels]]
        found = model(**tokens, pixel_values=pixels_BCHW, return_loss=True)
        right = (found.logits_per_image.argmax(1) == torch.arange(BATCH)).float().mean()
        stage.update(found.loss, right=right.item(), cosine=found.logits_per_image.diagonal().mean().item() / SCALE)
    stage.use_average()

    publish(model.half(), out)
    tokenizer.save_pretrained(out)
    processor.save_pretrained(out)


def prepared_panels(processor: Any, vae: AutoencoderKL, panels: Sequence[Panel]) -> Tensor:
    """Prepare panels as the reward does: (V, N, C, H, W), V versions, drawn at PANEL_SIZES and reconstructed at one."""
    shown = []
    for size in PANEL_SIZES:
        shown.append([characters.draw(panel, size) for panel in panels])
    shown.append(reconstructed(shown[0], vae))
    return torch.stack([processor(images=images, return_tensors="pt").pixel_values for images in shown])


def neighbours(rng: Random) -> Iterator[Panel]:
    """Yield distinct training panels without end: of each GROUP, the others differ from the first in one attribute.

    Without such neighbours a batch is told apart by palettes and colours alone.
    """
    pool = characters.panels_of("train")
    seen: set[Panel] = set()
    while True:
        group = [rng.choice(pool)]
        while len(group) < GROUP:
            other = characters.with_another(group[0], rng.choice(tuple(VALUES)), rng)
            if other not in group and split_of(other) == "train":
                group.append(other)
        # A panel that a batch has twice would be its own wrong answer.
        if seen.isdisjoint(group):
            seen.update(group)
            yield from group
