"""Two settings over several seeds (`pacorl report RUN RUN RUN …`): differences paired by seed, t-intervals over seeds.

Runs whose configs differ in nothing but `seed` and their folder are one arm. Each pair of a seed is compared as two
runs are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from statistics import fmean

from pacorl.core.ranking import t_interval
from pacorl.io.files import write_atomic
from pacorl.report.compare import (
    asked_of_both,
    different_data,
    differing_keys,
    in_pairs,
    objective_of,
    results_of_both,
    side_names,
)
from pacorl.report.curves import Chart, charts
from pacorl.report.figures import change, interval_text, label, unit_axis
from pacorl.report.folder import RunFolder, read_run, settings_of
from pacorl.report.html import render
from pacorl.report.page import drawn
from pacorl.report.results import Result, alarms

SEED = "seed"

Pair = tuple[RunFolder, RunFolder]
"""Runs of one seed, a run of each arm."""


@dataclass(frozen=True, slots=True)
class SeedsRow:
    """A measure over seeds."""

    result: Result
    """Means of both arms and of the difference, with t-intervals over the seeds."""
    by_seed: Mapping[str, float]
    """Seed → difference."""


def write_arms(folders: Sequence[Path]) -> tuple[Path, list[str]]:
    """Write a page that compares two arms of runs, in the folder of the second arm's first run.

    Returns:
        The page's path, and a line for each measure.

    Raises:
        ValueError: a folder is no run's, a file in it cannot be understood, the configs are not those of two arms, or
            no seed has a run of both.
    """
    arms = arms_of([read_run(folder) for folder in folders])
    pairs = paired(*arms)
    names = arm_names(*arms)
    rows = rows_over_seeds(pairs)
    unlike, left_out = _unequal(arms, pairs)
    seeds = ", ".join(pairs)
    lines = [f"{names[1]} minus {names[0]}, by seed ({seeds}):", *map(_line, rows), *left_out]
    if not rows:
        lines = [f"No measures, for evaluations are missing; the curves are means over the seeds {seeds}.", *left_out]

    runs = [run for pair in pairs.values() for run in pair]
    before, after = (mean_charts(side) for side in zip(*pairs.values(), strict=True))
    same_objective = objective_of(arms[0][0]) == objective_of(arms[1][0])
    contents = {
        "title": f"{names[0]} and {names[1]}",
        "name": "two settings",
        "names": names,
        "lines": lines,
        "rows": rows,
        "results": [row.result for row in rows],
        "seeds": list(pairs),
        "unlike": unlike,
        "all_unit_axes": all(unit_axis(row.result.before, row.result.after) for row in rows),
        "alarms": [(run.path.name, alarms(run)) for run in runs],
        "leaks": [(run.path.name, run.leaks) for run in runs],
        "differences": settings_apart(arms[0][0], arms[1][0]),
        "charts": drawn(in_pairs(before, after, names, with_loss=same_objective)),
        "same_objective": same_objective,
    }
    path = arms[1][0].path / f"seeds-{arms[0][0].path.resolve().name}.html"
    write_atomic(path, render("arms.html", **contents))
    return path, [*lines, *[f"warning: {line}" for line in unlike]]


def arms_of(runs: Sequence[RunFolder]) -> tuple[list[RunFolder], list[RunFolder]]:
    """Divide runs into the two sets of equal settings, in their order.

    Raises:
        ValueError: there is one set, or there are more than two.
    """
    arms: list[list[RunFolder]] = []
    for run in runs:
        same = [arm for arm in arms if not settings_apart(arm[0], run)]
        if same:
            same[0].append(run)
        else:
            arms.append([run])

    if len(arms) == 1:
        raise ValueError(f"{len(runs)} runs differ in nothing but their seed; name runs of two settings")
    if len(arms) > 2:
        # The third arm is often an arm with a setting that was forgotten.
        keys = [", ".join(key for key, *_ in settings_apart(arm[0], arms[2][0])) for arm in arms[:2]]
        raise ValueError(
            f"{arms[2][0].path} is of a third setting: it differs from {arms[0][0].path} in {keys[0]} and from "
            f"{arms[1][0].path} in {keys[1]}; name runs of two settings, which but for their seed are equal"
        )
    return arms[0], arms[1]


def settings_apart(first: RunFolder, second: RunFolder) -> list[tuple[str, str, str]]:
    """List the settings in which two runs differ, without their seeds."""
    return [row for row in differing_keys(first.config, second.config) if row[0] != SEED]


def paired(first: Sequence[RunFolder], second: Sequence[RunFolder]) -> dict[str, Pair]:
    """Map each seed of both arms to its two runs.

    Raises:
        ValueError: an arm has a seed twice, or the arms share none.
    """
    sides = [_by_seed(arm) for arm in (first, second)]
    pairs = {seed: (run, sides[1][seed]) for seed, run in sides[0].items() if seed in sides[1]}
    if not pairs:
        seeds = " and ".join(", ".join(side) for side in sides)
        raise ValueError(f"the two settings share no seed, they have {seeds}; train both with the same seeds")
    return pairs


def _by_seed(arm: Sequence[RunFolder]) -> dict[str, RunFolder]:
    runs: dict[str, RunFolder] = {}
    for run in arm:
        seed = settings_of(run.config).get(SEED, "")
        if seed in runs:
            raise ValueError(
                f"{runs[seed].path} and {run.path} have one setting and one seed, {seed}; name one of them"
            )
        runs[seed] = run
    return runs


def mean_charts(runs: Sequence[RunFolder]) -> list[Chart]:
    """Average the curves of one line over the runs that have them, which must be all, at the epochs of all."""
    by_run = []
    for run in runs:
        single = [chart for chart in chain(*charts(run).values()) if len(chart.lines) == 1]
        by_run.append({(chart.group, chart.title): chart for chart in single})

    means = []
    for key, chart in by_run[0].items():
        lines = [dict(curves[key].lines[0].points) for curves in by_run if key in curves]
        if len(lines) < len(runs):
            continue
        epochs = sorted(set(lines[0]).intersection(*lines[1:]))
        points = [(epoch, mean_or_none([line[epoch] for line in lines])) for epoch in epochs]
        means.append(replace(chart, band=[], lines=[replace(chart.lines[0], points=points)]))
    return means


def mean_or_none(values: Sequence[float | None]) -> float | None:
    """Average values; None if one of them is None."""
    finite = [value for value in values if value is not None]
    return fmean(finite) if len(finite) == len(values) else None


def arm_names(first: Sequence[RunFolder], second: Sequence[RunFolder]) -> tuple[str, str]:
    """Return what the paths of an arm's runs begin with; the first runs' names if that is equal."""
    starts = []
    for arm in (first, second):
        paths = [str(run.path.resolve()) for run in arm]
        start = os.path.commonprefix(paths)  # noqa: RUF071 - by characters: runs/plain-1 and -2 are runs/plain
        starts.append(Path(start.rstrip("-_.")))
    if starts[0] == starts[1]:
        return side_names(first[0].path, second[0].path)
    return side_names(starts[0], starts[1])


def rows_over_seeds(pairs: Mapping[str, Pair]) -> list[SeedsRow]:
    """Compare every measure of the newest evaluations by seed, and average over the seeds that have it."""
    sides: dict[str, dict[str, tuple[float, float]]] = {}
    for seed, (first, second) in pairs.items():
        samples, _ = asked_of_both(first, second)
        for row in results_of_both(first, second, samples):
            if row.before and row.after:
                sides.setdefault(row.name, {})[seed] = (row.before.mean, row.after.mean)

    rows = []
    for name, means in sides.items():
        by_seed = {seed: second - first for seed, (first, second) in means.items()}
        before, after = (t_interval(side) for side in zip(*means.values(), strict=True))
        rows.append(SeedsRow(Result(name, before, after, t_interval(list(by_seed.values()))), by_seed))
    return rows


def _unequal(arms: Sequence[Sequence[RunFolder]], pairs: Mapping[str, Pair]) -> tuple[list[str], list[str]]:
    """State which runs of a seed were evaluated after different epochs or on different pairs, and what is left out."""
    unlike = []
    left_out = []
    for first, second in pairs.values():
        names = side_names(first.path, second.path)
        epochs = [max(run.samples, default=None) for run in (first, second)]
        if epochs[0] != epochs[1]:
            unlike.append(f"{names[0]} was evaluated after epoch {epochs[0]} and {names[1]} after epoch {epochs[1]}.")
        if different := different_data(first.path, second.path):
            unlike.append(different)
        _, alone = asked_of_both(first, second)
        if alone:
            left_out.append(f"Left out, {alone} images that {names[0]} or {names[1]} has alone.")
    compared = list(chain(*pairs.values()))
    alone_runs = [run.path.name for run in chain(*arms) if run not in compared]
    if alone_runs:
        left_out.append(f"Left out, for want of a run of the same seed: {', '.join(alone_runs)}.")
    return unlike, left_out


def _line(row: SeedsRow) -> str:
    result = row.result
    assert result.difference
    seeds = ", ".join(f"{seed}: {change(value)}" for seed, value in row.by_seed.items())
    interval = interval_text(result.difference, signed=True)
    return f"{label(result.name)}: {interval}, n = {len(row.by_seed)} ({seeds})"
