"""Linear layers whose frozen weight is packed, and how a model gets them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacorl.models.quantize import NONE, QUANTIZERS, Quantizer
from pacorl.models.quantize.streaming import WeightStream

PLAIN = Quantizer(lambda weight: (weight, weight.new_empty(0)), lambda codes, scale, shape, dtype: codes)
"""Of weights that are streamed as they are."""


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that unpacks its weight for each product; adapters take it for a linear layer."""

    weight: nn.Parameter
    """The codes."""

    def __init__(self, weight: Tensor, bias: nn.Parameter | None, quantizer: Quantizer) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would make a weight of floats
        self.out_features, self.in_features = weight.shape
        self.dtype, self.quantizer = weight.dtype, quantizer
        codes, scale = quantizer.pack(weight)
        self.weight, self.scale = nn.Parameter(codes, False), nn.Parameter(scale, False)
        self.register_parameter("bias", bias)

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The codes and scales on the device."""
        return self.weight, self.scale

    def unpack(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The weight (out, in) that products are computed with."""
        return self.quantizer.unpack(codes, scale, torch.Size((self.out_features, self.in_features)), self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        product: Tensor = _FrozenProduct.apply(  # type: ignore[no-untyped-call]
            input, self.bias, self.unpack, self.weight, self.scale
        )
        return product


class StreamedLinear(QuantizedLinear):
    """A frozen linear layer whose weight is on the device while a product is computed, and else in main memory."""

    def __init__(
        self,
        weight: Tensor,
        bias: nn.Parameter | None,
        quantizer: Quantizer,
        *,
        home: torch.device,
        stream: WeightStream,
    ) -> None:
        super().__init__(weight, bias, quantizer)
        self.stream = stream
        # Neither parameters nor buffers: whatever moves a model to the device leaves them where they are.
        self.parked = tuple(stream.park(packed.data, home) for packed in (self.weight, self.scale))
        # Adapters and text encoders read their device and type off a weight.
        self.weight, self.scale = (nn.Parameter(packed.new_empty(0), False) for packed in (self.weight, self.scale))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        fetched = partial(self._fetched, input.device)
        product: Tensor = _StreamedProduct.apply(input, self.bias, fetched)  # type: ignore[no-untyped-call]
        return product

    def packed(self, device: torch.device) -> tuple[Tensor, Tensor]:
        codes, scale = self.stream.fetch(self.parked, device)
        return codes, scale

    def _fetched(self, device: torch.device) -> Tensor:
        return self.unpack(*self.packed(device))


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b of a frozen W that is unpacked once more for the backward, and not kept until then."""

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
    """x Wᵀ + b of a frozen W that is fetched once more for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, fetched: Callable[[], Tensor]) -> Tensor:
        ctx.fetched = fetched
        return F.linear(x, fetched(), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient @ ctx.fetched(), None, None


def quantize_model(model: nn.Module, quantization: str, *, device: str | torch.device, stream: bool = False) -> None:
    """Pack the weights of a model's blocks, each on `device`, so that no more than one lies there unpacked.

    An adapter that lies on them stays what it is. Only linear layers of the repeated blocks are packed. What leads in
    and out of them (embedders, the last projection, a language model's vocabulary) is small, or decides too much by
    itself.

    Args:
        model: whose layers are replaced; they do not learn from then on.
        quantization: `none`, or one of `QUANTIZERS`.
        device: where the packed layers are put.
        stream: whether their weights go back to where they came from, and to the device for each product.

    Raises:
        ValueError: if a package that the form needs is not installed.
    """
    if quantization == NONE and not stream:
        return
    quantizer = PLAIN if quantization == NONE else QUANTIZERS.named(quantization)
    weights = WeightStream() if stream else None
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    # By name, so that nobody holds a layer that is packed already: its weight leaves main memory before the next.
    for name in names:
        if any(part.isdigit() for part in name.split(".")) and "lora_" not in name:
            _pack_layer(model, name, quantizer, device=device, stream=weights)


def _pack_layer(
    model: nn.Module, name: str, quantizer: Quantizer, *, device: str | torch.device, stream: WeightStream | None
) -> None:
    layer: nn.Linear = model.get_submodule(name)  # type: ignore[assignment]
    bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias.to(device), False)
    parent, _, child = name.rpartition(".")
    weight, home = layer.weight.to(device), layer.weight.device
    packed = (
        StreamedLinear(weight, bias, quantizer, home=home, stream=stream)
        if stream
        else QuantizedLinear(weight, bias, quantizer)
    )
    setattr(model.get_submodule(parent), child, packed)


def check_quantization(quantization: str) -> None:
    """Raise ValueError with the line that installs what the form needs, if that is not here."""
    if quantization != NONE:
        QUANTIZERS.named(quantization).check()


def parameter_count(module: nn.Module) -> int:
    """Parameters of a module, a packed weight's as if it were not."""
    packed = sum(
        layer.in_features * layer.out_features - layer.weight.numel() - layer.scale.numel()
        for layer in module.modules()
        if isinstance(layer, QuantizedLinear)
    )
    return packed + sum(parameter.numel() for parameter in module.parameters())


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, packed as they are, and of its buffers: all but what is streamed."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def streamed_bytes(module: nn.Module) -> int:
    """Bytes of the weights that stay in main memory: what a forward sends to the device."""
    layers = (layer for layer in module.modules() if isinstance(layer, StreamedLinear))
    return sum(tensor.nbytes for layer in layers for tensor in layer.parked)
