"""A probe from a config to its findings: draw, split the variance, count the cost.

    findings = probe(config, ProbeOptions(epochs=2))
    findings.candidates[0].signal.value

Everything but seconds follows from the config's seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from pacorl.core.advantages import zero_std_share
from pacorl.core.sampler import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.grpo import builders
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.lab.probe.draws import (
    AS_TRAINED,
    CHILDREN,
    Candidate,
    Clock,
    Design,
    Drawn,
    Models,
    ProbeOptions,
    clock,
    configured_sampler,
    draw,
    opened,
    plan_design,
    readings_of,
)
from pacorl.lab.probe.variance import JUDGE, START, Estimate, Floats, Variances, nested_variances

SCHEMA = 2
"""Version of the document; it rises if a key changes its meaning or goes."""
WIDE = 0.5
"""Width of an interval of the start's share above which a note recommends more draws."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Variances of one way to sample."""

    candidate: Candidate
    mean: float
    """Mean of the weighted rewards."""
    variances: Variances
    signal: Estimate
    """Share of a group's variance that training can move, in the config's tree."""
    alike: float
    """Share of drawn groups whose scores are all but equal."""
    missing_groups: int
    """Groups left out because a score in them is missing."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one epoch as configured, and its seconds on this machine."""

    forwards: int
    """Forwards in sampling, one per distinct latent."""
    trained: int
    """Forwards with a backward."""
    questions: int
    seconds: dict[str, float]
    """Seconds of sampling, reward and update, one phase after the other."""


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a probe."""

    design: Design
    readings: tuple[str, ...]
    candidates: tuple[Finding, ...]
    """The config's own first."""
    rewards: Mapping[str, Variances]
    """Variances of each reward alone, sampled as configured."""
    cost: Cost
    clock: Clock
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    """Seconds of this probe."""

    def document(self) -> dict[str, Any]:
        """Return the whole probe for programs; undefined figures are null."""
        design = self.design
        document = {
            "schema": SCHEMA,
            "design": {
                "prompts": design.prompts,
                "starts": design.seeds,
                "children": CHILDREN,
                "readings": [AS_TRAINED, *self.readings],
                "samples": design.samples,
                "budget": design.budget,
            },
            "candidates": [_candidate(finding) for finding in self.candidates],
            "rewards": {name: _levels(variances) for name, variances in self.rewards.items()},
            "cost": asdict(self.cost),
            "clock": asdict(self.clock),
            "notes": list(self.notes),
            "seconds": dict(self.seconds),
        }
        return _without_nan(document)  # type: ignore[no-any-return]


def probe(
    config: PolicyConfig,
    options: ProbeOptions = ProbeOptions(),
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Draw starts, step noises and readings of the judge, and split the variance of the reward.

    Args:
        config: the run.
        options: the budget, and what to compare.
        advance: called with the number of samples so far and of all samples.

    Raises:
        ValueError: if the budget is too small, the objective has no stochastic step, or the run could not start.
    """
    started = time.perf_counter()
    config = builders.checked_config(config, {})
    train, _, _ = builders.read_prompts(config)
    configured = configured_sampler(config)
    readings = readings_of(config, options.judge_repeats, edits=any(prompt.sources for prompt in train))
    design = plan_design(config, configured, options, prompts=len(train), readings=len(readings))

    with opened(config, design, train, readings) as models:
        design = _possible_sizes(design, models, options)
        draws = list[Drawn]()
        for candidate in design.candidates:
            draws.append(draw(models, candidate, configured, seeds=design.seeds))
            advance(sum(drawn.images for drawn in draws), design.samples)
        times = clock(models, configured, draws)

    weights = {reward.key: reward.weight for reward in config.rewards}
    findings = [_finding(config, configured, design, drawn, weights) for drawn in draws]
    alone = {key: _finding(config, configured, design, draws[0], {key: 1.0}).variances for key in weights}
    return Findings(
        design,
        readings,
        tuple(findings),
        alone,
        epoch_cost(config, configured, times),
        times,
        tuple(_notes(design, findings[0])),
        {"probe": time.perf_counter() - started, **models.seconds},
    )


def _possible_sizes(design: Design, models: Models, options: ProbeOptions) -> Design:
    """Leave out default sizes that the generator cannot make."""
    possible = list[Candidate]()
    left_out = list(design.left_out)
    for candidate in design.candidates:
        try:
            models.policy.check_size(candidate.size)
            possible.append(candidate)
        except ValueError as refusal:
            if options.sizes:
                raise
            left_out.append(f"{candidate.name}: {refusal}")
    return replace(design, candidates=tuple(possible), left_out=tuple(left_out))


def _finding(
    config: PolicyConfig, configured: Sampler, design: Design, drawn: Drawn, weights: Mapping[str, float]
) -> Finding:
    candidate = drawn.candidate
    score_BJ = _weighted(drawn, weights)
    shape = (design.prompts, design.seeds, *[CHILDREN] * len(candidate.sde_steps), score_BJ.shape[1])
    score_PSMJ = score_BJ.reshape(shape)

    # Nested draws need whole groups.
    whole_P = np.isfinite(score_BJ).reshape(design.prompts, -1).all(1)
    if not whole_P.any():
        raise ValueError(
            f"every prompt of {candidate.name} lacks a score, and nested draws need whole groups; see why the rewards "
            "give none (`pacorl doctor CONFIG`)"
        )
    score_PSMJ = score_PSMJ[whole_P]

    rng = np.random.default_rng(seed_of(config.seed, "probe", candidate.name, "None"))
    names = [f"step {step}" for step in candidate.sde_steps]
    variances = nested_variances(score_PSMJ, steps=names, rng=rng)

    # Training reads each image once: means and likeness are of that reading alone.
    read_PG = score_PSMJ[..., 0].reshape(len(score_PSMJ), -1)
    groups = torch.arange(len(read_PG)).repeat_interleave(read_PG.shape[1])
    return Finding(
        candidate,
        float(read_PG.mean()),
        variances,
        variances.signal(level_counts(config, configured, candidate, variances)),
        zero_std_share(torch.from_numpy(read_PG.reshape(-1)), groups),
        int((~whole_P).sum()),
    )


def _weighted(drawn: Drawn, weights: Mapping[str, float]) -> Floats:
    """(B, J) weighted sums of the rewards, per reading; a reward that was read once is the same in all."""
    forms = list(dict.fromkeys(form for name, form in drawn.scores if name in weights))
    columns = []
    for form in forms:
        read = {name: drawn.scores.get((name, form), drawn.scores[name, AS_TRAINED]) for name in weights}
        columns.append(sum(weight * read[name] for name, weight in weights.items()))
    return np.stack(columns, axis=-1)


def level_counts(
    config: PolicyConfig, configured: Sampler, candidate: Candidate, variances: Variances
) -> dict[str, int]:
    """Count the distinct draws of each level among the samples that an advantage compares, in the config's tree.

    With another number of stochastic steps, all children are at the first one. With `advantages.among: siblings` the
    samples of one start are compared.
    """
    tree = configured.tree
    steps = len(candidate.sde_steps)
    if steps != len(tree.branches):
        tree = Tree(tree.seeds, (tree.leaves(0), *[1] * (steps - 1)))
    if config.advantages.among == "siblings":
        tree = replace(tree, seeds=1)
    return {**dict(zip(variances.within, node_counts(tree), strict=False)), JUDGE: tree.group_size}


def node_counts(tree: Tree) -> list[int]:
    """Distinct draws per group: starts, then the noises of each stochastic step."""
    return [tree.group_size // tree.leaves(level) for level in range(len(tree.branches) + 1)]


def epoch_cost(config: PolicyConfig, configured: Sampler, clock: Clock) -> Cost:
    """Count the work of an epoch as configured, and multiply it by the seconds of single calls."""
    tree = configured.tree
    batch = config.sampling.batch
    nodes = [config.prompts_per_epoch * count for count in node_counts(tree)]
    samples = nodes[-1]
    node_batches = [max(1, batch // tree.leaves(level)) for level in range(len(tree.branches))]

    # Nodes of a level pass the steps from the level before to their own; samples pass the suffix.
    starts = [-1, *configured.sde_steps]
    passed = [count * (step - before) for count, before, step in zip(nodes, starts, configured.sde_steps, strict=False)]
    suffix = len(configured.suffix.grid(configured.sde_steps[-1] + 1, configured.steps)) - 1
    sampling = sum(count * clock.forward(size) / size for count, size in zip(passed, node_batches, strict=True))
    sampling += samples * (suffix * clock.forward(batch) / batch + clock.decode)

    trained = [count * config.objective.inner_epochs for count in nodes[:-1]]
    update = 0.0
    for count, size in zip(trained, node_batches, strict=True):
        update += count * clock.trained(size) / size
        if config.objective.kl_weight > 0:  # the base's own forward
            update += count * clock.forward(size) / size

    questions = samples * clock.questions
    seconds = {
        "sampling": sampling,
        "reward": questions * clock.question + samples * clock.rewards,
        "update": update,
    }
    return Cost(sum(passed) + samples * suffix, sum(trained), round(questions), seconds)


def _notes(design: Design, baseline: Finding) -> list[str]:
    notes = [f"left out {reason}" for reason in design.left_out]
    variances = baseline.variances
    if variances.clamped:
        notes.append(f"below 0, and taken as 0: the variance of {', '.join(variances.clamped)}")
    if JUDGE not in variances.names:
        notes.append("the judge was read once, so that its own share is within that of the last stochastic step")
    if baseline.missing_groups:
        notes.append(f"{baseline.missing_groups} of {design.prompts} groups lack a score, and are left out")
    start = variances.share(START)
    if start.high - start.low > WIDE:
        notes.append("the intervals are wide; a budget of several epochs (--epochs) narrows them")
    return notes


def _candidate(finding: Finding) -> dict[str, Any]:
    candidate = finding.candidate
    return {
        "name": candidate.name,
        "sde_steps": list(candidate.sde_steps),
        "noise_level": candidate.noise_level,
        "size": [candidate.size.height, candidate.size.width],
        "mean": finding.mean,
        "levels": _levels(finding.variances),
        "signal": asdict(finding.signal),
        "groups_alike": finding.alike,
        "groups_missing": finding.missing_groups,
    }


def _levels(variances: Variances) -> dict[str, Any]:
    levels = {}
    for name, variance, freedom in zip(variances.names, variances.unbiased_L, variances.freedom_L, strict=True):
        levels[name] = {
            "variance": asdict(variances.variance(name)),
            "unbiased": float(variance),
            "share": asdict(variances.share(name)) if name in variances.within else None,
            "degrees_of_freedom": int(freedom),
            "clamped": name in variances.clamped,
        }
    return levels


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
