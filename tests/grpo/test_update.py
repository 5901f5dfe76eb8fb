"""An update is the mean over micro-batches and trained steps, however many there are of either."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from rollouts import collect
from toy_world import ToyPolicy

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, _summary, gather_metrics, ratio_warning, update_policy
from pacorl.models.adapters import AdapterCopy, adapter_state, add_lora
from pacorl.runtime.processes import Runtime
from pacorl.tiny.world import set_prompts
from pacorl.types import Advantages, Samples, Size


@pytest.fixture
def policy() -> ToyPolicy:
    """With an adapter that does something."""
    torch.manual_seed(0)
    policy = ToyPolicy()
    add_lora(policy.transformer, rank=2, alpha=4, targets=policy.lora_targets)
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.copy_(torch.randn_like(value) * 0.1)
    return policy


def gradient(loss: PolicyLoss, samples: Samples, values: Advantages) -> torch.Tensor:
    loss.policy.transformer.zero_grad()
    update_policy(loss, samples, values, runtime=Runtime(), draw=(1, 0, 0))
    learning = [p for p in loss.policy.transformer.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten().double() for p in learning if p.grad is not None])


def small(policy: ToyPolicy, objective: str, **options: float) -> tuple[PolicyLoss, Samples]:
    """Two samples of two prompts at two trained steps, a micro-batch per prompt."""
    spec, cache = OBJECTIVES[objective], ConditioningCache(policy)
    path = spec.needs == "path"
    sampler = Sampler(
        size=Size(16, 16),
        steps=4,
        sde_steps=(0, 2),
        tree=Tree(2, (1, 1)),
        stochastic=path,
        keeps_means=spec.keeps_means,
    )
    prompts = set_prompts("train", 2)
    rows = [Row(prompts[number // 2], number) for number in range(4)]
    samples = collect(Draw(policy, sampler, cache, seed=1, epoch=0, batch=2), rows)
    return PolicyLoss(policy, sampler, cache, spec.options(**options), old=AdapterCopy(policy.transformer)), samples


VALUES = Advantages(torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.ones(4, dtype=torch.bool), {})


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_policy_that_has_moved_is_compared_with_the_one_that_sampled(policy: ToyPolicy, objective: str) -> None:
    loss, samples = small(policy, objective)
    name = "ratio_deviation/0" if OBJECTIVES[objective].needs == "path" else "velocity_change"
    before = update_policy(loss, samples, VALUES, runtime=Runtime(), draw=(1, 0, 0))[name]
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.add_(torch.randn_like(value) * 0.1)
    after = update_policy(loss, samples, VALUES, runtime=Runtime(), draw=(1, 0, 0))[name]
    assert before == 0
    assert after > 1e-4


def test_endpoints_that_were_not_judged_teach_nothing(policy: ToyPolicy) -> None:
    loss, samples = small(policy, "diffusion_nft")
    used = dataclasses.replace(VALUES, used_B=torch.tensor([True, True, False, False]))
    alone = gradient(loss, Samples(samples.rollouts[:1]), used)
    assert alone.norm() > 0
    torch.testing.assert_close(gradient(loss, samples, used), alone / 2, rtol=1e-4, atol=1e-7)


def test_metrics_are_means_over_samples_and_a_deviation_is_the_first_updates() -> None:
    assert _summary([(1, {"loss": 0.0}), (3, {"loss": 4.0})]) == {"loss": 3.0}
    history = {"ratio_deviation/1": [0.0, 0.5], "loss": [1.0, 3.0]}
    assert gather_metrics(history, Runtime()) == {"ratio_deviation/1": 0.0, "loss": 2.0}


def test_a_ratio_that_is_off_before_an_update_is_warned_of() -> None:
    tolerance = 1e-4
    for deviation, is_told in ((0.5, False), (2, True)):
        metrics = {"loss": 1.0, "ratio_deviation/1": deviation * tolerance}
        assert ("the ratio deviates from 1" in ratio_warning(metrics, tolerance, epoch=1)) == is_told
