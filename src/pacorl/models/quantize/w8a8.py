"""W8A8: products of int8 weights and int8 activations, each token with its own scale (ZeroQuant, arXiv 2206.01861).

A card computes them at two to four times the rate of bf16. They are lossy, so they serve ODE steps alone, which no
log-probability depends on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn

from pacorl.models.quantize import QUANTIZERS
from pacorl.models.quantize.int8 import LARGEST
from pacorl.models.quantize.linear import QuantizedLinear

SENSITIVE = re.compile(r"norm|_mod\b|modulation|embed|proj_out")
"""Names of layers that stay exact: modulations of whole blocks, and the layers around the blocks."""
LEAST_TOKENS = 17
"""Minimum rows of a product: a limit of `torch._int_mm` on a GPU."""
MULTIPLE = 8
"""Divisor of a weight's sides, on a GPU."""


class Int8Products:
    """The W8A8 form of a model with int8 weights; `swapped_in` shows it."""

    def __init__(self, transformer: nn.Module) -> None:
        self.layers: list[nn.Module] = []
        for name, layer in transformer.named_modules():
            if not isinstance(layer, QuantizedLinear) or layer.quantizer is not QUANTIZERS["int8"]:
                continue
            is_aligned = layer.in_features % MULTIPLE == layer.out_features % MULTIPLE == 0
            if is_aligned and not SENSITIVE.search(name):
                self.layers.append(layer)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Compute within the block by `int8_product`, but for the sensitive layers."""
        for layer in self.layers:
            # Not a `partial`, for each of which compiled blocks would be compiled anew.
            layer.forward = MethodType(int8_product, layer)
        try:
            yield
        finally:
            for layer in self.layers:
                del layer.forward


def int8_product(layer: QuantizedLinear, x: Tensor) -> Tensor:
    """x Wᵀ + b by int8 codes of both, added up in int32; exact for fewer than `LEAST_TOKENS` tokens."""
    x_TI = x.flatten(0, -2)
    if len(x_TI) < LEAST_TOKENS:
        return QuantizedLinear.forward(layer, x)

    codes_OI, scale_O1 = layer.packed(x.device)
    x_scale_T1 = (x_TI.abs().amax(1, keepdim=True).float() / LARGEST).clamp(min=1e-12)
    x_codes_TI = (x_TI / x_scale_T1).round().clamp(-LARGEST, LARGEST).char()
    sums_TO = torch._int_mm(x_codes_TI, codes_OI.t())
    product_TO = sums_TO * x_scale_T1 * scale_O1.t().float()
    if layer.bias is not None:
        product_TO = product_TO + layer.bias
    product: Tensor = product_TO.to(x.dtype).unflatten(0, x.shape[:-1])
    return product
