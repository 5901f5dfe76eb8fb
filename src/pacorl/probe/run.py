"""A probe from a config to its findings: draw, split, compare, recommend.

    findings = probe(config, ProbeOptions(epochs=2))
    findings.recommended["step"].value

Everything but seconds follows from the config's seed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pacorl.config.policy_run import PolicyConfig
from pacorl.core.advantages import zero_std_share
from pacorl.core.sampling import Sampler, Tree
from pacorl.core.schedule import seed_of
from pacorl.probe.design import (
    NOISE_LEVEL,
    SIZE,
    STEP,
    TEMPERATURE,
    Candidate,
    Design,
    ProbeOptions,
    configured_sampler,
    plan_design,
)
from pacorl.probe.forms import Form, Signal, compared, forms_of, signal_of
from pacorl.probe.measure import Clock, Drawn, Models, clock, draw, opened, reread
from pacorl.probe.readings import AS_TRAINED, readings_of
from pacorl.probe.variance import DRAWS, JUDGE, START, Estimate, Floats, Variances, estimate, nested_variances
from pacorl.rewards.consistency import JudgedReward
from pacorl.train import builders

TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
LEVEL = 0.05
"""What is recommended in place of the config's value is better with this chance of error, over all alternatives."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was seen of one way to sample, or of one temperature."""

    candidate: Candidate
    mean: float
    """Of the weighted rewards."""
    mean_P: Floats
    """The same, prompt by prompt."""
    variances: Variances
    signal: Signal
    """Of a group of the config's form."""
    alike: float
    """The share of drawn groups whose scores are all but equal."""
    missing_groups: int
    """Groups left out because a score in them is missing."""
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to take for one setting, and why."""

    value: object
    configured: object
    reason: str

    @property
    def changes(self) -> bool:
        """Whether it is not what the config says."""
        return self.value != self.configured


@dataclass(frozen=True, slots=True)
class Findings:
    """What a probe saw."""

    design: Design
    readings: tuple[str, ...]
    candidates: tuple[Finding, ...]
    """The config's own first."""
    rewards: Mapping[str, Variances]
    """Each reward by itself, sampled as configured."""
    temperatures: tuple[Finding, ...]
    """As configured first; empty if no reward has one."""
    forms: tuple[Form, ...]
    """The config's own first."""
    clock: Clock
    recommended: Mapping[str, Recommendation]
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    """Of this probe."""


def probe(
    config: PolicyConfig,
    options: ProbeOptions = ProbeOptions(),
    *,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> Findings:
    """Draw starts, step noises and readings of the judge, and say what a run of this config would learn from.

    Args:
        config: the run.
        options: the budget, and what to compare.
        advance: is called with how many of all samples are drawn.

    Raises:
        ValueError: if the budget is too small, the objective has no stochastic step, or the run could not start.
    """
    started = time.perf_counter()
    config = builders.checked_config(config, {})
    train, _, _ = builders.read_prompts(config)
    edits = any(prompt.sources for prompt in train)
    configured, readings = configured_sampler(config), readings_of(config, options.judge_repeats, edits=edits)
    design = plan_design(config, configured, options, prompts=len(train), readings=len(readings))
    with opened(config, design, train, readings) as models:
        design = _possible_sizes(design, models, options)
        draws, done = list[Drawn](), 0
        for candidate in design.candidates:
            draws.append(draw(models, candidate, configured, seeds=design.seeds))
            done += draws[-1].images
            advance(done, design.samples)
        findings = [_finding(config, configured, design, drawn) for drawn in draws]
        temperatures = _temperatures(models, configured, design, draws[0], options.temperatures or TEMPERATURES)
        times = clock(models, configured, draws)
    weights = [(reward.key, 1.0) for reward in config.rewards]
    return Findings(
        design,
        readings,
        tuple(findings),
        {key: _finding(config, configured, design, draws[0], weights=[(key, 1.0)]).variances for key, _ in weights},
        tuple(temperatures),
        tuple(forms_of(config, configured, findings[0].variances, times)),
        times,
        _recommended(findings, temperatures),
        tuple(_notes(design, findings[0])),
        {"probe": time.perf_counter() - started, **models.seconds},
    )


def _possible_sizes(design: Design, models: Models, options: ProbeOptions) -> Design:
    """The design without sizes of the probe's own choice that the generator has not."""
    possible, left_out = list[Candidate](), list(design.left_out)
    for candidate in design.candidates:
        try:
            models.policy.check_size(candidate.size)
            possible.append(candidate)
        except ValueError as refusal:
            if options.sizes:
                raise
            left_out.append(f"{candidate.name}: {refusal}")
    return replace(design, candidates=tuple(possible), left_out=tuple(left_out))


# --- what was drawn --------------------------------------------------------------------------------------------


def _finding(
    config: PolicyConfig,
    configured: Sampler,
    design: Design,
    drawn: Drawn,
    *,
    weights: Sequence[tuple[str, float]] = (),
    temperature: float | None = None,
) -> Finding:
    candidate = drawn.candidate
    score_BJ = _weighted(drawn, weights or [(reward.key, reward.weight) for reward in config.rewards])
    shape = (design.prompts, design.seeds, *[2] * len(candidate.sde_steps), score_BJ.shape[1])
    score_PSMJ = score_BJ.reshape(shape)
    whole_P = np.isfinite(score_BJ).reshape(design.prompts, -1).all(1)
    if not whole_P.any():
        raise ValueError(
            f"every prompt of {candidate.name} lacks a score, and nested draws need whole groups; see why the rewards "
            "give none (`pacorl doctor CONFIG`)"
        )
    score_PSMJ = score_PSMJ[whole_P]
    rng = np.random.default_rng(seed_of(config.seed, "probe", candidate.name, str(temperature)))
    names = [f"step {step}" for step in candidate.sde_steps]
    variances = nested_variances(score_PSMJ, steps=names, rng=rng)
    read_PG = score_PSMJ[..., 0].reshape(len(score_PSMJ), -1)
    # Training reads each image once: means and likeness are of that reading alone.
    groups = torch.arange(len(read_PG)).repeat_interleave(read_PG.shape[1])
    return Finding(
        candidate,
        float(read_PG.mean()),
        np.where(whole_P, score_BJ[:, 0].reshape(design.prompts, -1).mean(1), math.nan),
        variances,
        signal_of(variances, compared(config, _form_of(configured, candidate))),
        zero_std_share(torch.from_numpy(read_PG.reshape(-1)), groups),
        int((~whole_P).sum()),
        temperature,
    )


def _weighted(drawn: Drawn, weights: Sequence[tuple[str, float]]) -> Floats:
    """(B, J) weighted sums of the rewards, per reading; a reward that was read once is the same in all."""
    forms = list(dict.fromkeys(form for name, form in drawn.scores if name in dict(weights)))
    columns = [
        sum(weight * drawn.scores.get((name, form), drawn.scores[name, AS_TRAINED]) for name, weight in weights)
        for form in forms
    ]
    return np.stack(columns, axis=-1)


def _form_of(configured: Sampler, candidate: Candidate) -> Tree:
    """The config's tree with the candidate's number of stochastic steps: what follows the first branches no more."""
    tree, steps = configured.tree, len(candidate.sde_steps)
    if steps == len(tree.branches):
        return tree
    return Tree(tree.seeds, (tree.leaves(0), *[1] * (steps - 1)))


def _temperatures(
    models: Models, configured: Sampler, design: Design, drawn: Drawn, temperatures: Sequence[float]
) -> list[Finding]:
    """What temperatures of the rewards make of the images that were sampled as configured."""
    in_use = {reward.temperature for reward in models.rewards.values() if isinstance(reward, JudgedReward)}
    if not in_use:
        return []
    first = in_use.pop() if len(in_use) == 1 else None
    baseline = _finding(models.config, configured, design, drawn, temperature=first)
    return [baseline] + [
        _finding(models.config, configured, design, reread(models, drawn, temperature=t), temperature=t)
        for t in temperatures
        if t != first
    ]


# --- what to take ----------------------------------------------------------------------------------------------


def _recommended(findings: Sequence[Finding], temperatures: Sequence[Finding]) -> dict[str, Recommendation]:
    baseline, recommended = findings[0], dict[str, Recommendation]()
    values: Mapping[str, Callable[[Finding], object]] = {
        STEP: lambda finding: list(finding.candidate.sde_steps),
        NOISE_LEVEL: lambda finding: finding.candidate.noise_level,
        SIZE: lambda finding: str(finding.candidate.size),
    }
    for kind, value in values.items():
        rivals = [finding for finding in findings[1:] if finding.candidate.varies == kind]
        recommended[kind] = _best(baseline, rivals, value=value, merit=_gain_for_cost)
    if temperatures:
        recommended[TEMPERATURE] = _best(
            temperatures[0], temperatures[1:], value=lambda finding: finding.temperature, merit=_teaching
        )
    return recommended


def _gain_for_cost(finding: Finding) -> Floats:
    """The gain of an epoch of equal cost: it grows with the root of the number of samples."""
    return finding.signal.gain_X / math.sqrt(finding.candidate.weight)


def _teaching(finding: Finding) -> Floats:
    """The accuracy of advantages times the share of groups that have any: temperatures change the reward's unit.

    A share of few groups is drawn from the Beta of Jeffreys' prior.
    """
    groups = len(finding.mean_P)
    alike = finding.alike * groups
    rng = np.random.default_rng(seed_of("alike", str(finding.temperature)))
    different = np.concatenate([[1 - finding.alike], rng.beta(groups - alike + 0.5, alike + 0.5, DRAWS)])
    return np.asarray(finding.signal.accuracy_X * different)


def _best(
    baseline: Finding,
    rivals: Sequence[Finding],
    *,
    value: Callable[[Finding], object],
    merit: Callable[[Finding], Floats],
) -> Recommendation:
    """The best rival if it is surely better than the config's own and its images are not surely worse, else the own."""
    configured = value(baseline)
    if not rivals:
        return Recommendation(configured, configured, "nothing else was drawn")
    # Bonferroni: of many alternatives that are equal, one looks better by chance.
    margins = [estimate(merit(rival) - merit(baseline), tail=LEVEL / 2 / len(rivals)) for rival in rivals]
    better = [
        (margin.value, rival)
        for margin, rival in zip(margins, rivals, strict=True)
        if margin.low > 0 and _fall(baseline, rival).high >= 0
    ]
    if not better:
        return Recommendation(configured, configured, _why_not(baseline, rivals, margins, value))
    gained, best = max(better, key=lambda pair: pair[0])
    return Recommendation(value(best), configured, f"better by {gained:.3g}, surely above 0")


def _why_not(
    baseline: Finding, rivals: Sequence[Finding], margins: Sequence[Estimate], value: Callable[[Finding], object]
) -> str:
    margin, rival = max(zip(margins, rivals, strict=True), key=lambda pair: pair[0].value)
    if margin.value <= 0:
        return "nothing that was drawn looks better"
    if margin.low > 0:
        return (
            f"{value(rival)} carries more signal, and its images surely score lower: a mean of {rival.mean:.3f}, and "
            f"{baseline.mean:.3f} as configured"
        )
    return (
        f"{value(rival)} looks better and may be chance ({margin.value:+.3g}, {margin.low:+.3g} to {margin.high:+.3g})"
    )


def _fall(baseline: Finding, rival: Finding) -> Estimate:
    """The difference of means, with Student's interval over prompts; without bounds for a single prompt."""
    difference_P = rival.mean_P - baseline.mean_P
    difference_P = difference_P[np.isfinite(difference_P)]
    count = len(difference_P)
    if count < 2:
        return Estimate(float(difference_P.mean()) if count else math.nan, -math.inf, math.inf)
    spread = float(difference_P.std(ddof=1)) / math.sqrt(count)
    drawn = np.random.default_rng(0).standard_t(count - 1, DRAWS) * spread
    return estimate(difference_P.mean() + np.concatenate([[0.0], drawn]))


def _notes(design: Design, baseline: Finding) -> list[str]:
    notes = [f"left out {reason}" for reason in design.left_out]
    if baseline.variances.clamped:
        notes.append(f"below 0, and taken as 0: the variance of {', '.join(baseline.variances.clamped)}")
    if JUDGE not in baseline.variances.names:
        notes.append("the judge was read once, so that its own share is within that of the last stochastic step")
    if baseline.missing_groups:
        notes.append(f"{baseline.missing_groups} of {design.prompts} groups lack a score, and are left out")
    if baseline.variances.share(START).high - baseline.variances.share(START).low > 0.5:
        notes.append("the intervals are wide; a budget of several epochs (--epochs) narrows them")
    return notes
