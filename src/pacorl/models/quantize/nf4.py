"""nf4 (QLoRA, arXiv 2305.14314): 4 bits and a scale for each 64 weights, by bitsandbytes' kernels."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from pacorl.io.quiet import quiet
from pacorl.io.versions import install_command
from pacorl.models.quantize import Quantizer

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
"""Weights of a scale: bitsandbytes' default."""
TYPE = "nf4"


def check() -> None:
    """Raise ValueError if bitsandbytes is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(f"quantize nf4 needs bitsandbytes: {install_command('nf4')}; or take int8 or fp8")


@cache
def _functional() -> Any:
    # It would warn of a missing kernel of another package, unused here.
    with quiet("bitsandbytes.backends.cpu.ops"):
        import bitsandbytes.functional

    return bitsandbytes.functional


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) → two codes a byte (n/2, 1), and the scales (n/64,) in fp32."""
    if weight.is_meta:  # its sizes alone, so that a plan needs no bitsandbytes
        count = weight.numel()
        return (
            weight.new_empty(-(-count // 2), 1, dtype=torch.uint8),
            weight.new_empty(-(-count // BLOCK), dtype=torch.float32),
        )
    codes, state = _functional().quantize_4bit(weight, blocksize=BLOCK, quant_type=TYPE)
    return codes, state.absmax


def unpack(codes: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Unpack the weight with one kernel of bitsandbytes."""
    if codes.is_meta:
        return codes.new_empty(shape, dtype=dtype)
    # The operator, and not `functional.dequantize_4bit`: that takes a state with a table of the 16 values, which only
    # packing reads, and which is copied to the card at each call.
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(codes, scale, BLOCK, TYPE, shape, dtype)
    return weight


NF4 = Quantizer(pack, unpack, check)
