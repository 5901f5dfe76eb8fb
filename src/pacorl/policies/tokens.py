"""What the policies share: VAE codes as tokens, sigmas shifted by the number of tokens, noise by seed, batches.

FLUX.1, FLUX.1-Kontext and Qwen-Image all paint on tokens of 2×2 VAE codes along a shifted flow-matching schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from pacorl.types import Conditioning, Size


def pack(codes_BCHW: Tensor) -> Tensor:
    """VAE codes → tokens of 2×2 patches, row-major: (B, C, H, W) → (B, H/2·W/2, 4C)."""
    return rearrange(codes_BCHW, "b c (h p) (w q) -> b (h w) (c p q)", p=2, q=2)


def unpack(x_BNC: Tensor, *, rows: int) -> Tensor:
    """The inverse of `pack` for a picture of `rows` rows of tokens."""
    return rearrange(x_BNC, "b (h w) (c p q) -> b c (h p) (w q)", h=rows, p=2, q=2)


def token_grid(size: Size, *, step: int) -> tuple[int, int]:
    """(rows, columns) of tokens of `step` pixels."""
    return size.height // step, size.width // step


def check_multiple(size: Size, *, step: int) -> None:
    """Raises ValueError, naming the nearest size, where a side is no multiple of `step` pixels."""
    if size.height % step or size.width % step:
        near = Size(*(max(step, round(side / step) * step) for side in (size.height, size.width)))
        raise ValueError(f"size {size} must be a multiple of {step} pixels on both sides; the nearest is {near}")


def shifted_sigmas(scheduler: Any, num_steps: int, *, tokens: int) -> Tensor:
    """(T+1,) fp32 on the CPU, shifted by the number of painted tokens as the pipelines shift them.

    The scheduler's state is left alone; its config decides the shift. Raises ValueError for a single step where the
    last one must end at the config's `shift_terminal` and the first at 1.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = scheduler.config
    if num_steps < 2 and config.get("shift_terminal"):
        raise ValueError(f"{num_steps} sampling step is too few for this model's scheduler; ask for at least 2 steps")
    shift = calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    fresh = type(scheduler).from_config(config)
    fresh.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=shift)
    sigmas: Tensor = fresh.sigmas
    return sigmas.float().cpu()


def noise_tokens(seeds: Sequence[int], *, channels: int, height: int, width: int) -> Tensor:
    """(B, N, C) fp32 on the CPU, one seed per row: codes of (channels, height, width) as the pipelines draw them."""
    shape = (channels, height, width)
    return pack(torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]))


def join(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Conditionings of one shape as one batch."""
    names = conditionings[0].tensors
    return Conditioning({name: torch.cat([c.tensors[name] for c in conditionings]) for name in names})


def checked_pipeline(checkpoint: str, *, wanted: str, published: str) -> str:
    """`checkpoint`, when it holds the pipeline that its kind of policy needs.

    Raises ValueError, naming what it holds: FLUX.1-Kontext and FLUX.1-dev have one architecture, so the wrong weights
    would load without a word. Raises OSError where there is no pipeline at all.
    """
    from diffusers import DiffusionPipeline

    found = DiffusionPipeline.load_config(checkpoint).get("_class_name")
    if found != wanted:
        raise ValueError(
            f"model.checkpoint {checkpoint} is a {found}, and this model.kind needs a {wanted} such as {published}"
        )
    return checkpoint
