"""Models that score a run's images: their memory, and the work of the questions that rewards ask."""

from __future__ import annotations

import math
from typing import Any

import torch

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.io.processor import image_tokens
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.peaks import Scorer, language_pass
from pacorl.rewards.clip import ClipEncoder
from pacorl.types import Prompt, Size

ROWS = 16
"""Questions in a full batch of a judge."""
SHARED = 0.6
"""Share of a batch's tokens that are prefixes of further questions, so that their keys and values are kept."""
TEXT = 60
"""Tokens of a question's text, and of the template after it."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
CLIP_NUMBERS = 5_263_360
"""Numbers that a forward of CLIP ViT-H-14 holds at its peak, for each image."""


def judge_scorer(settings: JudgeSettings, configs: Parts) -> Scorer:
    """Measure a judge with a full batch."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(settings.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
    # Each patch of the vision tower is a quarter of a token.
    per_visual_token = 2 * parameter_count(model.model.visual) * model.config.vision_config.spatial_merge_size**2
    quantize_model(model, settings.quantize, device=META, stream=settings.stream)

    language = model.model.language_model
    length = BATCH_TOKENS // ROWS
    positions = torch.zeros(3, ROWS, length, device=META, dtype=torch.long)
    ledger = language_pass(language, ROWS, length, position_ids=positions, use_cache=False)
    shape = language.config
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    cache_bytes = 2 * shape.num_hidden_layers * shape.num_key_value_heads * width * model.dtype.itemsize
    return Scorer(
        weights=weight_bytes(model),
        buffers=ledger.peak + round(SHARED * BATCH_TOKENS * cache_bytes),
        files=files,
        streamed=streamed_bytes(model),
        per_token=ledger.flops / BATCH_TOKENS,
        per_visual_token=per_visual_token,
    )


def clip_scorer(encoder: ClipEncoder, config: PolicyConfig, prompt: Prompt) -> Scorer:
    """Measure an encoder of rewards, with the panels of a batch; `prompt` represents all."""
    width = getattr(torch, encoder.dtype).itemsize
    images = min(CLIP_BATCH, config.sampling.batch * prompt.grid.count)
    weights = sources.CLIP_PARAMETERS * width
    return Scorer(weights, images * CLIP_NUMBERS * width, files=weights)


def judging_flops(config: PolicyConfig, scorer: Scorer, configs: Parts, prompt: Prompt) -> float:
    """Count the FLOPs of the questions about a training image; images that several questions begin with are read once.

    Args:
        configs: of the judge.
        prompt: a prompt that represents all.
    """
    height, width = config.sampling.size
    image = image_tokens(Size(height // prompt.grid.rows, width // prompt.grid.cols), configs["processor"])
    panels = prompt.grid.count

    # A reward's images, those that further questions begin with, and its questions. Across sets, half as many pairs as
    # within them.
    pairs = math.comb(panels, 2)
    asked: dict[str, tuple[float, ...]] = {
        "consistency": (panels, panels - 1, 1.5 * pairs if config.whole_groups else pairs),
        "panel_match": (panels, 0, panels),
        "reference": (panels + 1, 1, 2 * panels),
        "edit_consistency": (2, 0, 2),
    }
    flops = 0.0
    for reward in config.rewards:
        if reward.name in asked:
            images, prefixes, questions = asked[reward.name]
            texts = sum(map(len, prompt.criteria.values())) if reward.args.get("ask") == "criteria" else 1
            read = prefixes * image + questions * (image + texts * TEXT)
            flops += scorer.per_token * read + scorer.per_visual_token * images * image
    return flops
