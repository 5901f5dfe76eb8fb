"""Gradients of updates against hand-written sums, and their metrics."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from drawn_adapters import draw_adapter
from rollouts import collect
from toy_world import ToyPolicy

from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.core.sde import log_prob
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import Draw, transition_at
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
    draw_adapter(policy.transformer, std=0.1)
    return policy


def gradient(loss: PolicyLoss, samples: Samples, values: Advantages) -> torch.Tensor:
    loss.draw.policy.transformer.zero_grad()
    update_policy(loss, samples, values, runtime=Runtime())
    learning = [p for p in loss.draw.policy.transformer.parameters() if p.requires_grad]
    return torch.cat([p.grad.flatten().double() for p in learning if p.grad is not None])


TREES = [Tree(1, (8, 1)), Tree(4, (2, 1)), Tree(1, (4, 2)), Tree(2, (2, 2)), Tree(2, (1, 4))]


@pytest.mark.parametrize("tree", [Tree(8, (1, 1)), *TREES], ids=str)
def test_each_sample_acts_on_its_own_steps_with_its_own_advantage(policy: ToyPolicy, tree: Tree) -> None:
    """Against −A·ρ of each sample's path by itself, one forward a step, averaged over samples and steps."""
    policy.transformer.double()
    cache = ConditioningCache(policy)
    sampler = Sampler(size=Size(16, 16), steps=4, sde_steps=(0, 2), tree=tree)
    prompt = set_prompts("train", 1)[0]
    draw = Draw(policy, sampler, cache, seed=1, epoch=0, batch=3)
    samples = collect(draw, [Row(prompt, n) for n in range(8)])
    values = Advantages(torch.randn(8, dtype=torch.float64), torch.ones(8, dtype=torch.bool), {})
    ours = gradient(PolicyLoss(draw, OBJECTIVES["grpo_clip"].options()), samples, values)
    policy.transformer.zero_grad()
    for nodes in samples.nodes:
        for row, node, child in zip(nodes.row_B, nodes.node_B, nodes.child_B, strict=True):
            x, sigma = nodes.latents_VNC[node][None], nodes.sigmas_T[nodes.step]
            velocity = policy.velocity(x, sigma[None], cache.batch([prompt], nodes.size), nodes.size)
            taken = log_prob(
                nodes.next_latents_ENC[child][None], transition_at(sampler, nodes.sigmas_T, nodes.step, x, velocity)
            )
            # The ratio is 1 here, so that its gradient is the log-probability's.
            (-values.value_B[row] * taken.sum() / 16).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.transformer.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


def test_awm_is_flow_matching_weighted_by_each_samples_advantage(policy: ToyPolicy) -> None:
    """Against A·‖v − (ε − x0)‖² of each endpoint by itself, averaged over samples and steps; whether the policy that
    sampled is computed or is the trained one itself makes no difference."""
    policy.transformer.double()
    cache, prompts = ConditioningCache(policy), set_prompts("train", 2)
    sampler = Sampler(size=Size(16, 16), steps=4, sde_steps=(0, 2), tree=Tree(2, (1, 1)), stochastic=False)
    rows = [Row(prompts[number // 2], number) for number in range(4)]
    draw = Draw(policy, sampler, cache, seed=1, epoch=0, batch=2)
    samples = collect(draw, rows)
    values = Advantages(torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.ones(4, dtype=torch.bool), {})
    itself = PolicyLoss(draw, OBJECTIVES["awm"].options())
    ours = gradient(itself, samples, values)
    assert torch.equal(
        ours, gradient(dataclasses.replace(itself, old=AdapterCopy(policy.transformer)), samples, values)
    )
    policy.transformer.zero_grad()
    for rollout in samples.rollouts:
        for index, row in enumerate(rollout.row_B):
            for step in sampler.sde_steps:
                clean, sigma = rollout.final_BNC[index : index + 1], policy.training_sigmas(4, rollout.size)[step]
                noise = policy.noise([seed_of(1, 0, 0, "noised", step, row)], rollout.size)
                conditioning = cache.batch([rollout.prompts[index]], rollout.size)
                noisy = (1 - sigma) * clean + sigma * noise
                error = policy.velocity(noisy, sigma[None], conditioning, rollout.size) - (noise - clean)
                (values.value_B[row] * (error**2).mean() / 8).backward()
    theirs = torch.cat([p.grad.flatten() for p in policy.transformer.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 * float(theirs.abs().max()))


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
    draw = Draw(policy, sampler, cache, seed=1, epoch=0, batch=2)
    return PolicyLoss(draw, spec.options(**options), old=AdapterCopy(policy.transformer)), collect(draw, rows)


VALUES = Advantages(torch.tensor([1.0, -0.5, 2.0, -1.0]), torch.ones(4, dtype=torch.bool), {})


@pytest.mark.parametrize("objective", ["grpo_clip", "awm"])
def test_the_divergence_from_the_base_acts_by_its_weight(policy: ToyPolicy, objective: str) -> None:
    policy.transformer.double()
    losses = [small(policy, objective, kl_weight=weight) for weight in (0.0, 0.1, 0.2)]
    plain, once, twice = (gradient(loss, samples, VALUES) for loss, samples in losses)
    assert (once - plain).norm() > 1e-3 * plain.norm()
    assert (twice - plain - 2 * (once - plain)).norm() < 1e-4 * (once - plain).norm(), "advantages are given in fp32"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_policy_that_has_moved_is_compared_with_the_one_that_sampled(policy: ToyPolicy, objective: str) -> None:
    loss, samples = small(policy, objective)
    name = "ratio_deviation" if OBJECTIVES[objective].needs == "path" else "velocity_change"
    before = update_policy(loss, samples, VALUES, runtime=Runtime())[name]
    with torch.no_grad():
        for value in adapter_state(policy.transformer).values():
            value.add_(torch.randn_like(value) * 0.1)
    after = update_policy(loss, samples, VALUES, runtime=Runtime())[name]
    assert before == 0
    assert after > 1e-4


def test_guard_is_the_clipped_objective_in_units_of_the_step(policy: ToyPolicy) -> None:
    """At the policy that sampled: its ratio's gradient is smaller by the step's std, its loss larger by 1/|dt|."""
    for level, step in enumerate((0, 2)):
        gradients = []
        for objective in ("grpo_clip", "grpo_guard"):
            loss, samples = small(policy, objective)
            nodes = [nodes for nodes in samples.nodes if nodes.level == level]
            gradients.append(gradient(loss, Samples(nodes=nodes), VALUES))
        sigmas, nothing = samples.nodes[0].sigmas_T, torch.zeros(1)
        std = transition_at(loss.draw.sampler, sigmas, step, nothing, nothing).std
        torch.testing.assert_close(
            gradients[1], gradients[0] * std / float(sigmas[step] - sigmas[step + 1]), rtol=1e-4, atol=1e-7
        )


def test_endpoints_that_were_not_judged_teach_nothing(policy: ToyPolicy) -> None:
    loss, samples = small(policy, "diffusion_nft")
    used = dataclasses.replace(VALUES, used_B=torch.tensor([True, True, False, False]))
    alone = gradient(loss, Samples(samples.rollouts[:1]), used)
    assert alone.norm() > 0
    torch.testing.assert_close(gradient(loss, samples, used), alone / 2, rtol=1e-4, atol=1e-7)


def test_metrics_are_means_and_a_deviation_is_the_first_updates_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over samples, then over updates, then over two ranks."""
    assert _summary([(1, {"loss": 0.0}), (3, {"loss": 4.0})]) == {"loss": 3.0}
    history = {"ratio_deviation": [0.0, 0.5], "loss": [1.0, 3.0]}
    assert gather_metrics(history, Runtime()) == {"ratio_deviation": 0.0, "loss": 2.0}
    monkeypatch.setattr(Runtime, "gather", lambda self, own: [own, {"ratio_deviation": 0.25, "loss": 4.0}])
    assert gather_metrics(history, Runtime()) == {"ratio_deviation": 0.25, "loss": 3.0}


def test_a_ratio_that_is_off_before_an_update_is_warned_of() -> None:
    tolerance = 1e-4
    for deviation, is_told in ((0.5, False), (2, True)):
        metrics = {"loss": 1.0, "ratio_deviation": deviation * tolerance}
        assert ("the ratio deviates from 1" in ratio_warning(metrics, tolerance, epoch=1)) == is_told
