"""What an adapted layer computes in: the model's own type, from weights that are learned in fp32."""

from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
from edit_twins import flux_policy
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from tests.twins import tiny_flux_transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pacorl.grpo.conditioning import ConditioningCache
from pacorl.models.adapters import adapter_state, add_lora, lora_layers
from pacorl.models.policies.flux import LORA_TARGETS, FluxPolicy
from pacorl.tiny.world import set_prompts
from pacorl.types import Size

SIZE = Size(32, 32)
RANK, ALPHA = 4, 8
MATRICES = 2 * (2 * 12 + 4 * 3)
"""Of the adapter: two double blocks of 12 modules and four single ones of 3."""


def adapt(transformer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    add_lora(transformer, rank=RANK, alpha=ALPHA, targets=LORA_TARGETS)
    with torch.no_grad():
        for value in adapter_state(transformer).values():
            value.copy_(torch.randn_like(value) * 0.05)
    return transformer


@pytest.fixture
def flux16() -> FluxPolicy:
    """A tiny FLUX in bf16 with an adapter that does something."""
    policy = flux_policy()
    policy.pipeline.to(torch.bfloat16)
    adapt(policy.transformer)
    return policy


def velocity(policy: FluxPolicy, cache: ConditioningCache) -> Tensor:
    conditioning = cache.batch(set_prompts("dev", 1), SIZE)
    return policy.velocity(policy.noise([0], SIZE), torch.tensor([0.75]), conditioning, SIZE)


class Operations(TorchDispatchMode):
    """Counts what runs within the block, by name and the types of what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[tuple[str, tuple[torch.dtype, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counted[name, tuple(arg.dtype for arg in args if isinstance(arg, Tensor))] += 1
        return func(*args, **(kwargs or {}))

    def of(self, *names: str, dtype: torch.dtype) -> int:
        return sum(n for (name, dtypes), n in self.counted.items() if name in names and dtype in dtypes)


@pytest.mark.slow
def test_a_model_in_bf16_multiplies_in_bf16_alone(flux16: FluxPolicy) -> None:
    cache = ConditioningCache(flux16)
    products = ("mm", "addmm", "bmm")
    with Operations() as first:
        velocity(flux16, cache).sum().backward()
    assert first.of(*products, dtype=torch.float32) == 0
    assert first.of(*products, dtype=torch.bfloat16) > 3 * MATRICES
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 for p in flux16.transformer.parameters() if p.requires_grad
    )


@pytest.mark.slow
def test_gradients_are_as_good_as_those_of_an_adapter_in_fp32(flux16: FluxPolicy) -> None:
    """Against a base of the same values that computes in fp32 throughout (2509: .028 for PEFT's own fp32 adapter)."""
    cache = ConditioningCache(flux16)

    def gradient(transformer: nn.Module) -> Tensor:
        transformer.zero_grad()
        flux16.transformer, trained = transformer, flux16.transformer
        velocity(flux16, cache).square().mean().backward()
        flux16.transformer = trained
        return torch.cat([p.grad.flatten() for p in transformer.parameters() if p.grad is not None])

    ours = gradient(flux16.transformer)
    in_peft = deepcopy(flux16.transformer)
    for layer in lora_layers(in_peft):
        layer.__class__ = lora.Linear
    theirs = gradient(in_peft)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999


def test_in_fp32_the_bits_are_those_of_peft(flux: FluxPolicy) -> None:
    ours: Any = tiny_flux_transformer()
    theirs: Any = tiny_flux_transformer()
    for transformer in (ours, theirs):
        transformer.load_state_dict(flux.pipeline.transformer.state_dict())
    adapt(ours)
    inject_adapter_in_model(LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(LORA_TARGETS)), theirs)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 4, ours.config.in_channels)
    inputs = {
        "hidden_states": x,
        "encoder_hidden_states": torch.randn(1, 3, ours.config.joint_attention_dim),
        "pooled_projections": torch.randn(1, ours.config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.randn(4, 3),
        "txt_ids": torch.zeros(3, 3),
    }
    gradients = []
    for transformer in (ours, theirs):
        output = transformer(**inputs).sample
        output.square().sum().backward()
        gradients.append([output, *(p.grad for n, p in transformer.named_parameters() if "lora_" in n)])
    assert all(torch.equal(mine, yours) for mine, yours in zip(*gradients, strict=True))
