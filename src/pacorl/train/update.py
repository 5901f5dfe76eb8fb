"""Rollouts and advantages → gradients: one optimizer step, whatever the objective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.sde import kl, log_prob
from pacorl.engine.rollout import ConditioningCache, transition_at
from pacorl.engine.runtime import Runtime
from pacorl.lora.adapters import AdapterCopy, adapter_off
from pacorl.types import Conditioning, Rollout

if TYPE_CHECKING:
    from pacorl.core.objectives import Loss
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
    """What turns a batch into a loss: the objective, and the forwards that it needs."""

    policy: Policy
    sampler: Sampler
    """What the batches were sampled with."""
    cache: ConditioningCache
    options: ObjectiveOptions
    """Of the objective."""
    advantage_clip: float = 5.0
    """The largest size of an advantage."""
    old: AdapterCopy | None = None
    """The policy that sampled, if it is not the trained one."""

    @property
    def objective(self) -> ObjectiveSpec:
        """The objective whose options these are."""
        return OBJECTIVES[self.options.name]

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(self.policy.transformer.parameters()).device

    def velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        """Of the trained policy, at the rollout's sigma of a step."""
        sigma_B = rollout.sigmas_T[step].to(x_BNC.device).expand(len(x_BNC))
        return self.policy.velocity(x_BNC, sigma_B, conditioning, rollout.size)

    @torch.no_grad()
    def base_velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        """Of the policy without its adapter."""
        with adapter_off(self.policy.transformer):
            return self.velocity(x_BNC, step, conditioning, rollout)

    @torch.no_grad()
    def old_velocity(self, x_BNC: Tensor, step: int, conditioning: Conditioning, rollout: Rollout) -> Tensor:
        """Of the policy that sampled."""
        sampling_weights: AbstractContextManager[None] = self.old.swapped_in() if self.old else nullcontext()
        with sampling_weights:
            return self.velocity(x_BNC, step, conditioning, rollout)


def update_policy(
    policy_loss: PolicyLoss, batches: Sequence[Batch], *, runtime: Runtime, draw: tuple[int, ...]
) -> dict[str, float]:
    """Add the gradient of the mean loss over all batches and trained steps.

    Per trained step this makes one forward and one backward, one forward of the policy that sampled for objectives of
    the endpoint, and one of the base only if the KL weight is above 0.

    Args:
        policy_loss: the objective and the policy.
        batches: the rollout's own, so that before the first update the ratio is exactly 1: another cut would round
            differently.
        runtime: whose processes share the gradient.
        draw: names the noise that endpoints are given.

    Returns:
        The mean of each metric over batches and steps; of a ratio's deviation the largest.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    trained = [(batch, index) for batch in batches for index in range(len(batch.rollout.steps_S))]
    step_loss: Callable[..., Loss] = {"path": _path_loss, "endpoint": _endpoint_loss}[policy_loss.objective.needs]
    for number, (batch, step_index) in enumerate(trained):
        last = number == len(trained) - 1
        with runtime.accumulating(policy_loss.policy.transformer, last=last):
            loss, step_metrics = step_loss(policy_loss, batch, step_index, draw=draw)
            runtime.backward(loss / len(trained), last=last)
        for name, value in (step_metrics | {"loss": float(loss.detach())}).items():
            metrics[name].append(value)
    return {
        name: max(values) if name.startswith(RATIO_DEVIATION) else sum(values) / len(values)
        for name, values in metrics.items()
    }


def _path_loss(policy_loss: PolicyLoss, batch: Batch, step_index: int, *, draw: tuple[int, ...]) -> Loss:
    """The objective at one stochastic step of one micro-batch."""
    rollout, device, options = batch.rollout, policy_loss.device, policy_loss.options
    step, conditioning = rollout.steps_S[step_index], policy_loss.cache.batch(rollout.prompts, rollout.size)
    x, x_next = (latents[:, step_index].to(device) for latents in (rollout.latents_BSNC, rollout.next_latents_BSNC))
    velocity = policy_loss.velocity(x, step, conditioning, rollout)
    transition = transition_at(policy_loss.sampler, rollout.sigmas_T, step, x, velocity)
    loss, metrics = policy_loss.objective.loss(
        Step(
            transition,
            log_prob_B=log_prob(x_next, transition),
            old_log_prob_B=rollout.log_prob_BS[:, step_index].to(device),
            old_mean_BNC=None if rollout.mean_BSNC is None else rollout.mean_BSNC[:, step_index].to(device),
            dt=float(rollout.sigmas_T[step + 1] - rollout.sigmas_T[step]),
            advantage_B=batch.advantage_B.to(device, torch.float32),
        ),
        options,
    )
    metrics = {f"{name}/{step}" if name == RATIO_DEVIATION else name: value for name, value in metrics.items()}
    if options.kl_weight > 0:
        base = policy_loss.base_velocity(x, step, conditioning, rollout)
        reference = transition_at(policy_loss.sampler, rollout.sigmas_T, step, x, base)
        return _with_kl(loss, metrics, kl(transition, reference).mean(), weight=options.kl_weight)
    return loss, metrics


def _endpoint_loss(policy_loss: PolicyLoss, batch: Batch, step_index: int, *, draw: tuple[int, ...]) -> Loss:
    """The objective at one sigma, to which the endpoints of one micro-batch are noised again.

    The divergence from the base is the mean squared difference of velocities, to which the KL of flow matching is
    proportional at each sigma.
    """
    rollout, device, options = batch.rollout, policy_loss.device, policy_loss.options
    step, conditioning = rollout.steps_S[step_index], policy_loss.cache.batch(rollout.prompts, rollout.size)
    sigma, clean = float(rollout.sigmas_T[step]), rollout.final_BNC.to(device)
    noise = policy_loss.policy.noise([seed_of(*draw, "noised", step, row) for row in rollout.row_B], rollout.size)
    noisy = (1 - sigma) * clean + sigma * noise
    # The other policies' forwards come first: they change weights in place, which the trained policy's graph must not
    # see.
    old = policy_loss.old_velocity(noisy, step, conditioning, rollout)
    base = policy_loss.base_velocity(noisy, step, conditioning, rollout) if options.kl_weight > 0 else None
    velocity = policy_loss.velocity(noisy, step, conditioning, rollout)
    loss, metrics = policy_loss.objective.loss(
        Endpoint(
            clean,
            noisy,
            sigma=sigma,
            velocity_BNC=velocity,
            old_velocity_BNC=old,
            advantage_B=batch.advantage_B.to(device, torch.float32),
            advantage_clip=policy_loss.advantage_clip,
            used_B=batch.used_B.to(device),
        ),
        options,
    )
    if base is not None:
        return _with_kl(loss, metrics, ((velocity - base) ** 2).mean(), weight=options.kl_weight)
    return loss, metrics


def _with_kl(loss: Tensor, metrics: dict[str, float], divergence: Tensor, *, weight: float) -> Loss:
    return loss + weight * divergence, metrics | {"kl": float(divergence.detach())}
