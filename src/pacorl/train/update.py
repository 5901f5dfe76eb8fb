"""Rollouts and advantages → gradients: one optimizer step of PaCo-GRPO."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pacorl.core.objectives import Loss
from pacorl.core.sde import kl, log_prob
from pacorl.engine.rollout import ConditioningCache, Sampler, transition_at
from pacorl.models.adapters import adapter_off
from pacorl.types import Rollout

if TYPE_CHECKING:
    from accelerate import Accelerator

    from pacorl.models.policy import Policy


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout's micro-batch and how good its samples were."""

    rollout: Rollout
    advantage_B: Tensor
    """0 for samples that must not be trained on."""


def accumulate_gradients(
    policy: Policy,
    batches: Sequence[Batch],
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    objective: Callable[..., Loss],
    clip_range: float,
    kl_weight: float,
    accelerator: Accelerator,
) -> dict[str, float]:
    """Adds the gradient of the mean loss over all batches and trained steps; returns metrics.

    The batches are the rollout's own, so that before the first update the ratio is exactly 1. Per trained step: one
    forward and one backward, and one forward of the base only where `kl_weight` is above 0.
    """
    metrics: dict[str, list[float]] = defaultdict(list)
    jobs = [(batch, place) for batch in batches for place in range(len(batch.rollout.steps_S))]
    for number, (batch, place) in enumerate(jobs):
        with _synchronised_last(accelerator, policy.transformer, last=number == len(jobs) - 1):
            loss, noted = _step_loss(
                policy,
                batch,
                place,
                sampler=sampler,
                cache=cache,
                objective=objective,
                clip_range=clip_range,
                kl_weight=kl_weight,
            )
            accelerator.backward(loss / len(jobs))
        for name, value in noted.items():
            metrics[name].append(value)
    return {
        name: max(values) if name.startswith("ratio_deviation") else sum(values) / len(values)
        for name, values in metrics.items()
    }


def _synchronised_last(accelerator: Accelerator, module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Gradients cross processes once per update, with its last backward."""
    unsynchronised: AbstractContextManager[None] = nullcontext() if last else accelerator.no_sync(module)
    return unsynchronised


def _step_loss(
    policy: Policy,
    batch: Batch,
    place: int,
    *,
    sampler: Sampler,
    cache: ConditioningCache,
    objective: Callable[..., Loss],
    clip_range: float,
    kl_weight: float,
) -> Loss:
    """The objective at one trained step of one micro-batch."""
    rollout, device = batch.rollout, next(policy.transformer.parameters()).device
    step, conditioning = rollout.steps_S[place], cache.batch(rollout.prompts, rollout.size)
    before, after = rollout.before_BSNC[:, place].to(device), rollout.after_BSNC[:, place].to(device)
    sigma_B = rollout.sigmas_T[step].to(device).expand(len(before))
    velocity = policy.velocity(before, sigma_B, conditioning, rollout.size)
    transition = transition_at(sampler, rollout.sigmas_T, step, before, velocity)
    loss, noted = objective(
        log_prob(after, transition),
        rollout.log_prob_BS[:, place].to(device),
        batch.advantage_B.to(device, torch.float32),
        clip_range=clip_range,
    )
    noted[f"ratio_deviation/{step}"] = noted.pop("ratio_deviation")
    if kl_weight > 0:
        with torch.no_grad(), adapter_off(policy.transformer):
            base = policy.velocity(before, sigma_B, conditioning, rollout.size)
        divergence = kl(transition, transition_at(sampler, rollout.sigmas_T, step, before, base)).mean()
        loss = loss + kl_weight * divergence
        noted["kl"] = float(divergence.detach())
    noted["loss"] = float(loss.detach())
    return loss, noted
