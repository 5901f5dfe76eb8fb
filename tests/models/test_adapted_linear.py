"""What an adapted layer computes in: the model's own type, from weights that are learned in fp32."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from drawn_adapters import draw_adapter
from peft.tuners import lora
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.models.adapters import add_lora, lora_layers


def adapted(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).to(dtype)
    add_lora(model, rank=4, alpha=8, targets=["0", "2"])
    draw_adapter(model, std=0.05)
    return model


def in_peft(model: nn.Module) -> nn.Module:
    """The model with PEFT's own layers."""
    theirs = deepcopy(model)
    for layer in lora_layers(theirs):
        layer.__class__ = lora.Linear
    return theirs


def learned(model: nn.Module) -> list[Tensor]:
    """Its output of a fixed input, and the gradients of its adapter."""
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    output = model(x)
    output.float().square().sum().backward()
    return [output, *(p.grad for p in model.parameters() if p.requires_grad and p.grad is not None)]


class Products(TorchDispatchMode):
    """Notes the types of what is multiplied within the block."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("mm", "addmm", "bmm"):
            self.dtypes |= {arg.dtype for arg in args if isinstance(arg, Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_the_adapters_own_type_the_bits_are_those_of_peft(dtype: torch.dtype) -> None:
    model = adapted(dtype)
    ours, theirs = learned(model), learned(in_peft(model))
    assert len(ours) == len(theirs) == 5
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_model_in_bf16_multiplies_in_bf16_alone_with_gradients_as_good_as_in_fp32() -> None:
    model = adapted(torch.bfloat16)
    with Products() as products:
        ours = learned(model)[1:]
    assert products.dtypes == {torch.bfloat16}
    assert {gradient.dtype for gradient in ours} == {torch.float32}
    whole = learned(in_peft(model).float())[1:]
    for one, other in zip(ours, whole, strict=True):
        assert torch.cosine_similarity(one.flatten(), other.flatten(), dim=0) > 0.999
