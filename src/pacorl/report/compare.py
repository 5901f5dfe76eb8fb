"""Two runs, or two settings over several seeds, on one page (`pacorl report RUN RUN …`).

Runs whose configs differ in nothing but `seed` and their folder are one setting. Runs are paired by seed, and only
images of equal text and seed of noise are compared. Intervals are over the prompts of two runs, or over seeds.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from pacorl.core.metric_names import MONITOR
from pacorl.core.ranking import Interval
from pacorl.io.files import check_made, write_atomic
from pacorl.report.folder import RunFolder, Sample, numbers, read_run
from pacorl.report.html import render
from pacorl.report.page import Set, by_change, gallery, match
from pacorl.report.results import (
    INTERVAL_NOTE,
    PLACES,
    Result,
    change_text,
    compared,
    pair_up,
    paired,
    rows_of,
    summarised,
)

NOT_COMPARED = {"out", "seed"}
MEASURES = re.compile(
    r"evaluation\.(size|steps|judge|rewards\.\d+\.args)\b|judge\.checkpoint$|rewards\.\d+\.args\.ask$"
)
"""Keys that decide what an evaluation measures."""
OWN_FILE = re.compile(r"-[0-9a-f]{8}\.jsonl$")
"""Ending of the prompts that `PolicyTrainer` writes into a run's folder: eight digits of their digest."""

Runs = tuple[RunFolder, RunFolder]
"""Runs of one seed, a run of each setting."""


def write_comparison(folders: Sequence[Path]) -> tuple[Path, list[str]]:
    """Compare two runs, or two settings over seeds, on a page in the folder that contains the second's runs.

    Returns the page's path, and a line for each measure.

    Raises:
        ValueError: a folder is no run's, a file in it cannot be understood, the configs do not form two settings, or a
            seed has a run of one setting alone.
    """
    runs = [read_run(folder) for folder in folders]
    # Two runs are compared as they are. More runs form two settings, paired by seed.
    pairs = {"": (runs[0], runs[1])} if len(runs) == 2 else pairs_of(runs)
    first, second = next(iter(pairs.values()))
    by_seed = len(pairs) > 1
    names = side_names(first, second, by_seed=by_seed)
    rows = rows_of_pairs(pairs)
    lines = render("compare.txt", rows=rows, names=names, change_text=change_text).splitlines()

    # The gallery: the images of all seeds, by their change.
    sets: list[Set] = []
    unmatched = 0
    unlike: list[str] = []
    for one, other in pairs.values():
        # Once each, since the seeds of a setting are evaluated alike.
        fault = unequal(one, other)
        if fault and fault not in unlike:
            unlike.append(fault)
        of_seed, alone = match(newest(one), newest(other))
        sets += of_seed
        unmatched += alone
    left_out = []
    if unmatched:
        left_out.append(f"Left out, for want of the same prompt in the other run: {unmatched} of the images.")

    page = render(
        "compare.html",
        title=f"{names[0]} and {names[1]}",
        name="comparison",
        names=names,
        runs=list(chain(*pairs.values())),
        lines=[*(unlike or lines[:1]), *left_out],
        note=INTERVAL_NOTE,
        results=rows,
        seeds=list(pairs) if by_seed else [],
        bold=not unlike,
        differences=differing_keys(first, second),
        **gallery(by_change(sets), names=names),
    )
    name = re.sub(r"[^\w.-]+", "-", f"compare-{names[0]}-{names[1]}")
    path = second.path.resolve().parent / f"{name}.html"
    # Replace only an earlier comparison.
    check_made(path)
    write_atomic(path, page)
    return path, [*[f"warning: {line}" for line in unlike], *lines, *left_out]


def pairs_of(runs: Sequence[RunFolder]) -> dict[str, Runs]:
    """Divide runs into two settings, in their order, and pair them: seed → run of each.

    Raises:
        ValueError: there are not two settings, one has a seed twice, or they have other seeds.
    """
    settings: dict[frozenset[tuple[str, str]], dict[str, RunFolder]] = {}
    for run in runs:
        of_setting = settings.setdefault(frozenset(comparable(run).items()), {})
        other = of_setting.setdefault(run.settings.get("seed", ""), run)
        if other is not run:
            raise ValueError(f"{other.path} and {run.path} have one setting and one seed; name one")
    sides = list(settings.values())
    if len(sides) != 2:
        firsts = ", ".join(str(next(iter(side.values())).path) for side in sides)
        raise ValueError(
            f"the runs are of {len(sides)} settings ({firsts} …); name runs of two, which but for their seed are equal"
        )
    if sides[0].keys() != sides[1].keys():
        seeds = " and ".join(", ".join(side) for side in sides)
        raise ValueError(f"the two settings have the seeds {seeds}; name runs of both settings for every seed")
    return {seed: (run, sides[1][seed]) for seed, run in sides[0].items()}


def comparable(run: RunFolder) -> dict[str, str]:
    """Select the config's keys that runs of one setting share; of files that a run wrote for itself the name alone."""
    settings = {}
    for key, value in run.settings.items():
        if key not in NOT_COMPARED:
            settings[key] = Path(value).name if OWN_FILE.search(value) else value
    return settings


def side_names(first: RunFolder, second: RunFolder, *, by_seed: bool) -> tuple[str, str]:
    """Name each side by its folder, of several seeds without the seed's number; by the paths if both are equal."""
    before, after = (run.path.resolve().name for run in (first, second))
    if by_seed:
        before, after = (re.sub(r"[\W_]*\d+$", "", name) or name for name in (before, after))
    if before == after:
        return str(first.path), str(second.path)
    return before, after


def differing_keys(first: RunFolder, second: RunFolder) -> list[tuple[str, str, str]]:
    """List (key, value, value) of every setting in which two configs differ, in their order; `–` if one lacks it."""
    before = comparable(first)
    after = comparable(second)
    differing = []
    for key in before | after:
        if before.get(key) != after.get(key):
            differing.append((key, first.settings.get(key, "–"), second.settings.get(key, "–")))
    return differing


def rows_of_pairs(pairs: Mapping[str, Runs]) -> list[Result]:
    """Compare every measure: of two runs over prompts, of several seeds over the seeds that have it."""
    by_name: dict[str, dict[str, Result]] = {}
    rows = []
    for seed, runs in pairs.items():
        rows = results_of(*runs)
        for result in rows:
            by_name.setdefault(result.name, {})[seed] = result
    if len(pairs) == 1:
        return rows

    rows = []
    for name, of_seeds in by_name.items():
        firsts, lasts, begun = [], [], []
        by_seed = {}
        for seed, result in of_seeds.items():
            assert result.before
            assert result.after
            firsts.append(result.before.mean)
            lasts.append(result.after.mean)
            # Rounded as they are shown: a smaller difference is no rise.
            by_seed[seed] = round(lasts[-1] - firsts[-1], PLACES)
            if result.untrained:
                begun.append(result.untrained.mean)
        untrained = Interval(fmean(begun)) if len(begun) == len(of_seeds) else None
        rows.append(Result(name, *paired(list(of_seeds), firsts, lasts), by_seed=by_seed, untrained=untrained))
    return rows


def newest(run: RunFolder) -> list[Sample]:
    """Return the images of a run's newest evaluation; empty without one."""
    if run.last is None:
        return []
    return run.samples[run.last]


def results_of(first: RunFolder, second: RunFolder) -> list[Result]:
    """Compare the measures of images in both runs, then the measures that only the summaries have."""
    rows = compared(pair_up(newest(first), newest(second)))
    measured = {row.name for row in rows}
    others = whole_measures(second)
    for name, before in whole_measures(first).items():
        after = others.get(name)
        if before and after and name not in measured:
            rows.append(Result(name, before, after, Interval(after.mean - before.mean)))
    begun = beginnings(first, second)
    return [replace(row, untrained=begun.get(row.name)) for row in rows]


def beginnings(first: RunFolder, second: RunFolder) -> dict[str, Interval]:
    """Read the measures before training which the tables of both runs have, and which are equal as they are shown."""
    others = {row.name: row.before for row in rows_of(second)}
    begun = {}
    for row in rows_of(first):
        other = others.get(row.name)
        if row.before and other and round(row.before.mean, PLACES) == round(other.mean, PLACES):
            begun[row.name] = row.before
    return begun


def whole_measures(run: RunFolder) -> dict[str, Interval | None]:
    """Read the measures of all sets together, which have no images to pair, and so no interval.

    They are κ and the agreement across sets, an oracle's of the newest evaluation and the judge's of the last epoch,
    and those of the summary.
    """
    measures: dict[str, Interval | None] = {}
    for line in (*run.evaluations[-1:], *run.epochs[-1:]):
        for name, value in numbers(line).items():
            if name.removeprefix(MONITOR) in ("kappa", "across"):
                measures[name] = Interval(value)
    for row in summarised(run.summary):
        measures[row.name] = row.after
    return measures


def unequal(first: RunFolder, second: RunFolder) -> str:
    """State by what two runs cannot be compared: settings, epochs of evaluations, held-out pairs; empty if they can."""
    differing = [row for row in differing_keys(first, second) if MEASURES.match(row[0])]
    others: dict[str, tuple[Any, Any]] = {
        "seed": (first.settings.get("seed", "–"), second.settings.get("seed", "–")),
        "epoch of the newest evaluation": (first.last, second.last),
        "held-out pairs": (first.summary.get("held_out_digest"), second.summary.get("held_out_digest")),
    }
    for name, (before, after) in others.items():
        if before != after and None not in (before, after):
            differing.append((name, str(before), str(after)))
    if not differing:
        return ""
    listed = ", ".join(f"{name} {before} / {after}" for name, before, after in differing)
    return f"The runs were evaluated differently: {listed}."
