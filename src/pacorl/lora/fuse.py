"""An adapter fused into its weights for forwards that need no gradient, and taken out again bit for bit.

A fused layer is one matrix product instead of three. Both forms are kept and exchanged, so that nothing is ever
subtracted: what is put back is what was there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

ADAPTER = "default"
EXACT = (torch.float32, torch.float64)
"""Types whose rounding an adapter's change survives. In bf16 a change below 1/512 of a weight is rounded away, and a
young adapter's are: the fused model would be the base."""


class FusedLora:
    """Both forms of an adapted model; `swapped_in` shows the fused one.

    Costs one copy of the adapted weights while it lives. The adapter must not change meanwhile.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._pairs = [(layer, layer.base_layer.weight.data, _sum(layer)) for layer in _layers(transformer)]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block the weights hold the adapter."""
        for layer, _, fused in self._pairs:
            layer.base_layer.weight.data = fused
            layer.merged_adapters.append(ADAPTER)
        try:
            yield
        finally:
            for layer, plain, _ in self._pairs:
                layer.base_layer.weight.data = plain
                layer.merged_adapters.clear()


def can_fuse_lora(transformer: nn.Module) -> bool:
    """Whether fusing is exact up to rounding: every adapted weight is whole on this device, in fp32 or better."""
    weights = [layer.base_layer.weight for layer in _layers(transformer)]
    return bool(weights) and all(type(w.data) is Tensor and w.dtype in EXACT for w in weights)


def fused_bytes(transformer: nn.Module) -> int:
    """Bytes of the fused form beside the plain one; 0 if there is none."""
    weights = [layer.base_layer.weight for layer in _layers(transformer)] if can_fuse_lora(transformer) else []
    return sum(weight.numel() * weight.element_size() for weight in weights)


def fuse_lora(transformer: nn.Module, *, enabled: bool) -> FusedLora | None:
    """The fused form, if it is enabled and exact."""
    return FusedLora(transformer) if enabled and can_fuse_lora(transformer) else None


def maybe_fused(fused: FusedLora | None) -> AbstractContextManager[None]:
    """`fused.swapped_in()`, if there is one."""
    return fused.swapped_in() if fused else nullcontext()


def _layers(transformer: nn.Module) -> list[Any]:
    from peft.tuners.lora import Linear

    return [module for module in transformer.modules() if isinstance(module, Linear)]


@torch.no_grad()
def _sum(layer: Any) -> Tensor:
    fused: Tensor = layer.base_layer.weight.data + layer.get_delta_weight(ADAPTER)
    return fused
