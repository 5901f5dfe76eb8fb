"""fp8 (e4m3) with a scale per row: half of bf16, without a package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pacorl.models.quantize import Quantizer

if TYPE_CHECKING:
    from torch import Tensor

FP8_TYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8_TYPE).max


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) → fp8 codes as bytes and the scales (out, 1) in the weight's dtype."""
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
    codes = (weight / scale).clamp(-LARGEST, LARGEST).to(FP8_TYPE)
    # As bytes: NCCL has no fp8, and `.to(dtype)` of a module would widen a floating parameter.
    return codes.view(torch.uint8), scale


def unpack(codes: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """codes · scale; fp8 has no products of its own with other types."""
    return codes.view(FP8_TYPE).to(dtype).mul_(scale.to(dtype))


FP8 = Quantizer(pack, unpack)
