"""How an adapted layer computes, W·x + (α/r)·B·A·x: in three products, or fused in one or two."""

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
"""PEFT's name of the one adapter that a model has here."""


class MasterLinear(nn.Linear):
    """One matrix of an adapter. A model in bf16 multiplies by a copy of it in bf16, and gradients reach the master."""

    copy: Tensor | None = None
    """The weight in the model's type; None if it has that type itself, or is cast anew in each forward."""
    version = -1
    """Of the weight that was copied."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's own name
        return F.linear(input, self.weight_in(input.dtype))

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """The weight in the type that products are computed in."""
        weight: Tensor = self.weight
        if self.copy is not None:
            weight = _Cast.apply(self.weight, self.copy)  # type: ignore[no-untyped-call]
        cast: Tensor = weight.to(dtype)
        return cast

    def refresh(self, dtype: torch.dtype) -> None:
        """Follow the weight with a copy of that type, if it has changed since the last one."""
        if dtype == self.weight.dtype:
            self.copy = None
        elif self.copy is None or (self.copy.device, self.copy.dtype) != (self.weight.device, dtype):
            self.copy, self.version = self.weight.detach().to(dtype), self.weight._version
        elif self.version != self.weight._version:
            # In place: a compiled forward is compiled anew for another tensor.
            self.copy.copy_(self.weight.detach())
            self.version = self.weight._version


class _Cast(torch.autograd.Function):
    """The copy in place of its master, to which the gradient goes."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = master.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].to(ctx.dtype), None


def add_change(base: Tensor, hidden: Tensor, second: MasterLinear, *, scaling: float) -> Tensor:
    """base + scaling·B·hidden in one product, which rounds once: (…, out), (…, r) → (…, out)."""
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
                # Its weights and its name in the state stay what PEFT made them.
                matrix.__class__ = MasterLinear
                masters.append(matrix)
    transformer.register_forward_pre_hook(partial(_refresh, masters))


def _refresh(masters: Sequence[MasterLinear], transformer: nn.Module, _: object = None) -> None:
    """Make the copies of what has changed, before a forward: once per optimizer step, and outside of compiled code."""
    # FSDP2 gathers weights into the same memory without counting a version, so a copy could not know that it is old.
    copied = not has_sharded(transformer)
    # Asked anew, since a model may be cast with its adapter on; a copy in the earlier type would round to that.
    dtype = _computing_dtype(transformer)
    with torch.inference_mode(mode=False), torch.no_grad():
        for master in masters:
            master.refresh(dtype if copied else master.weight.dtype)


def _computing_dtype(transformer: nn.Module) -> torch.dtype:
    """Of a weight that computes: a quantised one is stored in integers or in one byte."""
    return next(
        parameter.dtype
        for name, parameter in transformer.named_parameters()
        if "lora_" not in name and parameter.is_floating_point() and parameter.itemsize > 1
    )


def refresh_copies(transformer: nn.Module) -> int:
    """Make the copies now.

    Returns:
        Their bytes.
    """
    masters = [module for module in transformer.modules() if isinstance(module, MasterLinear)]
    _refresh(masters, transformer)
    return sum(master.copy.nbytes for master in masters if master.copy is not None)


def lora_layers(transformer: nn.Module) -> list[Any]:
    """The layers that PEFT has adapted."""
    from peft.tuners.lora import LoraLayer

    return [module for module in transformer.modules() if isinstance(module, LoraLayer)]


# --- fused -----------------------------------------------------------------------------------------------------


class MergedLayer:
    """The adapter added to the weight, W + (α/r)·B·A: one product in place of three, for a copy of the weight."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.plain = layer, layer.base_layer.weight.data
        self.merged = self.plain + layer.get_delta_weight(ADAPTER)

    def swap_in(self) -> None:
        self.layer.base_layer.weight.data = self.merged

    def swap_out(self) -> None:
        # What was there is put back: PEFT's `unmerge` subtracts, which loses the last bits.
        self.layer.base_layer.weight.data = self.plain


class StackedLayer:
    """The base and the adapter's first matrix in one weight [W; A], so that one product gives W·x and A·x."""

    def __init__(self, layer: Any) -> None:
        self.layer, base, first = layer, layer.base_layer, layer.lora_A[ADAPTER]
        self.rows, rank = base.out_features, first.out_features
        stack = getattr(base, "stack", None)
        if stack is None or stack.data_ptr() != base.weight.data_ptr():
            stack = stack_weight(layer, base.weight.device)
        stack[self.rows :].copy_(first.weight)
        if first.copy is not None:
            first.copy = stack[self.rows :]
        self.stack, self.bias = stack, None if base.bias is None else F.pad(base.bias.data, (0, rank))

    def swap_in(self) -> None:
        self.layer.base_layer.forward = self.forward

    def swap_out(self) -> None:
        del self.layer.base_layer.forward

    def forward(self, x: Tensor) -> Tensor:
        """As the layer apart, and so to the bit wherever the two products take the kernel of one."""
        products = F.linear(x, self.stack, self.bias)
        base, hidden = products.split([self.rows, products.shape[-1] - self.rows], -1)
        return add_change(base, hidden, self.layer.lora_B[ADAPTER], scaling=self.layer.scaling[ADAPTER])


def stack_weight(layer: Any, device: str | torch.device) -> Tensor:
    """Move an adapted layer's weight to the upper rows of a stack [W; A] on the device; A's rows are left empty."""
    base, rank = layer.base_layer, layer.lora_A[ADAPTER].out_features
    stack: Tensor = base.weight.data.new_empty(base.out_features + rank, base.in_features, device=device)
    stack[: base.out_features].copy_(base.weight.data)
    # The base's weight becomes a view, so that the stack takes no memory beside it.
    base.stack, base.weight.data = stack, stack[: base.out_features]
    return stack


def place_stacks(transformer: nn.Module, device: str | torch.device) -> None:
    """Place the weights that `FusedLora` stacks on the device, in their stacks.

    A stack is larger than the weight. If it replaced one there, the allocator could reuse no weight's memory for it.
    """
    for layer in lora_layers(transformer):
        if fused_form(layer) is StackedLayer:
            stack_weight(layer, device)


class FusedLora:
    """The fused form of an adapted model; `swapped_in` shows it. The adapter must not change while it lives."""

    @torch.no_grad()
    def __init__(self, transformer: nn.Module) -> None:
        refresh_copies(transformer)
        self.layers = [form(layer) for layer in lora_layers(transformer) if (form := fused_form(layer))]

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Within the block each layer computes in its fused form."""
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
    """The form that is exact up to rounding; None for a weight that is quantised, or not whole on this device."""
    base = layer.base_layer
    if type(base) is not nn.Linear or type(base.weight.data) is not Tensor or base.weight.itemsize == 1:
        return None
    # In bf16 a change below 1/512 of a weight is rounded away, and a young adapter's are: merged it would be the base.
    return MergedLayer if base.weight.dtype in (torch.float32, torch.float64) else StackedLayer


def merged_bytes(transformer: nn.Module) -> int:
    """Bytes of the merged weights beside the plain ones; 0 in bf16."""
    return sum(layer.base_layer.weight.nbytes for layer in lora_layers(transformer) if fused_form(layer) is MergedLayer)


def fuse_lora(transformer: nn.Module, *, enabled: bool) -> FusedLora | None:
    """The fused form, if it is enabled and some layer has one."""
    return FusedLora(transformer) if enabled and any(map(fused_form, lora_layers(transformer))) else None
