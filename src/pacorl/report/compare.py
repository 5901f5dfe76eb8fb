"""Two runs, or two settings over several seeds, on one page beside the runs (`pacorl report RUN RUN …`).

Runs whose configs differ in nothing but `seed` and their folder are one setting. Runs are paired by seed, and only
images of equal text and seed of noise are compared. Intervals are over the prompts of two runs, or over seeds.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from pacorl.core.ranking import Interval
from pacorl.io.files import check_made, kept_digest, write_atomic
from pacorl.report.figures import change, interval_text, label
from pacorl.report.folder import RunFolder, Sample, read_run
from pacorl.report.html import render
from pacorl.report.page import gallery, match, story
from pacorl.report.results import Result, alarms, compared, interval_note, pair_up, paired, summarised

NOT_COMPARED = {"out", "seed"}
OWN_FILE = re.compile(r"-[0-9a-f]{8}\.jsonl$")
"""Ending of the prompts that `PolicyTrainer` writes into a run's folder: eight digits of their digest."""
MOST_NAME = 80
"""Letters of a page's name."""

Runs = tuple[RunFolder, RunFolder]
"""Runs of one seed, a run of each setting."""


def write_comparison(folders: Sequence[Path]) -> tuple[Path, list[str]]:
    """Write a page that compares two runs, or two settings over seeds, into the folder that holds the second's runs.

    Returns:
        The page's path, and a line for each measure.

    Raises:
        ValueError: a folder is no run's, a file in it cannot be understood, the configs are not those of two settings,
            or no seed has a run of both.
    """
    runs = [read_run(folder) for folder in folders]
    if len({run.path.resolve() for run in runs}) < len(runs):
        raise ValueError("a run is named twice; name each once")
    settings = ([runs[0]], [runs[1]]) if len(runs) == 2 else settings_of(runs)
    names = side_names(*settings)
    pairs = {"": (runs[0], runs[1])} if len(runs) == 2 else by_seed(*settings)
    rows = rows_of_pairs(pairs)
    unlike = [line for pair in pairs.values() for line in unequal(*pair)]
    used = list(chain(*pairs.values()))
    left_out = [run.path.name for run in runs if run not in used]
    lines = [_line(row) for row in rows]
    alone_runs = f"Left out, for want of a run of the same seed: {', '.join(left_out)}." if left_out else ""

    # The gallery: the images of the first seed, by their change.
    seed, shown = next(iter(pairs.items()))
    matched, alone = match(*map(newest, shown))
    contents: dict[str, Any] = {
        "title": f"{names[0]} and {names[1]}",
        "name": "comparison",
        "names": names,
        "stories": [story(side[0]) for side in settings],
        "lines": [line for line in (*lines[:1], alone_runs) if line],
        "note": interval_note("training seeds" if len(pairs) > 1 else "prompts and seeds of noise"),
        "results": rows,
        "seeds": list(pairs) if len(pairs) > 1 else [],
        "epochs": tuple(run.last for run in shown),
        "unlike": unlike,
        "alone": alone,
        "gallery_seed": seed,
        "differences": differing_keys(settings[0][0], settings[1][0]),
        "alarms": [(run.path.name, alarms(run)) for run in used],
        "leaks": [(run.path.name, run.leaks) for run in used if run.leaks],
        "next": _next_command(settings[1][0], used),
    }
    file = re.sub(r"[^\w.-]+", "-", f"compare-{names[0]}-{names[1]}")[:MOST_NAME]
    path = settings[1][0].path.resolve().parent / f"{file}.html"
    check_made(path)
    write_atomic(path, render("compare.html", **contents, **gallery(matched, names=names)))
    return path, [*lines, *([alone_runs] if alone_runs else []), *[f"warning: {line}" for line in unlike]]


def _next_command(run: RunFolder, used: Sequence[RunFolder]) -> str:
    """Build the command of a further seed, until there are three of each setting; then the one that publishes."""
    folder = run.path
    seeds = {int(text) for one in used if (text := one.settings.get("seed", "")).isdecimal()}
    if len(used) >= 6 or not seeds or "objective.name" not in run.settings:
        return f"pacorl publish {shlex.quote(str(folder))}"
    seed = max(seeds) + 1
    config = shlex.quote(str(folder / "config.yaml"))
    return f"pacorl train-policy {config} seed={seed} out={shlex.quote(f'{folder}-seed-{seed}')}"


# --- settings and seeds ----------------------------------------------------------------------------------------------


def settings_of(runs: Sequence[RunFolder]) -> tuple[list[RunFolder], list[RunFolder]]:
    """Divide runs into the two sets of equal settings, in their order.

    Raises:
        ValueError: there is one set, or there are more than two.
    """
    sets: list[list[RunFolder]] = []
    for run in runs:
        for each in sets:
            if not differing_keys(each[0], run):
                each.append(run)
                break
        else:
            sets.append([run])
    if len(sets) != 2:
        firsts = ", ".join(str(each[0].path) for each in sets)
        raise ValueError(
            f"the runs are of {len(sets)} settings ({firsts} …); name runs of two, which but for their seed are equal"
        )
    return sets[0], sets[1]


def by_seed(first: Sequence[RunFolder], second: Sequence[RunFolder]) -> dict[str, Runs]:
    """Map each seed of both settings to its two runs.

    Raises:
        ValueError: a setting has a seed twice, or the settings share none.
    """
    sides: list[dict[str, RunFolder]] = []
    for runs in (first, second):
        side: dict[str, RunFolder] = {}
        for run in runs:
            other = side.setdefault(run.settings.get("seed", ""), run)
            if other is not run:
                raise ValueError(f"{other.path} and {run.path} have one setting and one seed; name one")
        sides.append(side)
    pairs = {seed: (run, sides[1][seed]) for seed, run in sides[0].items() if seed in sides[1]}
    if not pairs:
        seeds = " and ".join(", ".join(side) for side in sides)
        raise ValueError(f"the two settings share no seed, they have {seeds}; train both with the same seeds")
    return pairs


def side_names(first: Sequence[RunFolder], second: Sequence[RunFolder]) -> tuple[str, str]:
    """Return what the folders of each setting begin with, with as many parents as distinguish the two."""
    sides = []
    for runs in (first, second):
        paths = [str(run.path.resolve()) for run in runs]
        start = os.path.commonprefix(paths)  # noqa: RUF071 - by characters: runs/plain-1 and -2 are runs/plain
        sides.append(Path(start.rstrip("-_.") if len(paths) > 1 else start).parts)
    count = 1
    while sides[0][-count:] == sides[1][-count:] and count < max(map(len, sides)):
        count += 1
    return "/".join(sides[0][-count:]), "/".join(sides[1][-count:])


def differing_keys(first: RunFolder, second: RunFolder) -> list[tuple[str, str, str]]:
    """List (key, value, value) of every setting in which two configs differ, in their order; `–` if one lacks it.

    Seeds and folders are left out. Two files of equal content are no difference.
    """
    differing = []
    for key in dict.fromkeys([*first.settings, *second.settings]):
        values = [run.settings.get(key, "–") for run in (first, second)]
        if key not in NOT_COMPARED and not _are_same(*values):
            differing.append((key, values[0], values[1]))
    return differing


def _are_same(first: str, second: str) -> bool:
    """Whether two values are equal, or name files of equal content."""
    if first == second:
        return True
    paths = [Path(first), Path(second)]
    if OWN_FILE.search(first):
        return paths[0].name == paths[1].name
    return all(map(Path.is_file, paths)) and kept_digest(paths[0]) == kept_digest(paths[1])


# --- measures --------------------------------------------------------------------------------------------------------


def rows_of_pairs(pairs: Mapping[str, Runs]) -> list[Result]:
    """Compare every measure: of two runs over prompts, of several seeds over the seeds that have it."""
    by_name: dict[str, dict[str, Result]] = {}
    for seed, runs in pairs.items():
        for result in results_of(*runs):
            by_name.setdefault(result.name, {})[seed] = result
    if len(pairs) == 1:
        return list(chain.from_iterable(of_seeds.values() for of_seeds in by_name.values()))

    rows = []
    for name, of_seeds in by_name.items():
        means = {seed: (one.before.mean, one.after.mean) for seed, one in of_seeds.items() if one.before and one.after}
        firsts, lasts = zip(*means.values(), strict=True)
        starts = [_mean([one.starts[side] for one in of_seeds.values()]) for side in (0, 1)]
        by_seed = {seed: last - first for seed, (first, last) in means.items()}
        change_of = paired(list(means), firsts, lasts)
        rows.append(Result(name, *change_of, starts=(starts[0], starts[1]), by_seed=by_seed))
    return rows


def newest(run: RunFolder) -> list[Sample]:
    """Return the images of a run's newest evaluation; empty without one."""
    return run.samples[run.last] if run.last is not None else []


def results_of(first: RunFolder, second: RunFolder) -> list[Result]:
    """Compare the measures of the images that both runs have, then those that only the summaries have."""
    pairs = pair_up(newest(first), newest(second))
    starts = [_means_before(run, [pair[side] for pair in pairs]) for side, run in enumerate((first, second))]
    rows = []
    for row in compared(pairs):
        rows.append(replace(row, starts=(starts[0].get(row.name), starts[1].get(row.name))))
    measured = {row.name for row in rows}
    others = {row.name: row for row in summarised(second.summary)}
    for row in summarised(first.summary):
        other = others.get(row.name)
        if other and row.after and other.after and row.name not in measured:
            before = (row.before.mean if row.before else None, other.before.mean if other.before else None)
            change_of = Interval(other.after.mean - row.after.mean)
            rows.append(Result(row.name, row.after, other.after, change_of, starts=before))
    return rows


def _means_before(run: RunFolder, samples: Sequence[Sample]) -> dict[str, float]:
    """Average every measure of the run's first evaluation over those of its images that `samples` show again."""
    if len(run.samples) < 2:
        return {}
    rows = compared(pair_up(run.samples[min(run.samples)], samples))
    return {row.name: row.before.mean for row in rows if row.before}


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return fmean(finite) if finite else None


def unequal(first: RunFolder, second: RunFolder) -> list[str]:
    """State why two runs cannot be compared: evaluated after different epochs, or judges on different pairs."""
    names = side_names([first], [second])
    lines = []
    if first.last != second.last and None not in (first.last, second.last):
        epochs = [f"{name} after epoch {run.last}" for name, run in zip(names, (first, second), strict=True)]
        lines.append(f"{epochs[0]} and {epochs[1]} were evaluated; compare evaluations after the same epoch.")
    stated = [[run.summary.get(key) for key in ("held_out_pairs", "held_out_digest")] for run in (first, second)]
    if all(pairs for pairs, _ in stated) and stated[0] != stated[1]:
        counts = [f"{name} on {pairs}" for name, (pairs, _) in zip(names, stated, strict=True)]
        lines.append(f"{counts[0]} and {counts[1]} held-out pairs were evaluated, and the pairs differ.")
    return lines


def _line(row: Result) -> str:
    assert row.difference
    text = f"{label(row.name)}: {interval_text(row.difference, signed=True)}"
    if row.difference.groups:
        text += f", n = {row.difference.groups}"
    if row.by_seed:
        text += f", {row.higher} ({', '.join(f'{seed}: {change(value)}' for seed, value in row.by_seed.items())})"
    return text
