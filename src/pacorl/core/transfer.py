"""Non-blocking copies to a GPU."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from pacorl.core.devices import APPLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


logger = logging.getLogger(__name__)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without blocking the host.

    A copy from pageable memory blocks the host until the GPU's queue is empty; a copy from pinned memory is queued.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device)  # copies to the host must block
    # An Apple GPU may read host memory after it is freed.
    return (_pinned(tensor) if device.type == "cuda" else tensor).to(device, non_blocking=device.type != APPLE)


def _pinned(tensor: Tensor) -> Tensor:
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
