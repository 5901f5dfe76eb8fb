"""Frozen linear layers with a packed or streamed weight, and their insertion into a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacorl.models.quantize import INT8, NONE, check_quantization, int8
from pacorl.models.quantize.streaming import WeightStream


class QuantizedLinear(nn.Linear):
    """Frozen linear layer that unpacks its weight for each product, with the interface of a linear layer."""

    weight: nn.Parameter
    """The int8 codes."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight of floats
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        codes, scale = int8.pack(weight)
        self.weight = nn.Parameter(codes, False)
        self.scale = nn.Parameter(scale, False)
        self.register_parameter("bias", bias)

    def unpack(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Unpack the weight (out, in)."""
        return int8.unpack(codes, scale, self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        product: Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
            input, self.bias, self.unpack, self.weight, self.scale
        )
        return product


class StreamedLinear(nn.Linear):
    """Frozen linear layer with its weight in main memory, fetched to the device for each product."""

    def __init__(self, layer: nn.Linear, *, home: torch.device, stream: WeightStream) -> None:
        """
        Args:
            layer: the layer on the device, packed or not; only its bias stays there.
            home: previous device of its weight.
            stream: of all streamed layers of the model.
        """
        nn.Module.__init__(self)
        self.out_features, self.in_features = layer.out_features, layer.in_features
        self.stream = stream
        self.unpack: Callable[..., Tensor] = lambda weight: weight
        weights = [layer.weight]
        if isinstance(layer, QuantizedLinear):
            # Not the layer's own method, which would keep its codes on the device.
            self.unpack = partial(int8.unpack, dtype=layer.dtype)
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
        ctx: Any, x: Tensor, bias: Tensor | None, unpack: Callable[..., Tensor], codes: Tensor, scale: Tensor
    ) -> Tensor:
        ctx.unpack = unpack
        ctx.save_for_backward(codes, scale)
        return F.linear(x, unpack(codes, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ ctx.unpack(*ctx.saved_tensors), None, None, None, None


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
        quantization: one of `Quantization`.
        device: device of the packed layers.
        stream: move the weights back to their previous device, and fetch them for each product.
    """
    check_quantization(quantization)
    if quantization == NONE and not stream:
        return
    weights = WeightStream() if stream else None
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    # By name, without references to packed layers: each weight is freed before the next is packed.
    for name in names:
        if any(part.isdigit() for part in name.split(".")) and "lora_" not in name:
            _pack_layer(model, name, pack=quantization == INT8, device=device, stream=weights)


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
