"""A policy as the painter that `generate` asks for: base or adapter, by the engine's own sampling loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pacorl.dataset.generate import Paint
from pacorl.engine.rollout import ConditioningCache, Sampler, sample_images
from pacorl.io.files import digest
from pacorl.lora.adapters import load_lora
from pacorl.lora.formats import adapter_file
from pacorl.policies.flux import TINY_SEQUENCE_LENGTH
from pacorl.policies.table import POLICIES, distilled_options
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

GUIDANCE, TEXT_TOKENS = 3.5, 512
"""FLUX.1-dev's."""


def policy_painter(
    checkpoint: str,
    *,
    kind: str = "flux",
    adapter: str = "",
    size: Size | None = None,
    steps: int = 20,
    guidance: float | None = None,
    max_sequence_length: int | None = None,
    dtype: str = "bfloat16",
    batch: int = 4,
) -> tuple[Paint, dict[str, Any]]:
    """The painter, and what names it in a recipe (an adapter by its content).

    size: for every prompt; None for the records' own. guidance, max_sequence_length: of FLUX's kinds; None for 3.5
    and 512, or what the tiny checkpoint was trained with. Raises ValueError for an unknown kind, one that takes
    neither, an adapter that does not fit, or a size that the policy cannot paint.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    told = _told(checkpoint, kind, guidance=guidance, max_sequence_length=max_sequence_length)
    named = describe(checkpoint, kind=kind, adapter=adapter, size=size, steps=steps, dtype=dtype, **told)
    policy = POLICIES[kind](checkpoint, dtype=dtype, device=device, **told)
    if adapter:
        load_lora(policy.transformer, adapter)
    cache = ConditioningCache(policy)

    def paint(prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Image]:
        sizes = [_size_of(prompt, size) for prompt in prompts]
        painted: dict[int, Image] = {}
        for one in dict.fromkeys(sizes):
            policy.check_size(one)
            rows = [row for row, own in enumerate(sizes) if own == one]
            images = sample_images(
                policy,
                [prompts[row] for row in rows],
                sampler=Sampler(one, steps),
                cache=cache,
                seeds=[seeds[row] for row in rows],
                batch=batch,
            )
            painted |= dict(zip(rows, images, strict=True))
        return [painted[row] for row in range(len(prompts))]

    return paint, named


def describe(
    checkpoint: str,
    *,
    kind: str = "flux",
    adapter: str = "",
    size: Size | None = None,
    steps: int = 20,
    guidance: float | None = None,
    max_sequence_length: int | None = None,
    dtype: str,
) -> dict[str, Any]:
    """What names a generator in a recipe; needs no weights but the adapter's file."""
    told = _told(checkpoint, kind, guidance=guidance, max_sequence_length=max_sequence_length)
    named = {"checkpoint": checkpoint, "steps": steps, **told, "dtype": dtype}
    own = {"size": str(size)} if size else {}
    return named | own | ({"adapter": digest(adapter_file(adapter))} if adapter else {})


def _told(checkpoint: str, kind: str, *, guidance: float | None, max_sequence_length: int | None) -> dict[str, Any]:
    """Guidance and text length for the kinds that know them, and nothing for others."""
    given = distilled_options(kind, guidance=guidance, max_sequence_length=max_sequence_length)
    if kind.startswith("qwen"):
        return given
    tokens = TINY_SEQUENCE_LENGTH if checkpoint == "tiny" else TEXT_TOKENS
    return {"guidance": GUIDANCE, "max_sequence_length": tokens} | given


def _size_of(prompt: Prompt, size: Size | None) -> Size:
    chosen = size or prompt.size
    if chosen is None:
        raise ValueError(f"prompt {prompt.id} says no size; give one with --size, e.g. 1024x1024")
    return chosen
