"""Frozen weights in 8 bits: what a layer computes, what it learns through, and whole runs on them."""

from __future__ import annotations

import pytest
import torch
from tests.twins import tiny_flux
from torch import Tensor, nn

from pacorl.models.adapters import add_lora
from pacorl.models.int8 import QuantizedLinear, parameter_count, quantize_model, unpack

LARGEST_ERROR = 0.012
"""Of the weights, relative: half a step over normal weights."""


def layer(*, dtype: torch.dtype = torch.float32) -> tuple[QuantizedLinear, nn.Linear]:
    """A packed layer, and a plain one that has its unpacked weight."""
    torch.manual_seed(0)
    plain = nn.Linear(192, 128, dtype=dtype).requires_grad_(False)
    packed = QuantizedLinear(plain.weight, plain.bias)
    plain.weight = nn.Parameter(unpack(packed.weight, packed.scale, packed.dtype), False)
    return packed, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_unpacked_weights(dtype: torch.dtype) -> None:
    packed, plain = layer(dtype=dtype)
    x = torch.randn(2, 5, 192, dtype=dtype)
    outputs, gradients = [], []
    for module in (packed, plain):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        output.square().sum().backward()
        outputs.append(output)
        gradients.append(leaf.grad)
    assert torch.equal(*outputs)
    assert torch.equal(*gradients)
    with torch.inference_mode():
        assert torch.equal(packed(x), outputs[0])


def test_rows_of_any_size_are_equally_near() -> None:
    """Rows of a real weight differ by orders of magnitude: each one's error is relative to its own size."""
    torch.manual_seed(0)
    weight = torch.randn(8, 192) * 10.0 ** torch.arange(-4, 4)[:, None]
    packed = QuantizedLinear(weight, None)
    error_O = (unpack(packed.weight, packed.scale, packed.dtype) - weight).norm(dim=1) / weight.norm(dim=1)
    assert error_O.max() < LARGEST_ERROR


def test_the_backward_keeps_the_packed_weight_alone() -> None:
    packed, _ = layer()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed(torch.randn(3, 192, requires_grad=True))
    assert {tensor.data_ptr() for tensor in kept} == {packed.weight.data_ptr(), packed.scale.data_ptr()}


# --- models ----------------------------------------------------------------------------------------------------


def test_adapters_lie_on_a_packed_base_and_are_never_added_to_it() -> None:
    transformer = tiny_flux(["a red fox"]).transformer
    plain = parameter_count(transformer)
    quantize_model(transformer, "int8", device="cpu")
    packed = [module for module in transformer.modules() if isinstance(module, QuantizedLinear)]
    # All linear layers of the blocks, the modulation among them, and none that leads in or out.
    assert all("blocks." in name for name, module in transformer.named_modules() if isinstance(module, QuantizedLinear))
    assert not any(type(m) is nn.Linear for b in transformer.transformer_blocks for m in b.modules())
    assert type(transformer.proj_out) is nn.Linear
    assert parameter_count(transformer) == plain
    assert len(packed) > 40

    add_lora(transformer, rank=4, alpha=8, targets=["attn.to_q", "ff.net.2"])
    trained = {name for name, parameter in transformer.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
