"""Tensors on their way to a card, without a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pacorl.core.devices import APPLE

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the host goes on at once.

    A copy from ordinary memory first waits until the card has done all that it was told before. One from pinned memory
    waits for its turn on the card alone.
    """
    if tensor.device.type != "cpu":
        return tensor.to(device)  # back to the host a copy must be waited for
    # An Apple GPU may read ordinary memory after the host has let it go.
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=device.type != APPLE)
