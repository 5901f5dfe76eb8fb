"""Whether the panels of a set may have a credit of their own, and how much of a gradient it turns into signal.

Two measurements, neither of which trains anything:

**Locality.** Panel credit is unbiased if a panel's noise acts on that panel alone (`grpo.locality`).

**Signal.** Every group of samples gives a gradient gᵢ of its own. What groups share is signal, the rest is noise:
S = mean over pairs of ⟨gᵢ, gⱼ⟩, and the noise is the mean of |gᵢ|² less S. Of the two halves of one group
⟨g, g'⟩ / |g|² is the same within a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from pacorl.core.advantages import AGGREGATES, advantages
from pacorl.core.schedule import seed_of
from pacorl.grpo.locality import Locality, panel_changes, scored
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.grpo.rollout import Draw, draw_samples
from pacorl.grpo.rows import Row
from pacorl.grpo.update import PolicyLoss, update_policy
from pacorl.lab.probe.variance import Estimate, Floats
from pacorl.rewards.reward import Reward
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Prompt, Samples

CREDITS = {"set": 0.0, "half": 0.5, "panel": 1.0}
"""Compared credits by name, as a share of panel credit."""
SKETCH = 2**20
"""Numbers that a gradient is folded into: inner products of longer vectors keep their mean."""
DRAWS = 2000


@dataclass(frozen=True, slots=True)
class CreditSignal:
    """Signal of a group's gradient, by noise."""

    credit: str
    between: Estimate
    """Shared by the groups of different prompts."""
    within: Estimate
    """Shared by the halves of a group."""


@dataclass(frozen=True)
class CreditFinding(Locality):
    """What panel credit leaves out, and what it gains."""

    groups: int
    signals: tuple[CreditSignal, ...]


def measure_credit(
    config: PolicyConfig,
    draw: Draw,
    rewards: Mapping[str, Reward],
    prompts: Sequence[Prompt],
    *,
    advance: Callable[[int], None] = lambda groups: None,
) -> CreditFinding:
    """Draw one group of samples per prompt, judge them, and compare the credits.

    Args:
        config: the run.
        draw: parameters of its rollouts.
        rewards: by name.
        prompts: one group each; a prompt may be repeated.
        advance: called with the number of groups so far.

    Raises:
        ValueError: for prompts without panels or an aggregate without a slope, or if no group has all its scores.
    """
    # Panel credit needs parts of a score, and panels.
    if AGGREGATES[config.advantages.aggregate].slope is None:
        raise ValueError(
            f"advantages.aggregate {config.advantages.aggregate} has no slope to weigh the parts of a score by, so "
            "there is no panel credit to probe; take log_tamed, weighted_sum or gdpo"
        )
    single = next((prompt for prompt in prompts if prompt.grid.count < 2), None)
    if single is not None:
        raise ValueError(f"prompt {single.id} is one image without panels, so there is no panel credit to probe")

    # Draw the groups, in halves whose agreement is the signal.
    gradients: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in CREDITS}
    changes = []
    for number, prompt in enumerate(prompts):
        # Another epoch for every group: its noise is its own.
        of_group = replace(draw, epoch=number, by_panel=True)
        for name, halves in group_gradients(config, of_group, rewards, prompt).items():
            gradients[name].append(halves)
        changes += panel_changes(
            config, of_group, rewards, prompt, children=config.group_size, timeout=config.reward_timeout
        )
        advance(number + 1)
    # A group with a missing score contributes to no credit.
    locality = Locality.of(changes if gradients["set"] else [])

    # The same draws for every credit, so that their difference is no chance.
    signals = []
    for name, of_groups in gradients.items():
        rng = np.random.default_rng(seed_of(config.seed, "probe", "credit"))
        signals.append(CreditSignal(name, *signal_by_noise(of_groups, rng)))
    return CreditFinding(locality.own, locality.rest, len(prompts), tuple(signals))


# --- signal ----------------------------------------------------------------------------------------------------


def group_gradients(
    config: PolicyConfig, draw: Draw, rewards: Mapping[str, Reward], prompt: Prompt
) -> dict[str, tuple[Tensor, Tensor]]:
    """Compute the gradient of each half of a group under each credit; nothing if a score is missing."""
    rows = [Row(prompt, member) for member in range(draw.sampler.tree.group_size)]
    # Draw and score one group.
    samples = Samples()
    table = scored(rewards, rows, draw_samples(draw, rows, samples), timeout=config.reward_timeout)
    if not table.valid_RB.all():
        return {}

    # One loss for all credits: only the advantages differ.
    weights = [reward.weight for reward in config.rewards]
    nodes = draw.sampler.tree.nodes([row.number for row in rows])
    loss = PolicyLoss(
        draw.policy, draw.sampler, draw.cache, options=config.objective, advantage_clip=config.advantages.clip
    )

    # Both halves of the group under each credit.
    gradients = {}
    for name, share in CREDITS.items():
        options = config.advantages.model_copy(update={"credit": share})
        values = advantages(table, options, weights=weights, nodes=nodes)
        first, second = (_gradient(loss, samples, half) for half in _halves(values, prompt.grid.count))
        gradients[name] = (first, second)
    return gradients


def _halves(values: Advantages, panels: int) -> list[Advantages]:
    """Split the advantages of a group in two: each has one half of the samples, and 0 for the other."""
    value_LBP = values.value_LBP
    if value_LBP is None:
        value_LB = values.value_B[None] if values.value_LB is None else values.value_LB
        value_LBP = value_LB[..., None].expand(*value_LB.shape, panels)

    # Zero advantages leave the other half out of the loss.
    first_B = torch.arange(value_LBP.shape[1]) < value_LBP.shape[1] // 2
    halves = []
    for inside_B in (first_B, ~first_B):
        halves.append(replace(values, value_LBP=value_LBP * inside_B[None, :, None]))
    return halves


def _gradient(loss: PolicyLoss, samples: Samples, values: Advantages) -> Tensor:
    """Compute a gradient of the adapter's weights, folded into at most SKETCH numbers."""
    transformer = loss.policy.transformer
    transformer.zero_grad(set_to_none=True)
    update_policy(loss, samples, values, runtime=Runtime(), draw=(0,))
    gradients = []
    for weight in transformer.parameters():
        if weight.grad is not None:
            gradients.append(weight.grad.detach().float().flatten().cpu())
    transformer.zero_grad(set_to_none=True)
    gradient = torch.cat(gradients)
    if len(gradient) <= SKETCH:
        return gradient

    # Add up stretches of a long vector under random signs, which are the same for every vector of its length.
    generator = torch.Generator().manual_seed(0)
    sketch = torch.zeros(SKETCH)
    for stretch in gradient.split(SKETCH):
        sign = torch.randint(0, 2, (len(stretch),), generator=generator) * 2 - 1
        sketch[: len(stretch)] += sign * stretch
    return sketch


def signal_by_noise(halves: Sequence[tuple[Tensor, Tensor]], rng: np.random.Generator) -> tuple[Estimate, Estimate]:
    """Estimate what gradients share, between groups and within them, with 95 % bootstrap intervals over groups.

    Args:
        halves: gradients of the two halves of each group.
        rng: of the bootstrap.

    Returns:
        Signal by noise of a group's gradient, from pairs of groups, and signal by power of a half, from the two halves.
    """
    # Products in fp64: the signal is a small difference of large sums.
    whole = torch.stack([first + second for first, second in halves]).double()
    product_II = (whole @ whole.T).numpy()
    shared_I = np.array([float(first.double() @ second.double()) for first, second in halves])
    power_I = np.array([float(first.norm() ** 2 + second.norm() ** 2) / 2 for first, second in halves])

    # First the estimate itself, with weight 1 for each group, then the bootstrap's weights.
    count = len(halves)
    weights = [np.ones(count), *rng.multinomial(count, np.full(count, 1 / count), size=DRAWS)]
    between = [_between(product_II, weight_I) for weight_I in weights]
    within = [float(weight_I @ shared_I / (weight_I @ power_I)) for weight_I in weights]
    estimates = []
    for values in (between, within):
        low, high = np.nanquantile(values[1:], [0.025, 0.975])
        estimates.append(Estimate(values[0], float(low), float(high)))
    return estimates[0], estimates[1]


def _between(product_II: Floats, weight_I: Floats) -> float:
    """Divide the mean product of two groups by what is left of a group's power."""
    diagonal_I = product_II.diagonal()
    pairs = weight_I.sum() ** 2 - weight_I @ weight_I
    if not pairs:
        return math.nan
    signal = (weight_I @ product_II @ weight_I - weight_I**2 @ diagonal_I) / pairs
    power = weight_I @ diagonal_I / weight_I.sum()
    return float(signal / (power - signal))
