"""Rollouts and advantages → gradients: one optimizer step, whatever the objective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.devices import widest_float
from pacorl.core.objectives import OBJECTIVES, RATIO_DEVIATION, Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.core.sde import Transition, kl, log_prob
from pacorl.core.transfer import to_device
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import training_sigmas_of, transition_at, velocity_at
from pacorl.models.lora.adapters import AdapterCopy, adapter_off
from pacorl.runtime.processes import Runtime
from pacorl.types import Advantages, Conditioning, NodeBatch, Rollout, Samples, Size

if TYPE_CHECKING:
    from pacorl.core.objectives import Loss, Metric
    from pacorl.models.policies.policy import Policy


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What turns samples into a loss: the objective, and the forwards that it needs."""

    policy: Policy
    sampler: Sampler
    """What they were sampled with."""
    cache: ConditioningCache
    options: ObjectiveOptions
    """Of the objective."""
    advantage_clip: float = 5.0
    """The largest size of an advantage."""
    old: AdapterCopy | None = None
    """The policy that sampled; None if it is the trained one, bit for bit."""

    @property
    def objective(self) -> ObjectiveSpec:
        """The objective whose options these are."""
        return OBJECTIVES[self.options.name]

    @property
    def device(self) -> torch.device:
        """Where the policy computes."""
        return next(self.policy.transformer.parameters()).device

    def velocity(self, x_BNC: Tensor, sigma: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """Of the trained policy, at one sigma for all rows."""
        return velocity_at(self.policy, x_BNC, sigma, conditioning, size)

    @torch.no_grad()
    def base_velocity(self, x_BNC: Tensor, sigma: Tensor, conditioning: Conditioning, size: Size) -> Tensor:
        """Of the policy without its adapter."""
        with adapter_off(self.policy.transformer):
            return self.velocity(x_BNC, sigma, conditioning, size)

    @torch.no_grad()
    def old_velocity(self, x_BNC: Tensor, sigma: Tensor, conditioning: Conditioning, size: Size) -> Tensor | None:
        """Of the policy that sampled, if that is another one."""
        if self.old is None:
            return None
        with self.old.swapped_in():
            return self.velocity(x_BNC, sigma, conditioning, size)

    def noise_weight(self, transition: Transition, sigmas_T: Tensor) -> float:
        """The std of a step over the mean std of the epoch's stochastic steps."""
        nothing = torch.zeros(1)  # an std follows from the sigmas alone
        sampler = self.sampler
        stds = [transition_at(sampler, sigmas_T, step, nothing, nothing).std for step in sampler.stochastic_steps]
        return transition.std * len(stds) / sum(stds)


@dataclass(frozen=True, slots=True)
class Term:
    """A part of an update's loss: one forward and one backward."""

    loss: Callable[[], Loss]
    samples: int
    """How many it is the mean over."""


def update_policy(
    policy_loss: PolicyLoss, samples: Samples, values: Advantages, *, runtime: Runtime, draw: tuple[int, ...]
) -> dict[str, float]:
    """Add the gradient of the mean loss over all samples and trained steps.

    Per distinct latent of a trained step (a node) this makes one forward and one backward, whatever the number of
    samples that descend from it: their losses meet in the mean of its transition, ∇Σᵢlossᵢ(μ) = (Σᵢ∂lossᵢ/∂μ)·∂μ/∂θ.
    For objectives of the endpoint it makes one forward of the policy that sampled if the trained one has left it, and
    one of the base only if the KL weight is above 0.

    Args:
        policy_loss: the objective and the policy.
        samples: as they were rolled out; the rollout's own batches of nodes are replayed, so that before the first
            update the ratio is exactly 1: another cut would round differently.
        values: the advantages of the epoch, by global row.
        runtime: whose processes share the gradient.
        draw: names the noise that endpoints are given.

    Returns:
        The mean of each metric over samples and steps; of a ratio's deviation the largest. Nothing, without any
        forward, if no process has a sample to train on.
    """
    terms = _terms(policy_loss, samples, values, draw=draw)
    total: float = sum(term.samples for term in terms)
    if values.kept_B is not None:
        selected = _terms(policy_loss, keep_samples(samples, values.kept_B), values, draw=draw)
        counts = runtime.gather([term.samples for term in selected])
        # A backward may need every process, and the last one does: who has fewer repeats a batch, for nothing.
        terms = selected + [replace(terms[0], samples=0)] * (max(map(len, counts)) - len(selected))
        total = sum(chain(*counts)) / runtime.world
    results = []
    for number, term in enumerate(terms):
        last = number == len(terms) - 1
        with runtime.accumulating(policy_loss.policy.transformer, last=last):
            loss, metrics = term.loss()
            runtime.backward(loss / (total / term.samples) if term.samples else 0 * loss, last=last)
        results.append((term.samples, metrics | {"loss": loss.detach()}))
    numbers = _read(results)
    # Where all are kept, processes have equal shares, and the caller takes their mean.
    return _summary(numbers if values.kept_B is None else [*chain(*runtime.gather(numbers))])


def _read(results: Sequence[tuple[int, Mapping[str, Metric]]]) -> list[tuple[int, dict[str, float]]]:
    """The metrics of all terms as numbers, in one copy: reading each would wait for the card as often."""
    tensors = [value for _, metrics in results for value in metrics.values() if isinstance(value, Tensor)]
    # fp64 holds every number of a narrower type.
    wide = [tensor.detach().to(widest_float(tensor.device)) for tensor in tensors]
    numbers = iter(torch.stack(wide).tolist() if wide else ())
    return [
        (samples, {name: next(numbers) if isinstance(v, Tensor) else v for name, v in metrics.items()})
        for samples, metrics in results
    ]


def keep_samples(samples: Samples, kept_B: Tensor) -> Samples:
    """The samples whose global row is kept.

    A batch of nodes stays whole, since another cut would round differently, unless none of its samples is kept.
    """

    def kept_nodes(nodes: NodeBatch, here_B: Tensor) -> NodeBatch:
        row_B, node_B, child_B = list(compress(nodes.row_B, here_B)), nodes.node_B[here_B], nodes.child_B[here_B]
        return replace(nodes, row_B=row_B, node_B=node_B, child_B=child_B, log_prob_B=nodes.log_prob_B[here_B])

    def kept_rollout(rollout: Rollout, here_B: Tensor) -> Rollout:
        prompts, images = list(compress(rollout.prompts, here_B)), list(compress(rollout.images, here_B))
        row_B, final_BNC = list(compress(rollout.row_B, here_B)), rollout.final_BNC[here_B]
        return replace(rollout, prompts=prompts, row_B=row_B, final_BNC=final_BNC, images=images)

    return Samples(
        [kept_rollout(batch, kept_B[batch.row_B]) for batch in samples.rollouts if kept_B[batch.row_B].any()],
        [kept_nodes(batch, kept_B[batch.row_B]) for batch in samples.nodes if kept_B[batch.row_B].any()],
    )


def _terms(policy_loss: PolicyLoss, samples: Samples, values: Advantages, *, draw: tuple[int, ...]) -> list[Term]:
    if policy_loss.objective.needs == "path":
        return [
            Term(partial(_path_loss, policy_loss, nodes, values), samples=len(nodes.row_B)) for nodes in samples.nodes
        ]
    return [
        Term(partial(_endpoint_loss, policy_loss, rollout, values, step, draw=draw), samples=len(rollout))
        for rollout in samples.rollouts
        for step in policy_loss.sampler.sde_steps
    ]


def _summary(results: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Each metric over the terms of an update, which have (samples, metrics)."""
    counted = [(samples, metrics) for samples, metrics in results if samples]
    most = max((samples for samples, _ in counted), default=0)
    columns: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for samples, metrics in counted:
        for name, value in metrics.items():
            columns[name].append((value, samples / most))
    return {
        name: max(column)[0]
        if name.startswith(RATIO_DEVIATION)
        else sum(value * weight for value, weight in column) / sum(weight for _, weight in column)
        for name, column in columns.items()
    }


def gather_metrics(history: Mapping[str, Sequence[float]], runtime: Runtime) -> dict[str, float]:
    """The mean over an epoch's updates and ranks, each of which saw its own samples; of a ratio's deviation the worst.

    Args:
        history: name → one value per update, with equal names on all ranks.
        runtime: of the ranks.
    """
    # The first update replays the rollout's own policy: any deviation of its ratio is an error of arithmetic.
    deviations = {name: values[0] for name, values in history.items() if name.startswith(RATIO_DEVIATION)}
    means = {name: sum(values) / len(values) for name, values in history.items()} | deviations
    ranks = runtime.gather(means)
    columns = {name: [rank[name] for rank in ranks] for name in means}
    return {name: max(column) if name in deviations else sum(column) / len(ranks) for name, column in columns.items()}


def _path_loss(policy_loss: PolicyLoss, nodes: NodeBatch, values: Advantages) -> Loss:
    """The objective at the nodes of one forward, for every sample below them."""
    device, options = policy_loss.device, policy_loss.options
    step, conditioning = nodes.step, policy_loss.cache.batch(nodes.prompts, nodes.size)
    x_VNC, node_B = to_device(nodes.latents_VNC, device), to_device(nodes.node_B, device)
    next_latents_ENC, child_B = to_device(nodes.next_latents_ENC, device), to_device(nodes.child_B, device)

    def transition_of(velocity_VNC: Tensor) -> Transition:
        """What each sample's step is drawn from: its node's transition."""
        mean_VNC, std = transition_at(policy_loss.sampler, nodes.sigmas_T, step, x_VNC, velocity_VNC)
        return Transition(mean_VNC[node_B], std)

    at_step = (x_VNC, nodes.sigmas_T[step], conditioning, nodes.size)
    transition = transition_of(policy_loss.velocity(*at_step))
    loss, metrics = policy_loss.objective.loss(
        Step(
            transition,
            log_prob_B=log_prob(next_latents_ENC[child_B], transition),
            old_log_prob_B=to_device(nodes.log_prob_B, device),
            old_mean_BNC=None if nodes.mean_VNC is None else to_device(nodes.mean_VNC, device)[node_B],
            dt=float(nodes.sigmas_T[step + 1] - nodes.sigmas_T[step]),
            noise_weight=policy_loss.noise_weight(transition, nodes.sigmas_T),
            advantage_B=to_device(values.at(nodes.level)[nodes.row_B].float(), device),
        ),
        options,
    )
    metrics = _of_step(metrics, step)
    if options.kl_weight > 0:
        reference = transition_of(policy_loss.base_velocity(*at_step))
        return _with_kl(loss, metrics, kl(transition, reference).mean(), weight=options.kl_weight)
    return loss, metrics


def _endpoint_loss(
    policy_loss: PolicyLoss, rollout: Rollout, values: Advantages, step: int, *, draw: tuple[int, ...]
) -> Loss:
    """The objective at one sigma of the checkpoint's own training, to which endpoints of one batch are noised.

    The divergence from the base is the mean squared difference of velocities, to which the KL of flow matching is
    proportional at each sigma.
    """
    device, options = policy_loss.device, policy_loss.options
    conditioning = policy_loss.cache.batch(rollout.prompts, rollout.size)
    # Inference may shift its sigmas elsewhere; no step of it is replayed here.
    training_sigma = training_sigmas_of(policy_loss.policy, policy_loss.sampler, rollout.prompts[0])[step]
    sigma, clean = float(training_sigma), to_device(rollout.final_BNC, device)
    noise = policy_loss.policy.noise([seed_of(*draw, "noised", step, row) for row in rollout.row_B], rollout.size)
    noisy = (1 - sigma) * clean + sigma * noise
    # The other policies' forwards come first: they change weights in place, which the trained policy's graph must not
    # see.
    at_sigma = (noisy, training_sigma, conditioning, rollout.size)
    old = policy_loss.old_velocity(*at_sigma)
    base = policy_loss.base_velocity(*at_sigma) if options.kl_weight > 0 else None
    velocity = policy_loss.velocity(*at_sigma)
    loss, metrics = policy_loss.objective.loss(
        Endpoint(
            clean,
            noisy,
            sigma=sigma,
            velocity_BNC=velocity,
            old_velocity_BNC=velocity.detach() if old is None else old,
            advantage_B=to_device(values.value_B[rollout.row_B].float(), device),
            advantage_clip=policy_loss.advantage_clip,
            used_B=to_device(values.used_B[rollout.row_B], device),
        ),
        options,
    )
    metrics = _of_step(metrics, step)
    if base is not None:
        return _with_kl(loss, metrics, ((velocity - base) ** 2).mean(), weight=options.kl_weight)
    return loss, metrics


def _of_step(metrics: Mapping[str, Metric], step: int) -> dict[str, Metric]:
    """A ratio's deviation under its step's name, since a late step may be off when an early one is not."""
    return {f"{name}/{step}" if name == RATIO_DEVIATION else name: value for name, value in metrics.items()}


def _with_kl(loss: Tensor, metrics: dict[str, Metric], divergence: Tensor, *, weight: float) -> Loss:
    return loss + weight * divergence, metrics | {"kl": divergence}
