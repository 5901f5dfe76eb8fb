"""Forward of an adapted layer, W·x + (α/r)·B·A·x: in three products, or fused in one or two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.models.lora.sharding import has_sharded

ADAPTER = "default"
"""PEFT's name of a model's only adapter."""


class MasterLinear(nn.Linear):
    """Master weight of an adapter's matrix. A bf16 model multiplies by a bf16 copy; gradients reach the master."""

    copy: Tensor | None = None
    """The weight in the model's type; None if the types are equal, or if each forward casts again."""
    version = -1
    """Version of the copied weight."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return F.linear(input, self.weight_in(input.dtype))

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the type of the products."""
        weight: Tensor = self.weight
        if self.copy is not None:
            weight = _Cast.apply(self.weight, self.copy)  # type: ignore[no-untyped-call]
        cast: Tensor = weight.to(dtype)
        return cast

    def refresh(self, dtype: torch.dtype) -> None:
        """Update the copy in this type if the weight has changed since."""
        if dtype == self.weight.dtype:
            self.copy = None
        elif self.copy is None or (self.copy.device, self.copy.dtype) != (self.weight.device, dtype):
            self.copy = self.weight.detach().to(dtype)
            self.version = self.weight._version
        elif self.version != self.weight._version:
            # In place: another tensor would recompile a compiled forward.
            self.copy.copy_(self.weight.detach())
            self.version = self.weight._version


class _Cast(torch.autograd.Function):
    """Replacement of a master by its copy; the gradient goes to the master."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def add_change(base: Tensor, hidden: Tensor, second: MasterLinear, *, scaling: float) -> Tensor:
    """Compute base + scaling·B·hidden in one product, which rounds once: (…, out), (…, r) → (…, out)."""
    weight = second.weight_in(base.dtype)
    rows = torch.addmm(base.flatten(0, -2), hidden.flatten(0, -2), weight.t(), alpha=scaling)
    return rows.view(*base.shape)


def compute_in_model_dtype(transformer: nn.Module) -> None:
    """Let PEFT's layers multiply in the type of their input; the adapter itself stays in fp32.

    PEFT casts the input of each layer to fp32 and the result back. On a bf16 base that buys no accuracy, since the
    base's own products carry the same error, and takes six more kernels a layer, two of them products at 1/15 of the
    rate of bf16.
    """
    masters = []
    for layer in lora_layers(transformer):
        layer.cast_input_dtype_enabled = False
        for matrices in (layer.lora_A, layer.lora_B):
            for matrix in matrices.values():
                # Changing the class keeps PEFT's weights and state names.
                matrix.__class__ = MasterLinear
                masters.append(matrix)
    transformer.register_forward_pre_hook(partial(_refresh, masters))


def _refresh(masters: Sequence[MasterLinear], transformer: nn.Module, _: object = None) -> None:
    """Update stale copies before a forward: once per optimizer step, and outside compiled code."""
    # FSDP2 gathers weights into the same memory without a new version, so stale copies would go unnoticed.
    copied = not has_sharded(transformer)
    # Re-read the dtype: the model may have been cast since, and a stale copy would round.
    dtype = next(
        parameter.dtype
        for name, parameter in transformer.named_parameters()
        if "lora_" not in name and parameter.is_floating_point() and parameter.itemsize > 1
    )
    with torch.inference_mode(mode=False), torch.no_grad():
        for master in masters:
            master.refresh(dtype if copied else master.weight.dtype)


def refresh_copies(transformer: nn.Module) -> int:
    """Update the copies now, and return their bytes."""
    masters = [module for module in transformer.modules() if isinstance(module, MasterLinear)]
    _refresh(masters, transformer)
    return sum(master.copy.nbytes for master in masters if master.copy is not None)


def lora_layers(transformer: nn.Module) -> list[Any]:
    """Return the layers adapted by PEFT."""
    from peft.tuners.lora import LoraLayer

    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]


# --- fused -----------------------------------------------------------------------------------------------------


class MergedLayer:
    """The adapter added to the weight, W + (α/r)·B·A: one product in place of three, for a copy of the weight."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.plain = layer.base_layer.weight.data
        self.merged = self.plain + layer.get_delta_weight(ADAPTER)

    def swap_in(self) -> None:
        self.layer.base_layer.weight.data = self.merged

    def swap_out(self) -> None:
        # Restore the plain weight: PEFT's `unmerge` subtracts, which loses the last bits.
        self.layer.base_layer.weight.data = self.plain


class StackedLayer:
    """The base and the adapter's first matrix in one weight [W; A], so that one product gives W·x and A·x."""

    def __init__(self, layer: Any) -> None:
        base = layer.base_layer
        first = layer.lora_A[ADAPTER]
        self.layer = layer
        self.rows = base.out_features
        # A stack whose weight was replaced since, as by a cast, is made anew.
        stack = getattr(base, "stack", None)
        if stack is None or stack.data_ptr() != base.weight.data_ptr():
            stack = stack_weight(layer, base.weight.device)
        stack[self.rows :].copy_(first.weight)
        if first.copy is not None:
            first.copy = stack[self.rows :]
        self.stack = stack
        self.bias = None if base.bias is None else F.pad(base.bias.data, (0, first.out_features))

    def swap_in(self) -> None:
        self.layer.base_layer.forward = self.forward

    def swap_out(self) -> None:
        del self.layer.base_layer.forward

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer's output, with equal bits if the stacked product uses the same kernel."""
        products = F.linear(x, self.stack, self.bias)
        base, hidden = products.split([self.rows, products.shape[-1] - self.rows], -1)
        return add_change(base, hidden, self.layer.lora_B[ADAPTER], scaling=self.layer.scaling[ADAPTER])


def stack_weight(layer: Any, device: str | torch.device) -> Tensor:
    """Move an adapted layer's weight to the upper rows of a stack [W; A] on the device; A's rows stay empty."""
    base = layer.base_layer
    rank = layer.lora_A[ADAPTER].out_features
    stack: Tensor = base.weight.data.new_empty(base.out_features + rank, base.in_features, device=device)
    stack[: base.out_features].copy_(base.weight.data)
    # The base's weight becomes a view, so that the stack replaces its memory.
    base.stack = stack
    base.weight = nn.Parameter(stack[: base.out_features], requires_grad=False)
    return stack


def place_stacks(transformer: nn.Module, device: str | torch.device) -> None:
    """Place the stacked weights of `FusedLora` on the device, in their stacks.

    A stack is larger than the weight. If it replaced one there, the allocator could reuse no weight's memory for it.
    """
    for layer in lora_layers(transformer):
        if fused_form(layer) is StackedLayer:
            stack_weight(layer, device)


class FusedLora:
    """Fused form of an adapted model, enabled by `swapped_in`. The adapter must not change during its lifetime."""

    @torch.no_grad()
    def __init__(self, transformer: nn.Module) -> None:
        refresh_copies(transformer)
        self.layers: list[MergedLayer | StackedLayer] = []
        for layer in lora_layers(transformer):
            form = fused_form(layer)
            if form:
                self.layers.append(form(layer))

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Compute each layer in its fused form."""
        for fused in self.layers:
            fused.swap_in()
            fused.layer.merged_adapters.append(ADAPTER)  # PEFT then computes the base layer alone
        try:
            yield
        finally:
            for fused in self.layers:
                fused.swap_out()
                fused.layer.merged_adapters.clear()


def fused_form(layer: Any) -> type[MergedLayer | StackedLayer] | None:
    """Return the form that is exact up to rounding; None for a quantised weight, or one not whole on this device."""
    base = layer.base_layer
    if type(base) is not nn.Linear or type(base.weight.data) is not Tensor or base.weight.itemsize == 1:
        return None
    # In bf16 a change below 1/512 of a weight is rounded away: a young adapter, merged, would be the base.
    return MergedLayer if base.weight.dtype in (torch.float32, torch.float64) else StackedLayer


def merged_bytes(transformer: nn.Module) -> int:
    """Return the bytes of merged weights, additional to the plain weights; 0 in bf16."""
    return sum(layer.base_layer.weight.nbytes for layer in lora_layers(transformer) if fused_form(layer) is MergedLayer)


def fuse_lora(transformer: nn.Module, *, enabled: bool) -> FusedLora | None:
    """Return the fused form if it is enabled and supported by at least one layer."""
    supported = enabled and any(fused_form(layer) for layer in lora_layers(transformer))
    return FusedLora(transformer) if supported else None
