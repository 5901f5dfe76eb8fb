"""Weights that stay in main memory, and are on the device while the layer computes that they belong to."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

ALIGNMENT = 256
"""Bytes: any type can be viewed from such an address on."""


class WeightStream:
    """Sends layers of a model their weights, those of the next one while a layer computes.

    The next is the one that followed the last two before: so the order of a forward is learned by the first one, and
    that of a backward by the first block of it. Nothing else depends on the order: a layer gets what it asks for. At
    most two layers' weights are on the device, in a forward, a recomputation and a backward alike.

    diffusers' group offload gives each block its weights by hooks around its forward. It cannot serve training: with
    gradient checkpointing torch ends a recomputation before the hook that would take them away.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """What was asked for after two others, by their ids."""
        self._last = (0, 0)
        self._ahead: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        """What is probably asked for next, and its copies on the device."""
        self._computing: torch.cuda.Stream | None = None
        """Of a card, the stream that the copies were made for."""
        self._copier: torch.cuda.Stream | None = None
        """Of a card, the stream that copies, beside the one that computes."""
        self._pinned = Arena(pinned=True)

    def park(self, tensor: Tensor, home: torch.device) -> Tensor:
        """The tensor at `home`; from a card into pinned memory, of which the card can read while it computes."""
        return self._pinned.copy_of(tensor) if tensor.is_cuda else tensor.to(home)

    def fetch(self, parked: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Copies of a layer's parked tensors, for the work that is launched next on the device's current stream."""
        if device.type == "cuda":
            self._follow(torch.cuda.current_stream(device))
        current, self._ahead = self._ahead, None
        if current is None or current[0] is not parked:
            current = parked, self._send(parked, device)  # the wrong copies go before the next ones come
        if self._computing and self._copier:
            # Also for those wrong copies, whose memory is used again from here on.
            self._computing.wait_stream(self._copier)
        self._following[self._last] = parked
        self._last = self._last[1], id(parked)
        if following := self._following.get(self._last):
            self._ahead = following, self._send(following, device)
        return current[1]

    def _send(self, parked: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        # Memory of the stream that computes: it is free for others once the last use is launched there.
        sent = tuple(torch.empty_like(tensor, device=device) for tensor in parked)
        with self._beside_computing():
            for copy, tensor in zip(sent, parked, strict=True):
                copy.copy_(tensor, non_blocking=device.type == "cuda")
        return sent

    def _follow(self, computing: torch.cuda.Stream) -> None:
        """Copy for another stream than before: a judge is tried by the main thread, and then asked by the scorer's."""
        if computing != self._computing:
            torch.cuda.synchronize(computing.device)  # copies are memory of the stream that they were made for
            self._ahead, self._computing = None, computing
            self._copier = torch.cuda.Stream(computing.device)

    def _beside_computing(self) -> AbstractContextManager[object]:
        """Within the block a card copies on a stream of its own, after what was launched before and beside the rest."""
        if self._computing is None or self._copier is None:
            return nullcontext()
        self._copier.wait_stream(self._computing)
        return torch.cuda.stream(self._copier)


class Arena:
    """Main memory that is taken in large pieces.

    torch rounds each pinned tensor up to a power of two: an int8 layer of FLUX.1's, 3,072 × 3,072, from 9 to 16 MiB.
    """

    PIECE = 2**28
    """Bytes, a power of two."""

    def __init__(self, *, pinned: bool) -> None:
        self._is_pinned, self._free = pinned, torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """The tensor, copied into the arena."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._free.numel() < size:
            self._free = self._piece(max(size, self.PIECE))
        piece, self._free = self._free.split([size, self._free.numel() - size])
        copy: Tensor = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)

    def _piece(self, size: int) -> Tensor:
        if self._is_pinned:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:  # WSL2 pins about half of the memory
                _warn_of_pageable(str(error).partition("\n")[0])
                self._is_pinned = False
        return torch.empty(size, dtype=torch.uint8)


@cache
def _warn_of_pageable(reason: str) -> None:
    logger.warning(
        "no more memory can be pinned (%s): weights lie in pageable memory, whose copies to the card are slower; under "
        "WSL2 raise `memory` in .wslconfig",
        reason,
    )
