"""Default device, its supported data types, and copies to it.

torch is imported inside: a command's help reads files that read this one.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Final

from pacorl.types import TINY, TINY_EDITS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)

APPLE = "mps"
NONE: Final = "none"
INT8: Final = "int8"


def available_device() -> str:
    """Choose the default device: a CUDA GPU, an Apple GPU, or the CPU."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return APPLE if torch.backends.mps.is_available() else "cpu"


def best_dtype(checkpoint: str, device: str | torch.device) -> str:
    """Choose the default data type of weights: bfloat16 on a GPU, float32 elsewhere."""
    # The tiny checkpoints were trained in float32, and are small.
    return "float32" if str(device) == "cpu" or checkpoint in (TINY, TINY_EDITS) else "bfloat16"


def widest_float(device: torch.device) -> torch.dtype:
    """Return fp64, or fp32 on an Apple GPU, for sums of metrics."""
    import torch

    return torch.float32 if device.type == APPLE else torch.float64


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without blocking the host.

    A copy from pageable memory blocks the host until the GPU's queue is empty; a copy from pinned memory is queued.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device)  # copies to the host must block
    # An Apple GPU may read host memory after it is freed.
    return (pinned(tensor) if device.type == "cuda" else tensor).to(device, non_blocking=device.type != APPLE)


def pinned(tensor: Tensor) -> Tensor:
    """Copy a tensor into pinned memory; the tensor itself if no more memory can be pinned."""
    try:
        return tensor.pin_memory()
    except RuntimeError as error:  # WSL2 pins about half of the memory
        warn_of_pageable(str(error).partition("\n")[0])
        return tensor


@cache
def warn_of_pageable(reason: str) -> None:
    """Warn once that copies to the card come from pageable memory."""
    logger.warning(
        "no more memory can be pinned (%s): copies to the card come from pageable memory, which is slower; under WSL2 "
        "raise `memory` in .wslconfig",
        reason,
    )
