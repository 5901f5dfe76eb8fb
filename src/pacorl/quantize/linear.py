"""Linear layers whose frozen weight is packed, and how a model gets them."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacorl.quantize import NONE, QUANTIZERS, Quantizer


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

    def unpack(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The weight (out, in) that products are computed with."""
        return self.quantizer.unpack(codes, scale, torch.Size((self.out_features, self.in_features)), self.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - nn.Linear's name for it
        tensors = (input, self.weight, self.scale, self.bias)
        product: Tensor = _FrozenProduct.apply(*tensors, self.unpack)  # type: ignore[no-untyped-call]
        return product


class _FrozenProduct(torch.autograd.Function):
    """x Wᵀ + b of a frozen W that is unpacked once more for the backward, and not kept until then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, *constants: Any) -> Tensor:
        bias, ctx.unpack = constants
        ctx.save_for_backward(codes, scale)
        return F.linear(x, ctx.unpack(codes, scale), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return gradient @ ctx.unpack(*ctx.saved_tensors), None, None, None, None


def quantize_model(model: nn.Module, quantization: str, *, device: str | torch.device) -> None:
    """Pack the weights of a model's blocks, each on `device`, so that no more than one lies there unpacked.

    An adapter that lies on them stays what it is. Only linear layers of the repeated blocks are packed. What leads in
    and out of them (embedders, the last projection, a language model's vocabulary) is small, or decides too much by
    itself.

    Args:
        model: whose layers are replaced; they do not learn from then on.
        quantization: `none`, or one of `QUANTIZERS`.
        device: where the packed layers are put.

    Raises:
        ValueError: if a package that the form needs is not installed.
    """
    if quantization == NONE:
        return
    names = [name for name, layer in model.named_modules() if type(layer) is nn.Linear]
    # By name, so that nobody holds a layer that is packed already: its weight leaves main memory before the next.
    for name in names:
        if any(part.isdigit() for part in name.split(".")) and "lora_" not in name:
            _pack_layer(model, name, QUANTIZERS.named(quantization), device=device)


def _pack_layer(model: nn.Module, name: str, quantizer: Quantizer, *, device: str | torch.device) -> None:
    layer: nn.Linear = model.get_submodule(name)  # type: ignore[assignment]
    bias = layer.bias if layer.bias is None else nn.Parameter(layer.bias.to(device), False)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, QuantizedLinear(layer.weight.to(device), bias, quantizer))


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
    """Bytes of a module's parameters, packed as they are, and of its buffers."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))
