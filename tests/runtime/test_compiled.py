"""Compiled blocks: one form for sampling and training, so that the ratio before an update is exactly 1."""

from dataclasses import replace

import pytest
import torch
from compiled import PROMPTS, SIZE, small_policy
from rollouts import collect
from torch import nn

from pacorl.core.devices import INT8
from pacorl.core.objectives.grpo_clip import GrpoClip
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.models.int8 import quantize_model
from pacorl.models.policies.flux import FluxPolicy
from pacorl.runtime.compiled import GRAPHS, compile_blocks
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Samples

pytestmark = [pytest.mark.compiles, pytest.mark.nightly]

SAMPLER = Sampler(size=SIZE, steps=3, sde_steps=(0, 1), tree=Tree(seeds=2, branches=(1, 1)))


@pytest.fixture
def dtype() -> torch.dtype:
    return torch.float32


@pytest.fixture
def policy(dtype: torch.dtype) -> FluxPolicy:
    return small_policy(dtype)


def draw_of(policy: FluxPolicy, *, as_trained: bool, sampler: Sampler = SAMPLER) -> Draw:
    return Draw(policy, sampler, ConditioningCache(policy), seed=1, epoch=0, batch=2, as_trained=as_trained)


def sampled(draw: Draw) -> Samples:
    return collect(draw, [Row(PROMPTS[0], 0), Row(PROMPTS[0], 1)])


def test_every_repeated_block_is_compiled_in_place(policy: FluxPolicy) -> None:
    names = list(policy.transformer.state_dict())
    compile_blocks(policy.transformer)
    compiled = [name for name, module in policy.transformer.named_modules() if module._compiled_call_impl is not None]
    assert compiled == ["transformer_blocks.0", "single_transformer_blocks.0"]
    assert list(policy.transformer.state_dict()) == names
    assert torch._dynamo.config.recompile_limit >= GRAPHS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probs_of_compiled_blocks_are_equal_in_sampling_and_training(
    policy: FluxPolicy, dtype: torch.dtype
) -> None:
    transformer: nn.Module = policy.transformer
    # A step without noise is a graph more of each block, which one type compiles.
    sampler = SAMPLER if dtype == torch.float32 else replace(SAMPLER, steps=2)
    draw = draw_of(policy, as_trained=True, sampler=sampler)
    eager = sampled(draw)
    compile_blocks(transformer)
    samples = sampled(draw)
    advantages = Advantages(torch.tensor([1.0, -1.0], dtype=torch.float64), torch.ones(2, dtype=torch.bool), {})
    metrics = update_policy(PolicyLoss(draw, GrpoClip(clip_range=1e-4)), samples, advantages, runtime=Runtime())
    assert metrics["ratio_deviation"] == 0.0
    assert all(p.grad is not None and p.grad.any() for p in transformer.parameters() if p.requires_grad)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(samples.rollouts[0].final_BNC, eager.rollouts[0].final_BNC, rtol=0, atol=tolerance)


def test_blocks_that_recompute_keep_their_inputs_alone_and_have_the_same_gradients(policy: FluxPolicy) -> None:
    transformer: nn.Module = policy.transformer
    cache, found, kept = ConditioningCache(policy), [], []
    weights = {weight.data_ptr() for weight in transformer.parameters()}
    for recompute in (False, True):
        torch._dynamo.reset()
        transformer.zero_grad()
        compile_blocks(transformer, recompute=recompute, backend="aot_eager_decomp_partition")
        sizes: list[int] = []

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            if tensor.data_ptr() not in weights:
                sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            velocity = policy.velocity(policy.noise([0], SIZE), torch.full((1,), 0.5), cache.batch(PROMPTS, SIZE), SIZE)
        velocity.square().sum().backward()
        found.append([velocity.detach(), *(p.grad for p in transformer.parameters() if p.grad is not None)])
        kept.append(sum(sizes))
    compile_blocks(transformer)  # the default for what follows
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    assert kept[1] < kept[0]


def test_compiled_layers_keep_their_packed_weights_for_the_backward() -> None:
    """Unpacked ones would be the whole model in bf16 once more."""
    torch._dynamo.reset()
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))])
    model.requires_grad_(False).to(torch.bfloat16)
    quantize_model(model, INT8, device="cpu")
    compile_blocks(model, packed=True, backend="aot_eager_decomp_partition")
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    x = torch.randn(2, 64, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = model.blocks[0](x)
    y.sum().backward()
    assert x.grad is not None
    weights = [tensor for tensor in kept if tensor.numel() == 64 * 256]
    assert len(weights) == 2
    assert {tensor.element_size() for tensor in weights} == {1}
