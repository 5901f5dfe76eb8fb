"""Frozen weights in int8, and weights streamed from main memory.

A packed layer unpacks its weight for each product. Sampling and training unpack the same numbers, so the ratio before
the first update stays exactly 1, and gradients equal those of a model with the unpacked weights. A layer saves the
packed weight for its backward. torchao's weight-only layers save the unpacked weight, which for FLUX.1-dev adds up to
the whole bf16 model again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacorl.core.devices import INT8, NONE, pinned

LARGEST = 127
"""Largest code."""
ALIGNMENT = 256
"""Bytes: any type can be viewed from such an address on."""


def pack(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(out, in) → int8 codes and the scales (out, 1) in the weight's dtype."""
    # A scale is rounded to bf16 before the codes are: they then make up for its rounding, up to 0.2 %.
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return (weight / scale).round().clamp(-LARGEST, LARGEST).char(), scale


def unpack(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """codes · scale: one kernel, which reads a byte and writes the product."""
    return codes * scale.to(dtype)


class QuantizedLinear(nn.Linear):
    """Frozen linear layer that unpacks its weight for each product, with the interface of a linear layer."""

    weight: nn.Parameter
    """The int8 codes."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight of floats
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        codes, scale = pack(weight)
        self.weight = nn.Parameter(codes, False)
        self.scale = nn.Parameter(scale, False)
        self.register_parameter("bias", bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        product: Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
            input, self.bias, self.dtype, self.weight, self.scale
        )
        return product


class StreamedLinear(nn.Linear):
    """Frozen linear layer with its weight in main memory, fetched to the device for each product."""

    def __init__(self, layer: nn.Linear, *, home: torch.device, stream: WeightStream) -> None:
        """
        Args:
            layer: the layer on the device, packed or not; only its bias stays there.
            stream: of all streamed layers of the model.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.stream = stream
        self.unpack: Callable[..., Tensor] = lambda weight: weight
        weights = [layer.weight]
        if isinstance(layer, QuantizedLinear):
            self.unpack = partial(unpack, dtype=layer.dtype)
            weights.append(layer.scale)
        # Neither parameters nor buffers, so that moving the model leaves them in main memory.
        self.parked = tuple(stream.park(weight.data, home) for weight in weights)
        # Adapters and text encoders read their device and type from a weight.
        self.weight = nn.Parameter(layer.weight.new_empty(0), False)
        self.register_parameter("bias", layer.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        device = input.device
        product: Tensor = _StreamedProduct.apply(  # type: ignore[no-untyped-call]
            input, self.bias, lambda: self.unpack(*self.stream.fetch(self.parked, device))
        )
        return product


class _FrozenProduct(torch.autograd.Function):
    """Product x Wᵀ + b with a frozen W, unpacked again in the backward instead of stored."""

    # No `*packed`: without gradients torch.compile passes `ctx` only if there are fewer arguments than parameters.
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        ctx: Any, x: Tensor, bias: Tensor | None, dtype: torch.dtype, codes: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.dtype = dtype
        ctx.save_for_backward(codes, scale)
        return F.linear(x, unpack(codes, scale, dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        codes, scale = ctx.saved_tensors
        return gradient @ unpack(codes, scale, ctx.dtype), None, None, None, None


class _StreamedProduct(torch.autograd.Function):
    """Product x Wᵀ + b with a frozen W, fetched again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, fetched: Callable[[], Tensor]) -> Tensor:
        ctx.fetched = fetched
        return F.linear(x, fetched(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ ctx.fetched(), None, None


def quantize_model(model: nn.Module, quantization: str, *, device: str | torch.device, stream: bool = False) -> None:
    """Pack the weights of a model's blocks, one at a time on `device`, so that at most one is there unpacked.

    Adapters stay unchanged. Only linear layers of the repeated blocks are packed. Layers outside them (embedders, the
    last projection, a language model's vocabulary) are small, or too sensitive.

    Args:
        model: the model, changed in place; its packed layers are frozen.
        stream: move the weights back to their previous device, and fetch them for each product.
    """
    packs = {NONE: False, INT8: True}[quantization]
    if not (packs or stream):
        return
    weights = WeightStream() if stream else None
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    # By name, without references to packed layers: each weight is freed before the next is packed.
    for name in names:
        if any(step.isdigit() for step in name.split(".")) and "lora_" not in name:
            _pack_layer(model, name, pack=packs, device=device, stream=weights)


def _pack_layer(
    model: nn.Module, name: str, *, pack: bool, device: str | torch.device, stream: WeightStream | None
) -> None:
    """Replace a layer; its variables do not outlive the call, so that the weight is freed."""
    layer: nn.Linear = model.get_submodule(name)  # type: ignore[assignment]
    home = layer.weight.device
    layer.to(device).requires_grad_(False)
    if pack:
        layer = QuantizedLinear(layer.weight, layer.bias)
    if stream:
        layer = StreamedLinear(layer, home=home, stream=stream)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)


def parameter_count(module: nn.Module) -> int:
    """Count the parameters of a module, packed and streamed weights by their unpacked number."""
    count = sum(parameter.numel() for parameter in module.parameters())
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            count -= layer.scale.numel()
        elif isinstance(layer, StreamedLinear):
            count += layer.in_features * layer.out_features
    return count


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, packed or not, and of its buffers, without streamed weights."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def streamed_bytes(module: nn.Module) -> int:
    """Return the bytes of the streamed weights, sent to the device in each forward."""
    streamed = 0
    for layer in module.modules():
        if isinstance(layer, StreamedLinear):
            streamed += sum(tensor.nbytes for tensor in layer.parked)
    return streamed


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
        self._pinned = Arena()

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
    """Pinned memory, allocated in large pieces.

    torch rounds each pinned tensor up to a power of two: an int8 layer of FLUX.1's, 3,072 × 3,072, from 9 to 16 MiB.
    """

    PIECE = 2**28
    """Bytes, a power of two."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the arena."""
        size = -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._free.numel() < size:
            self._free = pinned(torch.empty(max(size, self.PIECE), dtype=torch.uint8))
        piece, self._free = self._free.split([size, self._free.numel() - size])
        copy: Tensor = piece[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)
