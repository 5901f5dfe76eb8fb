"""What a probe draws: the candidates that it compares, and how many samples of each its budget pays for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from pacorl.config.options import LARGEST
from pacorl.config.policy_run import PolicyConfig
from pacorl.core.objectives import OBJECTIVES
from pacorl.core.sampling import Sampler, Tree
from pacorl.core.sde import SDE_TYPES
from pacorl.types import Size

STEP, NOISE_LEVEL, SIZE, TEMPERATURE = "step", "noise_level", "size", "temperature"
CHILDREN = 2
"""Of each latent at each stochastic step: of a number of samples, pairs leave most to the levels above."""
NOISE_FACTORS = (0.7, 1.4)
"""The configured noise level is compared with these multiples of itself: half and twice its variance."""
READING = 0.5
"""What another reading of the judge costs, in samples: half of the quickstart's epoch is judging."""
LEAST_PROMPTS = 2
"""Candidates that nobody asked for are left out until so many prompts are drawn for each."""


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """What may be asked of a probe; None stands for its own choice."""

    epochs: float = 1.0
    """The budget, in epochs of the config."""
    samples: int | None = None
    """The budget in samples of the config's size, in place of `epochs`."""
    steps: tuple[int, ...] | None = None
    noise_levels: tuple[float, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    temperatures: tuple[float, ...] | None = None
    """Of the rewards that ask the judge."""
    judge_repeats: tuple[str, ...] | None = None
    """How the judge is asked again (`probe.readings`); None for what suits the config."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to sample, which differs from the config's own in one thing at most."""

    varies: str
    """step, noise_level or size; empty for the config's own."""
    sde_steps: tuple[int, ...]
    noise_level: float
    size: Size
    weight: float = 1.0
    """What a sample costs, by those of the config: the share of its pixels."""

    @property
    def name(self) -> str:
        """What tables call it."""
        if self.varies == STEP:
            return f"step {self.sde_steps[0]}"
        return {NOISE_LEVEL: f"noise {self.noise_level:g}", SIZE: f"size {self.size}"}.get(self.varies, "as configured")

    @property
    def leaves(self) -> int:
        """Samples of one start."""
        return int(CHILDREN ** len(self.sde_steps))

    def sampler(self, configured: Sampler, *, seeds: int) -> Sampler:
        """How it is sampled, with so many starts per prompt."""
        tree = Tree(seeds, (CHILDREN,) * len(self.sde_steps))
        settings = {"sde_steps": self.sde_steps, "noise_level": self.noise_level, "size": self.size, "tree": tree}
        return configured.model_copy(update=settings)


@dataclass(frozen=True, slots=True)
class Design:
    """The nested draws of a probe: prompts × starts × children per stochastic step, for each candidate."""

    candidates: tuple[Candidate, ...]
    """The config's own first."""
    prompts: int
    seeds: int
    """Starts per prompt."""
    budget: int
    """Samples of the config's size."""
    left_out: tuple[str, ...] = ()
    """Candidates that the budget does not reach, or that the sampler refuses."""

    @property
    def samples(self) -> int:
        """How many images are drawn."""
        return self.prompts * self.seeds * sum(candidate.leaves for candidate in self.candidates)


def configured_sampler(config: PolicyConfig) -> Sampler:
    """How the config's first epoch is sampled.

    Raises:
        ValueError: if its objective samples without noise.
    """
    spec = OBJECTIVES[config.objective.name]
    if spec.needs != "path":
        raise ValueError(
            f"objective.name {config.objective.name} samples without noise, so that the start owns all that differs in "
            "a group and there is no stochastic step to probe; probe with objective.name=grpo_clip"
        )
    return config.sampling.sampler(
        0,
        group_size=config.group_size,
        seed=config.seed,
        spec=spec,
        evaluation_size=Size(*config.evaluation.size),
    )


def plan_design(
    config: PolicyConfig, configured: Sampler, options: ProbeOptions, *, prompts: int, readings: int = 0
) -> Design:
    """The candidates, and as many prompts of each as the budget pays for, then as many starts.

    Args:
        config: the run.
        own: how its first epoch is sampled.
        options: the budget and what to compare.
        prompts: how many there are to train on.
        readings: how often the judge reads each image once more.

    Raises:
        ValueError: if there is no budget, or too little for two starts with two children each of every candidate; the
            message names the budget that would do.
    """
    budget = _budget(config, options)
    requested, optional, left_out = _candidates(configured, options)
    first = Candidate("", configured.sde_steps, configured.noise_level, configured.size)
    most = min(prompts, config.prompts_per_epoch)
    each = 1 + READING * readings
    optional = _affordable([first, *requested], optional, budget / each / min(LEAST_PROMPTS, most), left_out)
    candidates = (first, *requested, *optional)
    cost = 2 * each * _cost(candidates)
    if budget < cost:
        raise ValueError(
            f"a budget of {budget} samples is too small for {len(candidates)} candidates with two starts and two "
            f"children each; give --samples {math.ceil(cost)} or more, or fewer candidates"
        )
    count = min(most, int(budget / cost))
    return Design(candidates, count, int(budget / (count * cost / 2)), budget, tuple(left_out))


def _budget(config: PolicyConfig, options: ProbeOptions) -> int:
    epoch = config.prompts_per_epoch * config.group_size
    budget = options.epochs * epoch if options.samples is None else options.samples
    if not 1 <= budget <= LARGEST:
        raise ValueError(
            f"the probe has a budget of {budget:g} samples; give --epochs (each has {epoch}) or --samples for 1 to "
            f"{LARGEST:,}"
        )
    return int(budget)


def _cost(candidates: Sequence[Candidate]) -> float:
    """Of one start of one prompt of each, in samples of the config's size."""
    return sum(candidate.weight * candidate.leaves for candidate in candidates)


def _candidates(configured: Sampler, options: ProbeOptions) -> tuple[list[Candidate], list[Candidate], list[str]]:
    """Those that were asked for, those of the probe's own choice that can be sampled, and what was left out."""
    half = Size(configured.size.height // 2, configured.size.width // 2)
    requested = list(_varied(configured, options.steps or (), options.noise_levels or (), options.sizes or ()))
    optional = _varied(
        configured,
        () if options.steps else range(configured.steps),
        () if options.noise_levels else [round(configured.noise_level * factor, 2) for factor in NOISE_FACTORS],
        () if options.sizes else [half],
    )
    # What a user asked for is refused in words; what nobody asked for is left out with them.
    for candidate in requested:
        _check(candidate, configured)
    possible, left_out = [], []
    for candidate in optional:
        try:
            _check(candidate, configured)
            possible.append(candidate)
        except ValueError as refusal:
            left_out.append(f"{candidate.name}: {refusal}")
    return requested, possible, left_out


def _varied(
    configured: Sampler, steps: Sequence[int], noise_levels: Sequence[float], sizes: Sequence[Size]
) -> Iterator[Candidate]:
    """One candidate for each value that is not the config's own."""
    area = configured.size.height * configured.size.width
    for step in steps:
        if (step,) != configured.sde_steps:
            yield Candidate(STEP, (step,), configured.noise_level, configured.size)
    for level in noise_levels:
        if level != configured.noise_level:
            yield Candidate(NOISE_LEVEL, configured.sde_steps, level, configured.size)
    for size in sizes:
        if size != configured.size:
            yield Candidate(SIZE, configured.sde_steps, configured.noise_level, size, size.height * size.width / area)


def _check(candidate: Candidate, configured: Sampler) -> None:
    """Refuse what cannot be sampled, in the words of what refuses it."""
    outside = [step for step in candidate.sde_steps if not 0 <= step < configured.steps]
    if outside:
        raise ValueError(
            f"--steps {outside[0]}: sampling.steps {configured.steps} has the steps 0 to {configured.steps - 1}"
        )
    if not candidate.noise_level > 0:
        raise ValueError(f"--noise-levels {candidate.noise_level:g} adds no noise; give a level above 0")
    SDE_TYPES[configured.sde_type].check(candidate.sde_steps, steps=configured.steps, noise_level=candidate.noise_level)
    configured.suffix.grid(candidate.sde_steps[-1] + 1, configured.steps)


def _affordable(
    needed: Sequence[Candidate], optional: Sequence[Candidate], budget: float, left_out: list[str]
) -> list[Candidate]:
    """As many of the chosen candidates, of each kind evenly, as two starts of all fit into `budget` with."""
    kinds: Mapping[str, list[Candidate]] = {
        kind: [candidate for candidate in optional if candidate.varies == kind] for kind in (STEP, NOISE_LEVEL, SIZE)
    }
    # From all of each kind down to none.
    # Late steps rarely carry signal, but which are late depends on the schedule: none is preferred.
    for count in range(max(map(len, kinds.values()), default=0), -1, -1):
        affordable = list(chain(*(_spread(members, count) for members in kinds.values())))
        if 2 * _cost([*needed, *affordable]) <= budget or not affordable:
            break
    if unpaid := [candidate.name for candidate in optional if candidate not in affordable]:
        left_out.append(f"{', '.join(unpaid)}: the budget does not reach so far")
    return affordable


def _spread(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """So many of them, evenly chosen."""
    if count >= len(candidates):
        return list(candidates)
    return [candidates[(2 * index + 1) * len(candidates) // (2 * count)] for index in range(count)]
