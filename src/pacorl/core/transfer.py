"""Non-blocking copies to a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacorl.core.devices import APPLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without blocking the host.

    A copy from pageable memory blocks the host until the GPU's queue is empty; a copy from pinned memory is queued.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device)  # copies to the host must block
    # An Apple GPU may read host memory after it is freed.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=device.type != APPLE)
