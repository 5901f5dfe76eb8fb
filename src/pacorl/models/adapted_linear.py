"""PEFT's adapted layer, W·x + (α/r)·B·A·x, in the type of x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxAttention
from diffusers.models.transformers.transformer_flux2 import Flux2Attention
from peft.tuners import lora
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.models.lora import ADAPTER

JOINED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""diffusers' name of joined projections → the layers that they join."""


class AdaptedLinear(lora.Linear):  # type: ignore[misc] # PEFT is untyped
    """An adapted layer whose matrices A and B may be of a wider type than the model.

    PEFT casts the input of such a layer to fp32 and the result back. On a bf16 base that buys no accuracy, since the
    base's own products carry the same error, and takes six more kernels a layer, two of them products at 1/15 of the
    rate of bf16. Here the matrices are cast, and their gradients reach the wider weights.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        first, second = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        if self.disable_adapters or x.dtype == second.dtype:
            output: Tensor = super().forward(x, *args, **kwargs)
            return output
        return self.adapted(self.base_layer(x), F.linear(x, first.to(x.dtype)))

    def adapted(self, base: Tensor, hidden: Tensor) -> Tensor:
        """Add scaling·B·hidden to the base's output in one product, which rounds once."""
        second = self.lora_B[ADAPTER].weight.to(base.dtype)
        rows = torch.addmm(base.flatten(0, -2), hidden.flatten(0, -2), second.t(), alpha=self.scaling[ADAPTER])
        return rows.view(*base.shape)


@dataclass(eq=False, frozen=True)
class JoinedProjections:
    """Query, key and value of an attention in one product, and the A of their adapters in another.

    diffusers' processors call it as `to_qkv` or `to_added_qkv`. It has no weights of its own: the layers' weights are
    views of one tensor, and keep their names.
    """

    layers: Sequence[AdaptedLinear]
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layers: Sequence[AdaptedLinear]) -> JoinedProjections:
        """Lay the layers' frozen weights side by side, on the device that they are on."""
        base = [layer.base_layer for layer in layers]
        joined: dict[str, Tensor] = {}
        for name in ("weight", "bias"):
            if getattr(base[0], name) is not None:
                joined[name] = torch.cat([getattr(layer, name).data for layer in base])
                for layer, part in zip(base, joined[name].chunk(len(base)), strict=True):
                    getattr(layer, name).data = part
        return cls(tuple(layers), joined["weight"], joined.get("bias"))

    def __call__(self, x: Tensor) -> Parts:
        layers = self.layers
        base = F.linear(x, self.weight, self.bias).chunk(len(layers), -1)
        if layers[0].disable_adapters:
            return Parts(base)
        first = torch.cat([layer.lora_A[ADAPTER].weight for layer in layers])
        hidden = F.linear(x, first.to(x.dtype)).chunk(len(layers), -1)
        parts = [layer.adapted(part, own) for layer, part, own in zip(layers, base, hidden, strict=True)]
        return Parts(tuple(parts))


class Parts:
    """Tensors that diffusers would cut out of one."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        self.parts = parts

    def chunk(self, count: int, dim: int) -> tuple[Tensor, ...]:
        return self.parts


def join_projections(transformer: nn.Module) -> None:
    """Compute query, key and value of FLUX's attentions together, where all of them are adapted."""
    for attention in transformer.modules():
        if not isinstance(attention, FluxAttention | Flux2Attention):
            continue
        groups = {}
        for name, parts in JOINED.items():
            if getattr(attention, parts[0], None) is not None:  # the layers of texts, in joint attentions alone
                groups[name] = [getattr(attention, part) for part in parts]
        if all(isinstance(layer, AdaptedLinear) for layers in groups.values() for layer in layers):
            for name, layers in groups.items():
                setattr(attention, name, JoinedProjections.of(layers))
            attention.fused_projections = True
