"""Memory of the models that score a run's images."""

from collections.abc import Sequence
from typing import Any

import torch

from pacorl.core.devices import best_dtype
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.judge.judge import BATCH_TOKENS, JudgeSettings
from pacorl.models.int8 import parameter_count, quantize_model, streamed_bytes, weight_bytes
from pacorl.models.policies.policy import Parts
from pacorl.plan import sources
from pacorl.plan.generators import model_on_meta
from pacorl.plan.ledger import META
from pacorl.plan.peaks import Scorer, language_pass
from pacorl.rewards.clip import ClipEncoder
from pacorl.types import Prompt

ROWS = 16
"""Questions in a full batch of a judge."""
SHARED = 0.6
"""Share of a batch's tokens that are prefixes of further questions, so that their keys and values are kept."""
CLIP_BATCH = 32
"""Images per forward of a CLIP."""
PANELS = 4
"""Panels of an absent prompt."""
CLIP_NUMBERS = 5_263_360
"""Numbers that a forward of CLIP ViT-H-14 holds at its peak, for each image."""


def judge_scorer(settings: JudgeSettings, configs: Parts) -> Scorer:
    """Measure a judge with a full batch."""
    model: Any = model_on_meta(configs["model"], dtype=getattr(torch, best_dtype(settings.checkpoint, "cuda")))
    files = parameter_count(model) * model.dtype.itemsize
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
    )


def clip_scorer(encoder: ClipEncoder, config: PolicyConfig, prompts: Sequence[Prompt]) -> Scorer:
    """Measure an encoder of rewards, with the panels of a batch: the first prompt's represent all."""
    width = getattr(torch, encoder.dtype).itemsize
    images = min(CLIP_BATCH, config.sampling.batch * (prompts[0].grid.count if prompts else PANELS))
    weights = sources.CLIP_PARAMETERS * width
    return Scorer(weights, images * CLIP_NUMBERS * width, files=weights)
