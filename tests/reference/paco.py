"""PaCo-GRPO in plain float64 loops, in the paper's notation: one sample, one step and one reward at a time.

The engine shares forwards, batches, ranks and caches. This file shares nothing and imports nothing of the engine, so
that each form of the engine can be compared with it. Sources: Flow-GRPO (arXiv 2505.05470), PaCo-RL (2512.04784),
Flow-CPS (2509.05952), GRPO-Guard (2510.22319), DiffusionNFT (2509.16117), AWM (2509.25050).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

import torch
from torch import Tensor

Theta = dict[str, Tensor]
"""The adapter's weights by name."""


@dataclass(frozen=True)
class World:
    """What a run learns in."""

    velocity: Callable[[Theta | None, Tensor, float, int], Tensor]
    """v(θ, x, σ, prompt), with x of (N, C); θ = None is the base without its adapter."""
    noise: Callable[..., Tensor]
    """(N, C) standard normal noise of a draw that is named by its arguments."""
    rewards: Callable[[Tensor, int], list[float | None]]
    """The rewards of an endpoint for its prompt; None for a missing one."""
    parts: Callable[[Tensor, int], list[list[float | None]]]
    """Of each reward the part that contains each panel of the endpoint; None for a missing one."""
    panels: Callable[[int], list[list[int]]]
    """The tokens of each panel of a prompt's set."""
    prompts: Callable[[int], list[int]]
    """The prompt of each sample of an epoch, group by group."""
    alike: Callable[[Tensor, int, Tensor, int, int], float]
    """P(Yes) of a panel of one endpoint and a panel of another, both of a prompt."""
    across: Callable[[int, list[int], int], list[tuple[int, int]]]
    """The pairs across the sets of these rows of an epoch with so many panels each: set · panels + panel."""


@dataclass(frozen=True)
class Settings:
    """A run's settings under the names of its config."""

    sigmas: list[float]
    training_sigmas: list[float]
    """Levels to which endpoints are noised again."""
    sde_steps: Callable[[int], list[int]]
    """The stochastic steps of an epoch."""
    sde_type: str
    noise_level: float
    suffix_steps: int | None
    solver: str
    branches: list[int]
    """Children at each stochastic step; empty without such steps."""
    batch: int
    weights: list[float]
    advantages: Any
    """aggregate, threshold, std, floor and clip."""
    by_panel: bool
    """Whether the credit is a panel's."""
    group_size: int
    contrast: float
    """Weight of the agreement across sets in the first reward; 0 for none, and no such reward."""
    objective: Any
    optimizer: Any


@dataclass
class Step:
    """A stochastic step that a sample took, x → x' at σ_i."""

    index: int
    x: Tensor
    x_next: Tensor
    mean: Tensor
    log_prob: list[float]
    """Of each panel."""


@dataclass
class Sample:
    """A sample's path and what became of it."""

    row: int
    prompt: int
    steps: list[Step]
    endpoint: Tensor
    rewards: list[float | None]
    parts: list[list[float | None]]
    panels: list[list[int]]
    """Tokens of each panel; without panel credit all tokens are one panel."""
    advantage: list[float] = field(default_factory=list)
    """Of each panel."""
    used: bool = False


@dataclass
class State:
    """What an epoch changes: weights, moving average, sampling policy, optimizer and its steps."""

    theta: Theta
    average: Theta
    old: Theta
    optimizer: torch.optim.Optimizer
    step: int = 0


# --- sampling --------------------------------------------------------------------------------------------------


def transition(s: Settings, x: Tensor, v: Tensor, i: int) -> tuple[Tensor, float]:
    """Mean and standard deviation of x' at stochastic step i."""
    t, t_next, a = s.sigmas[i], s.sigmas[i + 1], s.noise_level
    if s.sde_type == "cps":
        std = t_next * math.sin(a * math.pi / 2)
        x0, x1 = x - t * v, x + (1 - t) * v
        return (1 - t_next) * x0 + math.sqrt(t_next**2 - std**2) * x1, std
    # σ_t is infinite at t = 1, where the released code takes the second sigma.
    sigma_t = a * math.sqrt(t / (1 - (s.sigmas[1] if t == 1 else t)))
    dt = t_next - t
    mean = x + (v + sigma_t**2 / (2 * t) * (x + (1 - t) * v)) * dt
    return mean, sigma_t * math.sqrt(abs(dt))


def log_density(x_next: Tensor, mean: Tensor, std: float) -> Tensor:
    """log N(x'; μ, std²), averaged over dimensions."""
    return torch.mean(-((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - math.log(math.sqrt(2 * math.pi)))


def draw(s: Settings, world: World, theta: Theta, *, epoch: int, row: int, prompt: int) -> Sample:
    """Follow one sample from noise to its endpoint."""
    # Objectives of the endpoint need no noise, except to branch.
    branches = s.branches
    stochastic = s.sde_steps(epoch) if branches else []

    # Samples below one node differ from the node on; a node has the number of its first sample.
    leaves = math.prod(branches)
    x = world.noise(epoch, "start", row - row % leaves)
    steps: list[Step] = []
    panels = world.panels(prompt) if s.by_panel else [list(range(len(x)))]
    first_of_suffix = stochastic[-1] + 1 if stochastic else 0
    for i in range(first_of_suffix):
        v = world.velocity(theta, x, s.sigmas[i], prompt)
        if i not in stochastic:
            x = x + v * (s.sigmas[i + 1] - s.sigmas[i])
            continue

        leaves = math.prod(branches[len(steps) + 1 :])
        child = row - row % leaves
        mean, std = transition(s, x, v, i)
        x_next = mean + std * world.noise(epoch, "step", i, child)
        log_prob = [float(log_density(x_next[panel], mean[panel], std)) for panel in panels]
        steps.append(Step(i, x, x_next, mean, log_prob))
        x = x_next

    endpoint = follow_suffix(s, world, theta, x, first=first_of_suffix, prompt=prompt)
    return Sample(row, prompt, steps, endpoint, world.rewards(endpoint, prompt), world.parts(endpoint, prompt), panels)


def follow_suffix(s: Settings, world: World, theta: Theta, x: Tensor, *, first: int, prompt: int) -> Tensor:
    """Follow the ODE from step `first` to σ = 0, by Euler or AB2 with steps of unequal length."""
    last = len(s.sigmas) - 1
    count = s.suffix_steps or last - first
    grid = [first + round(k * (last - first) / count) for k in range(count + 1)] if count else [first]
    v_before, h_before = torch.zeros_like(x), 0.0
    for k in range(count):
        h = s.sigmas[grid[k + 1]] - s.sigmas[grid[k]]
        v = world.velocity(theta, x, s.sigmas[grid[k]], prompt)
        if s.solver == "ab2" and k > 0:
            # The line through both velocities, integrated over the step.
            slope = (v - v_before) / h_before
            x = x + h * v + h**2 / 2 * slope
        else:
            x = x + h * v
        v_before, h_before = v, h
    return x


# --- rewards → advantages --------------------------------------------------------------------------------------


def compare_sets(s: Settings, world: World, samples: list[Sample], epoch: int) -> None:
    """Score each sample of a group by its panels' agreement, within its set less across sets, as the first reward."""
    panels = len(world.panels(samples[0].prompt))
    pairs = world.across(epoch, [sample.row for sample in samples], panels)
    for number, sample in enumerate(samples):
        scores = []
        for p in range(panels):
            x, prompt = sample.endpoint, sample.prompt
            within = fmean([world.alike(x, p, x, q, prompt) for q in range(panels) if q != p])
            partners = [second for first, second in pairs if first == number * panels + p]
            partners += [first for first, second in pairs if second == number * panels + p]
            others = [(samples[partner // panels].endpoint, partner % panels) for partner in partners]
            across = fmean([world.alike(x, p, other, q, prompt) for other, q in others])
            scores.append(0.5 * (1 + within - s.contrast * across))
        sample.rewards.insert(0, fmean(scores))
        # A pair within the set counts for both of its panels.
        sample.parts.insert(0, [2 * score / panels for score in scores])


def compare(s: Settings, samples: list[Sample]) -> None:
    """Give each sample its advantages, and say which are used."""
    options = s.advantages
    complete = [sample for sample in samples if all(r is not None and math.isfinite(r) for r in sample.rewards)]
    for sample in complete:
        sample.used = sum(other.prompt == sample.prompt for other in complete) >= 2
    used = [sample for sample in samples if sample.used]

    combined = aggregate(s, used)
    for sample in samples:
        sample.advantage = [0.0] * len(sample.panels)
    groups = [sample.prompt for sample in used]
    for panel in range(len(samples[0].panels)):
        credited = credit(s, used, panel) if s.by_panel else combined
        values = normalise(credited, combined, groups, options.std, options.floor)
        for sample, value in zip(used, values, strict=True):
            sample.advantage[panel] = max(-options.clip, min(options.clip, value))


def means(values: list[float], groups: list[int]) -> list[float]:
    """The mean of each sample's group."""
    pairs = list(zip(values, groups, strict=True))
    return [fmean([value for value, other in pairs if other == group]) for group in groups]


def credit(s: Settings, used: list[Sample], panel: int) -> list[float]:
    """The scores of a panel: the parts that contain it, to first order."""
    scores = []
    for sample in used:
        own = 0.0
        for k in range(len(s.weights)):
            own += s.weights[k] * slope(s, used, sample.prompt, k) * float(sample.parts[k][panel] or 0.0)
        scores.append(own)
    return scores


def slope(s: Settings, used: list[Sample], prompt: int, k: int) -> float:
    """How fast the aggregate rises with reward k, at the mean of a group."""
    group = [float(sample.rewards[k] or 0.0) for sample in used if sample.prompt == prompt]
    if s.advantages.aggregate == "log_tamed" and tamed(s, columns_of(s, used))[k]:
        return 1 / (1 + abs(fmean(group)))
    return 1.0


def columns_of(s: Settings, used: list[Sample]) -> list[list[float]]:
    """Each reward of all samples."""
    return [[float(sample.rewards[k] or 0.0) for sample in used] for k in range(len(s.weights))]


def aggregate(s: Settings, used: list[Sample]) -> list[float]:
    """One score per sample."""
    columns = columns_of(s, used)
    if s.advantages.aggregate == "log_tamed" and used:
        is_tamed = tamed(s, columns)
        for k in range(len(columns)):
            if is_tamed[k]:
                columns[k] = [math.copysign(math.log(1 + abs(r)), r) for r in columns[k]]
    return [sum(w * column[b] for w, column in zip(s.weights, columns, strict=True)) for b in range(len(used))]


def tamed(s: Settings, columns: list[list[float]]) -> list[bool]:
    """Whether the variation of each reward exceeds the threshold."""
    spreads = [pstdev(column) / max(abs(fmean(column)), 1e-12) for column in columns]
    return [spread > s.advantages.threshold for spread in spreads]


def normalise(values: list[float], of_set: list[float], groups: list[int], std_over: str, floor: Any) -> list[float]:
    """Eq. 2: (r̂ − mean of its group)/std; the std is that of the sets' scores, or its own, around the sets' means, if
    that is larger."""
    mean, mean_of_set = means(values, groups), means(of_set, groups)
    normal = []
    for b in range(len(values)):
        compared = [j for j in range(len(values)) if std_over == "global" or groups[j] == groups[b]]
        own = [values[j] - mean[j] + mean_of_set[j] for j in compared]
        divisors = divisor([of_set[j] for j in compared], floor), divisor(own, floor)
        normal.append((values[b] - mean[b]) / max(divisors))
    return normal


def divisor(scores: list[float], floor: Any) -> float:
    """The standard deviation with its floor."""
    std, size = pstdev(scores), math.sqrt(fmean([r**2 for r in scores]))
    if floor == "max":
        return max(std, 1e-6)
    if floor == "add":
        return std + 1e-4
    # Differences that are rounding alone say nothing.
    return math.inf if std <= 1e-6 * max(size, 1e-6) else std


# --- objectives ------------------------------------------------------------------------------------------------


def clipped(rho: Tensor, advantage: float, options: Any) -> Tensor:
    """−min(ρA, clip(ρ, 1−ε, 1+ε)A)."""
    epsilon = options.clip_range
    return -torch.minimum(rho * advantage, rho.clamp(1 - epsilon, 1 + epsilon) * advantage)


def path_loss(s: Settings, world: World, theta: Theta, sample: Sample, level: int) -> Tensor:
    """The objective at one stochastic step of one sample."""
    options, step = s.objective, sample.steps[level]
    t, dt = s.sigmas[step.index], s.sigmas[step.index + 1] - s.sigmas[step.index]
    mean, std = transition(s, step.x, world.velocity(theta, step.x, t, sample.prompt), step.index)
    loss = torch.zeros(())
    for p, panel in enumerate(sample.panels):
        advantage, share = sample.advantage[p], len(panel) / len(step.x)
        log_ratio = log_density(step.x_next[panel], mean[panel], std) - step.log_prob[p]
        if options.name == "grpo_guard":
            centre = torch.mean((mean[panel] - step.mean[panel]) ** 2) / (2 * std**2)
            loss = loss + share * clipped(torch.exp((log_ratio + centre) * std), advantage, options) / abs(dt)
        else:
            loss = loss + share * clipped(torch.exp(log_ratio), advantage, options)
    if options.kl_weight:
        base, _ = transition(s, step.x, world.velocity(None, step.x, t, sample.prompt), step.index)
        loss = loss + options.kl_weight * torch.mean((mean - base) ** 2) / (2 * std**2)
    return loss


def endpoint_loss(s: Settings, world: World, theta: Theta, old: Theta, sample: Sample, *, i: int, epoch: int) -> Tensor:
    """The objective at one noise level, to which one sample's endpoint is noised again."""
    options, t, x0 = s.objective, s.training_sigmas[i], sample.endpoint
    noise = world.noise(epoch, 0, "noised", i, sample.row)
    x_t = (1 - t) * x0 + t * noise
    v, v_old = (world.velocity(weights, x_t, t, sample.prompt) for weights in (theta, old))
    v_old = v_old.detach()
    loss = torch.zeros(())
    for p, panel in enumerate(sample.panels):
        advantage, share = sample.advantage[p], len(panel) / len(x0)
        if options.name == "awm":
            distance, distance_old = (torch.mean((w - (noise - x0))[panel] ** 2) for w in (v, v_old))
            loss = loss + share * clipped(torch.exp(distance_old - distance), advantage, options)
            continue

        r = 0.5 + 0.5 * advantage / s.advantages.clip
        terms = []
        for implicit in (options.beta * v + (1 - options.beta) * v_old, (1 + options.beta) * v_old - options.beta * v):
            gap = (x_t - t * implicit - x0)[panel]
            terms.append(torch.mean(gap**2) / max(float(gap.detach().abs().mean()), 1e-5))
        towards, away = r * terms[0], (1 - r) * terms[1]
        loss = loss + share * s.advantages.clip * (towards + away) / options.beta * sample.used
    if options.kl_weight:
        loss = loss + options.kl_weight * torch.mean((v - world.velocity(None, x_t, t, sample.prompt)) ** 2)
    return loss


# --- an epoch --------------------------------------------------------------------------------------------------


def updates_of(s: Settings, samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each optimizer step: whole subtrees and batches, dealt in turn."""
    count, leaves = s.optimizer.updates_per_epoch, math.prod(s.branches)
    piece = math.lcm(s.batch, s.group_size if s.contrast else leaves)
    if len(samples) % (piece * count):
        piece = s.batch
    return [[x for x in samples if x.row // piece % count == update] for update in range(count)]


def run_epoch(s: Settings, world: World, state: State, epoch: int) -> list[Sample]:
    """Sample, score, compare and update; returns the epoch's samples."""
    is_path = s.objective.name.startswith("grpo")
    if is_path or s.objective.name == "awm":
        state.old = {name: weight.detach().clone() for name, weight in state.theta.items()}
    with torch.no_grad():
        prompts = world.prompts(epoch)
        samples = [draw(s, world, state.old, epoch=epoch, row=row, prompt=prompts[row]) for row in range(len(prompts))]
    for group in range(0, len(samples), s.group_size) if s.contrast else ():
        compare_sets(s, world, samples[group : group + s.group_size], epoch)
    compare(s, samples)

    for update in updates_of(s, samples):
        losses = []
        for sample in update:
            if is_path:
                losses += [path_loss(s, world, state.theta, sample, level) for level in range(len(sample.steps))]
            else:
                for i in s.sde_steps(epoch):
                    losses.append(endpoint_loss(s, world, state.theta, state.old, sample, i=i, epoch=epoch))
        take_step(s, state, sum(losses) / len(losses))

    if s.objective.name == "diffusion_nft":
        lag = min(0.001 * state.step, 0.5)
        state.old = {name: lag * state.old[name] + (1 - lag) * state.theta[name].detach() for name in state.theta}
    return samples


def take_step(s: Settings, state: State, loss: Any) -> None:
    """Clip, step, and let the moving average follow."""
    options = s.optimizer
    state.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(list(state.theta.values()), options.max_grad_norm)
    state.optimizer.step()
    state.step += 1
    decay = min(state.step / (9 + state.step), options.ema_decay)
    for name, weight in state.theta.items():
        state.average[name] = decay * state.average[name] + (1 - decay) * weight.detach()
