"""An update is the mean over micro-batches and trained steps, however many there are of either."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from toy_world import ToyPolicy

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampling import Sampler
from pacorl.data.characters import character_prompts
from pacorl.engine.rollout import ConditioningCache, Row, collect
from pacorl.engine.runtime import Runtime
from pacorl.lora.adapters import OldPolicy, adapter_state, add_lora
from pacorl.train.update import Batch, PolicyLoss, update_policy
from pacorl.types import Size


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


def at_step(batch: Batch, place: int) -> Batch:
    """The batch with one of its trained steps."""
    rollout, one = batch.rollout, slice(place, place + 1)
    kept = dataclasses.replace(
        rollout,
        steps_S=rollout.steps_S[one],
        latents_BSNC=rollout.latents_BSNC[:, one],
        next_latents_BSNC=rollout.next_latents_BSNC[:, one],
        log_prob_BS=rollout.log_prob_BS[:, one],
        mean_BSNC=None if rollout.mean_BSNC is None else rollout.mean_BSNC[:, one],
    )
    return dataclasses.replace(batch, rollout=kept)


def gradient(learner: PolicyLoss, batches: Sequence[Batch]) -> torch.Tensor:
    learner.policy.transformer.zero_grad()
    update_policy(learner, batches, runtime=Runtime(), draw=(1, 0, 0))
    learning = [p for p in learner.policy.transformer.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten().double() for p in learning if p.grad is not None])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_update_is_the_mean_over_batches_and_trained_steps(policy: ToyPolicy, objective: str) -> None:
    chosen, cache = OBJECTIVES[objective], ConditioningCache(policy)
    path = chosen.needs == "path"
    sampler = Sampler(size=Size(16, 16), steps=4, sde_steps=(0, 1, 2), stochastic=path, keeps_means=chosen.keeps_means)
    old = None if path else OldPolicy(policy.transformer)
    learner = PolicyLoss(policy, sampler, cache, chosen.options(kl_weight=0.1), old=old)
    prompts, advantage_B = character_prompts("train", 2), torch.tensor([1.0, -0.5])
    batches = [
        Batch(
            collect(
                policy, [Row(prompt, 2 * n), Row(prompt, 2 * n + 1)], sampler=sampler, cache=cache, seed=1, epoch=0
            ),
            advantage_B * (n + 1),
            torch.ones(2, dtype=torch.bool),
        )
        for n, prompt in enumerate(prompts)
    ]
    together = gradient(learner, batches)
    apart = torch.stack([gradient(learner, [at_step(batch, place)]) for batch in batches for place in range(3)])
    assert (apart.norm(dim=1) > 0).all()
    torch.testing.assert_close(together, apart.mean(0), rtol=1e-4, atol=1e-7)
