"""PEFT's adapted layer, whose last product adds to the base's output."""

from __future__ import annotations

from typing import Any

from peft.tuners import lora
from torch import Tensor, nn

from pacorl.models.lora.layers import ADAPTER, MasterLinear, add_change, lora_layers


class AdaptedLinear(lora.Linear):  # type: ignore[misc] # PEFT is untyped
    """W·x + (α/r)·B·A·x in the type of x, if the adapter is learned in a wider one; else as PEFT computes it."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first, second = self.lora_A[ADAPTER], self.lora_B[ADAPTER]
        is_cast = isinstance(second, MasterLinear) and x.dtype != second.weight.dtype
        if not is_cast or self.disable_adapters or self.merged:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        return add_change(self.base_layer(x), first(x), second, scaling=self.scaling[ADAPTER])


def add_in_products(transformer: nn.Module) -> None:
    """Let PEFT's adapted linear layers compute as `AdaptedLinear`, with the same weights and names."""
    for layer in lora_layers(transformer):
        if type(layer) is lora.Linear:
            layer.__class__ = AdaptedLinear
