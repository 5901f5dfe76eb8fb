"""Optimizer steps from rollouts and advantages, for every objective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.devices import to_device, widest_float
from pacorl.core.grid import Panels
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, Endpoint, ObjectiveOptions, Step, objective_loss
from pacorl.core.schedule import seed_of
from pacorl.core.sde import Transition, kl, log_prob
from pacorl.grpo.rollout import Draw, transition_at, velocity_at
from pacorl.models.adapters import AdapterCopy, adapter_off
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, NodeBatch, Prompt, Rollout, Samples, Size

if TYPE_CHECKING:
    from pacorl.core.objectives import Loss, Metric
    from pacorl.models.policies.pipeline import PipelinePolicy


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """An objective and the policies whose velocities it compares."""

    draw: Draw
    """Parameters of the epoch's samples, which training replays."""
    options: ObjectiveOptions
    advantage_clip: float = 5.0
    """Largest absolute value of an advantage."""
    old: AdapterCopy | None = None
    """The sampling policy; None if it equals the trained policy bit for bit."""


def update_policy(
    policy_loss: PolicyLoss, samples: Samples, values: Advantages, *, runtime: Runtime
) -> dict[str, float]:
    """Add the gradient of the mean loss over all samples and trained steps.

    Each distinct latent of a trained step (a node) costs one forward and one backward, for any number of samples below
    it: their losses share the mean of its transition, ∇Σᵢlossᵢ(μ) = (Σᵢ∂lossᵢ/∂μ)·∂μ/∂θ. Endpoint objectives train on
    each sample at each trained sigma. They add one forward of the sampling policy if the trained policy has moved, and
    one of the base if the KL weight is above 0.

    Args:
        samples: samples of this rank. The rollout's batches are replayed, so that before the first update the ratio is
            exactly 1: other batches would round differently.

    Returns:
        The mean of each metric over samples and steps, and the largest ratio deviation.
    """
    # 1. The terms of the loss, one forward each: the samples in its mean, and a function that computes it.
    terms: list[tuple[int, Callable[[], Loss]]] = []
    if OBJECTIVES[policy_loss.options.name].needs == "path":
        for nodes in samples.nodes:
            terms.append((len(nodes.row_B), partial(_path_loss, policy_loss, nodes, values)))
    else:
        for rollout in samples.rollouts:
            for step in policy_loss.draw.sampler.sde_steps:
                loss_at_sigma = partial(_endpoint_loss, policy_loss, rollout, values, step)
                terms.append((len(rollout.row_B), loss_at_sigma))
    total = sum(count for count, _ in terms)

    # 2. Forward and backward of each.
    results = []
    for number, (count, compute) in enumerate(terms):
        last = number == len(terms) - 1
        with runtime.accumulating(policy_loss.draw.policy.transformer, last=last):
            loss, metrics = compute()
            # The gradients of all terms add up to that of the mean over all samples.
            (loss / (total / count)).backward()
        results.append((count, metrics | {"loss": loss.detach()}))

    # 3. Metrics of this rank's equal share.
    return _summary(results)


def _summary(results: Sequence[tuple[int, Mapping[str, Metric]]]) -> dict[str, float]:
    """Average each metric over the terms of an update by their samples; of a ratio deviation take the largest."""
    # Copy the metrics of all terms to the host at once, since each copy waits for the GPU. fp64 holds them all.
    wide = []
    for _, metrics in results:
        for metric in metrics.values():
            if isinstance(metric, Tensor):
                wide.append(metric.detach().to(widest_float(metric.device)))
    numbers = iter(torch.stack(wide).tolist() if wide else ())

    # Weights relative to the largest term: with equal batches they are exactly 1.
    most = max(samples for samples, _ in results)
    # `numbers` has the order of `wide`.
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for samples, metrics in results:
        for name, metric in metrics.items():
            value = next(numbers) if isinstance(metric, Tensor) else metric
            columns[name].append((value, samples / most))

    summary = {}
    for name, column in columns.items():
        if name == RATIO_DEVIATION:
            summary[name] = max(column)[0]
        else:
            summary[name] = sum(value * weight for value, weight in column) / sum(weight for _, weight in column)
    return summary


def gather_metrics(history: Mapping[str, Sequence[float]], runtime: Runtime) -> dict[str, float]:
    """Average metrics over an epoch's updates and ranks; of a ratio deviation take the first update's largest."""
    means = {}
    for name, values in history.items():
        # The first update replays sampling by the same weights: its ratio deviates by rounding errors only.
        means[name] = values[0] if name == RATIO_DEVIATION else sum(values) / len(values)

    # All ranks have equal shares of an update, so the mean of their means is the mean.
    ranks = runtime.gather(means)
    gathered = {}
    for name in means:
        column = [rank[name] for rank in ranks]
        gathered[name] = max(column) if name == RATIO_DEVIATION else sum(column) / len(ranks)
    return gathered


def ratio_warning(metrics: Mapping[str, float], tolerance: float, *, epoch: int) -> str:
    """Describe a first update that does not replay sampling exactly; empty if its ratio is within `tolerance` of 1."""
    deviation = metrics.get(RATIO_DEVIATION, 0.0)
    if deviation <= tolerance:
        return ""
    return (
        f"epoch {epoch}: before its first update the ratio deviates from 1 by {deviation:.1e}, more than "
        f"{tolerance:.1e}: training does not replay sampling exactly; set sampling.batch to 1 or model.dtype to "
        "float32, or raise objective.clip_range"
    )


def _credit(
    policy: PipelinePolicy,
    values: Advantages,
    rows: Sequence[int],
    prompts: Sequence[Prompt],
    size: Size,
    *,
    dtype: torch.dtype,
) -> tuple[Tensor, Panels | None]:
    """Return the (B,) advantages of samples; with panel credit (B, N), each token its panel's, and the panels."""
    device = policy.device
    if values.value_BP is None:
        return to_device(values.value_B[rows].to(dtype), device), None
    panels = Panels.of([prompt.grid for prompt in prompts], size, policy.token_grid(size), device=device)
    return panels.at_tokens(to_device(values.value_BP[rows].to(dtype), device)), panels


def _path_loss(policy_loss: PolicyLoss, nodes: NodeBatch, values: Advantages) -> Loss:
    """Compute a path objective at the nodes of one forward, for every sample below them."""
    # 1. Inputs on the device.
    draw, options, step = policy_loss.draw, policy_loss.options, nodes.step
    policy = draw.policy
    device = policy.device
    prompts = [nodes.prompts[node] for node in nodes.node_B.tolist()]
    advantage_B, panels = _credit(policy, values, nodes.row_B, prompts, nodes.size, dtype=nodes.log_prob_B.dtype)
    conditioning = draw.cache.batch(nodes.prompts, nodes.size)
    x_VNC = to_device(nodes.latents_VNC, device)
    node_B = to_device(nodes.node_B, device)
    next_latents_ENC = to_device(nodes.next_latents_ENC, device)
    child_B = to_device(nodes.child_B, device)

    # Samples of one node share its mean and differ in the noise they drew.
    def transition_of(velocity_VNC: Tensor) -> Transition:
        """Compute the transition of each sample's node."""
        mean_VNC, std = transition_at(draw.sampler, nodes.sigmas_T, step, x_VNC, velocity_VNC)
        return Transition(mean_VNC[node_B], std)

    # 2. Loss of the trained policy's transition.
    velocity = partial(velocity_at, policy, x_VNC, nodes.sigmas_T[step], conditioning, nodes.size)
    transition = transition_of(velocity())
    of_step = Step(
        transition,
        log_prob_B=log_prob(next_latents_ENC[child_B], transition, panels),
        old_log_prob_B=to_device(nodes.log_prob_B, device),
        old_mean_BNC=None if nodes.mean_VNC is None else to_device(nodes.mean_VNC, device)[node_B],
        dt=float(nodes.sigmas_T[step + 1] - nodes.sigmas_T[step]),
        advantage_B=advantage_B,
        panels=panels,
    )
    loss, metrics = objective_loss(of_step, options)

    # 3. KL to the base.
    if options.kl_weight > 0:
        with torch.no_grad(), adapter_off(policy.transformer):
            base = transition_of(velocity())
        divergence = kl(transition, base).mean()
        return loss + options.kl_weight * divergence, metrics | {"kl": divergence}
    return loss, metrics


def _endpoint_loss(policy_loss: PolicyLoss, rollout: Rollout, values: Advantages, step: int) -> Loss:
    """Compute an endpoint objective for a batch noised to one sigma of the checkpoint's training schedule.

    The divergence from the base is the mean squared difference of velocities, proportional to the KL of flow matching
    at each sigma.
    """
    # 1. Noise the endpoints. No sampling step is replayed, so the training shift applies.
    draw, options = policy_loss.draw, policy_loss.options
    policy = draw.policy
    device = policy.device
    conditioning = draw.cache.batch(rollout.prompts, rollout.size)
    training_sigma = policy.training_sigmas(draw.sampler.steps, rollout.size)[step]
    sigma = float(training_sigma)
    clean = to_device(rollout.final_BNC, device)
    # The 0 is the pass over the epoch's samples, of which there is one.
    seeds = [seed_of(draw.seed, draw.epoch, 0, "noised", step, row) for row in rollout.row_B]
    noise = policy.noise(seeds, rollout.size)
    noisy = (1 - sigma) * clean + sigma * noise

    # 2. Advantages of the samples, or of the panels of each token.
    advantage_B, panels = _credit(policy, values, rollout.row_B, rollout.prompts, rollout.size, dtype=clean.dtype)
    used_B = to_device(values.used_B[rollout.row_B], device)
    if panels:
        used_B = used_B[:, None].expand_as(advantage_B)

    # 3. Velocities. Old and base come first: they change weights in place, which would break the trained policy's
    # graph.
    velocity_of = partial(velocity_at, policy, noisy, training_sigma, conditioning, rollout.size)
    old = base = None
    if policy_loss.old:
        with torch.no_grad(), policy_loss.old.swapped_in():
            old = velocity_of()
    if options.kl_weight > 0:
        with torch.no_grad(), adapter_off(policy.transformer):
            base = velocity_of()
    velocity = velocity_of()

    # 4. Loss, and the divergence from the base.
    endpoint = Endpoint(
        clean,
        noisy,
        sigma=sigma,
        velocity_BNC=velocity,
        old_velocity_BNC=velocity.detach() if old is None else old,
        advantage_B=advantage_B,
        advantage_clip=policy_loss.advantage_clip,
        used_B=used_B,
        panels=panels,
    )
    loss, metrics = objective_loss(endpoint, options)
    if base is not None:
        divergence = ((velocity - base) ** 2).mean()
        return loss + options.kl_weight * divergence, metrics | {"kl": divergence}
    return loss, metrics
