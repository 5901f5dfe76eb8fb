"""Weights in main memory, copied to the device for their layer's forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from pacorl.core.transfer import warn_of_pageable

ALIGNMENT = 256
"""Bytes: any type can be viewed from such an address on."""


class WeightStream:
    """Prefetcher of layers' weights: it sends the next layer's weights while a layer computes.

    The predicted layer is the one that followed the last two layers before: the first forward learns the order of
    forwards, and the first block of a backward the order of backwards. A wrong prediction only costs time. At most two
    layers' weights are on the device, in a forward, a recomputation and a backward alike.

    diffusers' group offload moves each block's weights by hooks around its forward. It does not work in training: with
    gradient checkpointing torch ends a recomputation before the hook that would free them.
    """

    def __init__(self) -> None:
        self._following: dict[tuple[int, int], tuple[Tensor, ...]] = {}
        """The weights requested after each two requests, by their ids."""
        self._last = (0, 0)
        self._ahead: tuple[tuple[Tensor, ...], tuple[Tensor, ...]] | None = None
        """The predicted next weights, and their copies on the device."""
        self._computing: torch.cuda.Stream | None = None
        """The GPU stream that uses the copies."""
        self._copier: torch.cuda.Stream | None = None
        """The GPU's side stream for copies."""
        self._pinned = Arena(pinned=True)

    def park(self, tensor: Tensor, home: torch.device) -> Tensor:
        """Move a tensor to `home`; from a GPU into pinned memory, for asynchronous copies."""
        return self._pinned.copy_of(tensor) if tensor.is_cuda else tensor.to(home)

    def fetch(self, parked: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        """Copy a layer's parked tensors, for the next work on the device's current stream."""
        if device.type == "cuda":
            self._follow(torch.cuda.current_stream(device))

        # Use the prefetched copies, or free wrong copies before sending the right weights.
        current = self._ahead
        self._ahead = None
        if current is None or current[0] is not parked:
            current = (parked, self._send(parked, device))
        if self._computing and self._copier:
            # Also for wrong copies, whose memory is reused from here on.
            self._computing.wait_stream(self._copier)

        # Learn the order, and prefetch.
        self._following[self._last] = parked
        self._last = (self._last[1], id(parked))
        following = self._following.get(self._last)
        if following:
            self._ahead = (following, self._send(following, device))
        return current[1]

    def _follow(self, computing: torch.cuda.Stream) -> None:
        """Switch to another computing stream: the main thread tries a judge, and the scorer's thread uses it."""
        # torch's streams are not unequal to None: `computing != None` is False.
        if self._computing is not None and computing == self._computing:
            return
        torch.cuda.synchronize(computing.device)  # copies belong to the memory of their stream
        self._ahead = None
        self._computing = computing
        self._copier = torch.cuda.Stream(computing.device)

    def _send(self, parked: tuple[Tensor, ...], device: torch.device) -> tuple[Tensor, ...]:
        # Memory of the computing stream: it is reusable once the last use is launched there.
        sent = tuple(torch.empty_like(tensor, device=device) for tensor in parked)
        copying: AbstractContextManager[object] = nullcontext()
        if self._computing is not None and self._copier is not None:
            # A side stream, which waits for the work already queued.
            self._copier.wait_stream(self._computing)
            copying = torch.cuda.stream(self._copier)
        with copying:
            for copy, tensor in zip(sent, parked, strict=True):
                copy.copy_(tensor, non_blocking=device.type == "cuda")
        return sent


class Arena:
    """Main memory, allocated in large pieces.

    torch rounds each pinned tensor up to a power of two: an int8 layer of FLUX.1's, 3,072 × 3,072, from 9 to 16 MiB.
    """

    PIECE = 2**28
    """Bytes, a power of two."""

    def __init__(self, *, pinned: bool) -> None:
        self._is_pinned = pinned
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the arena."""
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
                warn_of_pageable(str(error).partition("\n")[0])
                self._is_pinned = False
        return torch.empty(size, dtype=torch.uint8)
