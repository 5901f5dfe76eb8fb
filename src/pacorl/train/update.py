"""Rollouts and advantages → gradients: one optimizer step, whatever the objective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.objectives import Endpoint, Loss, Objective, Step
from pacorl.core.sde import kl, log_prob
from pacorl.engine.rollout import ConditioningCache, Sampler, seed_of, transition_at
from pacorl.engine.runtime import Runtime
from pacorl.lora.adapters import AdapterCopy, adapter_off
from pacorl.types import Conditioning, Rollout

if TYPE_CHECKING:
    from pacorl.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout's micro-batch and how good its samples were."""

    rollout: Rollout
    advantage_B: Tensor
    """0 for samples that must not be trained on."""
    used_B: Tensor
    """False for those."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What turns a batch into a loss."""

    policy: Policy
    sampler: Sampler
    cache: ConditioningCache
    objective: Objective
    settings: Mapping[str, float]
    """The objective's own."""
    kl_weight: float = 0.0
    """Of the divergence from the base; its forward is made only above 0."""
    old: AdapterCopy | None = None
    """The policy that sampled, where it is not the trained one."""

    def velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        sigma_B = rollout.sigmas_T[step].to(x_BNC.device).expand(len(x_BNC))
        return self.policy.velocity(x_BNC, sigma_B, conditioning, rollout.size)

    @torch.no_grad()
    def base_velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        """Without the adapter."""
        with adapter_off(self.policy.transformer):
            return self.velocity(x_BNC, step, conditioning, rollout)

    @torch.no_grad()
    def old_velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        """As it was sampled with."""
        wearing: AbstractContextManager[None] = self.old.applied() if self.old else nullcontext()
        with wearing:
            return self.velocity(x_BNC, step, conditioning, rollout)


def update_policy(
    learner: PolicyLoss, batches: Sequence[Batch], *, runtime: Runtime, draw: tuple[int, ...]
) -> dict[str, float]:
    """Adds the gradient of the mean loss over all batches and trained steps; returns metrics.

    The batches are the rollout's own, so that before the first update the ratio is exactly 1. Per trained step: one
    forward and one backward, one forward of the policy that sampled for objectives of the endpoint, and one of the
    base only where the KL weight is above 0. `draw` names the noise that endpoints are given.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    jobs = [(batch, place) for batch in batches for place in range(len(batch.rollout.steps_S))]
    step_loss: Callable[..., Loss] = {"path": _path_loss, "endpoint": _endpoint_loss}[learner.objective.needs]
    for number, (batch, place) in enumerate(jobs):
        last = number == len(jobs) - 1
        with runtime.accumulating(learner.policy.transformer, last=last):
            loss, noted = step_loss(learner, batch, place, draw=draw)
            runtime.backward(loss / len(jobs), last=last)
        for name, value in (noted | {"loss": float(loss.detach())}).items():
            metrics[name].append(value)
    return {
        name: max(values) if name.startswith("ratio_deviation") else sum(values) / len(values)
        for name, values in metrics.items()
    }


def _path_loss(learner: PolicyLoss, batch: Batch, place: int, *, draw: tuple[int, ...]) -> Loss:
    """The objective at one stochastic step of one micro-batch."""
    rollout, device = batch.rollout, next(learner.policy.transformer.parameters()).device
    step, conditioning = rollout.steps_S[place], learner.cache.batch(rollout.prompts, rollout.size)
    before, after = rollout.latents_BSNC[:, place].to(device), rollout.next_latents_BSNC[:, place].to(device)
    velocity = learner.velocity(before, step, conditioning, rollout)
    transition = transition_at(learner.sampler, rollout.sigmas_T, step, before, velocity)
    loss, noted = learner.objective.loss(
        Step(
            transition,
            log_prob_B=log_prob(after, transition),
            old_log_prob_B=rollout.log_prob_BS[:, place].to(device),
            old_mean_BNC=None if rollout.mean_BSNC is None else rollout.mean_BSNC[:, place].to(device),
            dt=float(rollout.sigmas_T[step + 1] - rollout.sigmas_T[step]),
            advantage_B=batch.advantage_B.to(device, torch.float32),
        ),
        **learner.settings,
    )
    noted[f"ratio_deviation/{step}"] = noted.pop("ratio_deviation")
    if learner.kl_weight > 0:
        base = learner.base_velocity(before, step, conditioning, rollout)
        reference = transition_at(learner.sampler, rollout.sigmas_T, step, before, base)
        return _with_kl(loss, noted, kl(transition, reference).mean(), weight=learner.kl_weight)
    return loss, noted


def _endpoint_loss(learner: PolicyLoss, batch: Batch, place: int, *, draw: tuple[int, ...]) -> Loss:
    """The objective at one sigma, to which the endpoints of one micro-batch are noised again.

    The divergence from the base is the mean squared difference of velocities, to which the KL of flow matching is
    proportional at each sigma.
    """
    rollout, device = batch.rollout, next(learner.policy.transformer.parameters()).device
    step, conditioning = rollout.steps_S[place], learner.cache.batch(rollout.prompts, rollout.size)
    sigma, clean = float(rollout.sigmas_T[step]), rollout.final_BNC.to(device)
    noise = learner.policy.noise([seed_of(*draw, "noised", step, row) for row in rollout.row_B], rollout.size)
    noisy = (1 - sigma) * clean + sigma * noise
    # Before the trained policy's own, whose graph must not see weights change.
    old = learner.old_velocity(noisy, step, conditioning, rollout)
    base = learner.base_velocity(noisy, step, conditioning, rollout) if learner.kl_weight > 0 else None
    velocity = learner.velocity(noisy, step, conditioning, rollout)
    loss, noted = learner.objective.loss(
        Endpoint(
            clean,
            noisy,
            sigma=sigma,
            velocity_BNC=velocity,
            old_velocity_BNC=old,
            advantage_B=batch.advantage_B.to(device, torch.float32),
            used_B=batch.used_B.to(device),
        ),
        **learner.settings,
    )
    if base is not None:
        return _with_kl(loss, noted, ((velocity - base) ** 2).mean(), weight=learner.kl_weight)
    return loss, noted


def _with_kl(loss: Tensor, noted: dict[str, float], divergence: Tensor, *, weight: float) -> Loss:
    return loss + weight * divergence, noted | {"kl": float(divergence.detach())}
