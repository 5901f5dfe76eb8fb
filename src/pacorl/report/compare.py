"""Two runs on one page (`pacorl report RUN RUN`): their last evaluations, the same prompts' images, their configs.

Only images of equal text and seed are compared. Their order and the differences' intervals are as between a run's first
and last evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pacorl.io.documents import read_object
from pacorl.io.files import kept_digest, write_atomic
from pacorl.report.curves import Chart, charts
from pacorl.report.figures import changes_svg, label, unit_axis
from pacorl.report.folder import RunFolder, Sample, read_run, settings_of
from pacorl.report.html import render
from pacorl.report.page import MEASURES, OPEN_SETS, choose, drawn, links_to, match, measure_of, spread
from pacorl.report.results import Result, alarms, compared, draws_differ, facts, paired_by, results

NOT_COMPARED = {"out"}
"""Keys that differ between any two runs."""
OWN_FILE = re.compile(r"-[0-9a-f]{8}\.jsonl$")
"""Ending of the prompts that `PolicyTrainer` writes into a run's folder: eight digits of their digest."""


def write_comparison(first: Path, second: Path) -> Path:
    """Write one page that compares two runs, `compare-FIRST.html` in the second run's folder.

    Raises:
        ValueError: a folder is no run's, a file in it cannot be understood, or both are the same.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"{first} and {second} are the same run; name two")
    path = comparison_path(first, second)
    write_atomic(path, render("compare.html", **_contents(read_run(first), read_run(second))))
    return path


def comparison_path(first: Path, second: Path) -> Path:
    """Return the path of the page in the second run's folder."""
    return second / f"compare-{first.resolve().name}.html"


def side_names(first: Path, second: Path) -> tuple[str, str]:
    """Return the folders' names, with as many parent folders as distinguish them."""
    first_parts = first.resolve().parts
    second_parts = second.resolve().parts
    # As few parents as are needed: the names head two columns.
    count = 1
    while first_parts[-count:] == second_parts[-count:] and count < max(len(first_parts), len(second_parts)):
        count += 1
    return "/".join(first_parts[-count:]), "/".join(second_parts[-count:])


def different_data(first: Path, second: Path) -> str:
    """State that two judges were evaluated on different pairs; empty if nothing shows it."""
    names = side_names(first, second)
    sides = []
    stated: list[dict[str, object]] = []
    for name, run in zip(names, (first, second), strict=True):
        path = run / "summary.json"
        summary = read_object(path) if path.is_file() else {}
        if "held_out_pairs" not in summary:
            return ""
        groups = f" of {summary['held_out_groups']} prompts" if "held_out_groups" in summary else ""
        sides.append(f"{name} was evaluated on {summary['held_out_pairs']} held-out pairs{groups}")
        stated.append({key: summary[key] for key in ("held_out_pairs", "held_out_digest") if key in summary})

    # Runs of earlier versions have no digest, so only what both state is compared.
    shared = stated[0].keys() & stated[1].keys()
    if all(stated[0][key] == stated[1][key] for key in shared):
        return ""
    return f"{' and '.join(sides)}. The pairs differ, so the figures of one cannot be compared with the other's."


def _contents(first: RunFolder, second: RunFolder) -> dict[str, object]:
    # The gallery: shared images, by their change.
    names = side_names(first.path, second.path)
    samples, alone = asked_of_both(first, second)
    pairs, _ = match(samples)
    sets = choose(pairs, names=names)
    open_sets = [sets[index] for index in spread(len(sets), count=OPEN_SETS)]
    changes = [pair.change for pair in pairs if pair.change is not None]

    # The table, and the page's contents.
    rows = results_of_both(first, second, samples)
    epochs = tuple(max(run.samples, default=None) for run in (first, second))
    return {
        "title": f"{names[0]} and {names[1]}",
        "name": "two runs",
        "names": names,
        "epochs": epochs,
        "unequal": None not in epochs and epochs[0] != epochs[1],
        "measure": MEASURES[measure_of(samples)],
        "lead": sets[len(sets) // 2] if sets else None,
        "results": rows,
        "paired": paired_by(second),
        "different_data": different_data(first.path, second.path),
        "all_unit_axes": all(unit_axis(row.before, row.after) for row in rows),
        "open_sets": open_sets,
        "folded_sets": [row for row in sets if row not in open_sets],
        "changes": changes,
        "changes_plot": changes_svg(changes, links_to(pairs, sets)),
        "alone": alone,
        "charts": drawn(charts_of_both(first, second, names)),
        "draws_differ": draws_differ(first) or draws_differ(second),
        "same_objective": objective_of(first) == objective_of(second),
        "differences": differing_keys(first.config, second.config),
        "alarms": [alarms(run) for run in (first, second)],
        "leaks": [run.leaks for run in (first, second)],
        "facts": [facts(run, images=len(last_samples(run))) for run in (first, second)],
    }


def last_samples(run: RunFolder) -> list[Sample]:
    """Return the newest evaluation's images."""
    if run.samples:
        return run.samples[max(run.samples)]
    return []


def asked_of_both(first: RunFolder, second: RunFolder) -> tuple[dict[int, list[Sample]], int]:
    """Return the shared images of the newest evaluations, as 0 and 1, and the count of unshared images.

    Two files of prompts may give one number to two texts, so the texts must be equal too.
    """
    side = {(*sample.key, sample.text): sample for sample in last_samples(first)}
    counterparts = {(*sample.key, sample.text): sample for sample in last_samples(second)}
    shared = [key for key in side if key in counterparts]
    alone = len(side) + len(counterparts) - 2 * len(shared)
    if not shared:
        return {}, alone
    return {0: [side[key] for key in shared], 1: [counterparts[key] for key in shared]}, alone


def results_of_both(first: RunFolder, second: RunFolder, samples: Mapping[int, list[Sample]]) -> list[Result]:
    """Compare every measure of the shared images, then append the measures that only the summaries have."""
    starts = [means_before(run, samples.get(side, ())) for side, run in enumerate((first, second))]
    rows = []
    for row in compared(samples):
        rows.append(replace(row, starts=(starts[0].get(row.name), starts[1].get(row.name))))
    measured = {row.name for row in rows}
    second_results = {row.name: row for row in results(second.summary)}
    for row in results(first.summary):
        if row.name in second_results and row.name not in measured:
            other = second_results[row.name]
            before = (row.before.mean if row.before else None, other.before.mean if other.before else None)
            rows.append(Result(row.name, row.after, other.after, None, before))
    return rows


def means_before(run: RunFolder, samples: Sequence[Sample]) -> dict[str, float]:
    """Average every measure of the run's first evaluation over those of its images that `samples` show again."""
    if len(run.samples) < 2:
        return {}
    rows = compared({0: run.samples[min(run.samples)], 1: samples})
    return {row.name: row.before.mean for row in rows if row.before}


def charts_of_both(first: RunFolder, second: RunFolder, names: tuple[str, str]) -> list[Chart]:
    """Draw every curve of one line that both runs have as one chart of two lines.

    Losses of two objectives have different scales, and are left out.
    """
    same_objective = objective_of(first) == objective_of(second)
    before, after = (list(chain(*charts(run).values())) for run in (first, second))
    return in_pairs(before, after, names, with_loss=same_objective)


def in_pairs(
    first: Sequence[Chart], second: Sequence[Chart], names: tuple[str, str], *, with_loss: bool
) -> list[Chart]:
    """Draw charts of one line that both sides have as charts of two lines, named `names`."""
    counterparts = {(chart.group, chart.title): chart for chart in second}
    shared = []
    for chart in first:
        if chart.title == label("loss") and not with_loss:
            continue
        counterpart = counterparts.get((chart.group, chart.title))
        if counterpart and len(chart.lines) == len(counterpart.lines) == 1:
            lines = [replace(chart.lines[0], label=names[0]), replace(counterpart.lines[0], label=names[1])]
            shared.append(replace(chart, band=[], lines=lines))
    return shared


def objective_of(run: RunFolder) -> str:
    """Return the name of the run's objective; empty if its config names none."""
    return settings_of(run.config).get("objective.name", "")


def differing_keys(first: str, second: str) -> list[tuple[str, str, str]]:
    """List (key, value, value) of every setting in which two configs differ, in their order; `–` if one lacks it.

    Two files of equal content are no difference.
    """
    values = settings_of(first)
    others = settings_of(second)
    differing = []
    for key in dict.fromkeys([*values, *others]):
        value = _without_folder(values.get(key, "–"), values.get("out"))
        other = _without_folder(others.get(key, "–"), others.get("out"))
        if key not in NOT_COMPARED and value != other and not _are_equal_files(value, other):
            differing.append((key, value, other))
    return differing


def _without_folder(value: str, out: str | None) -> str:
    """Leave a run's folder out of the name of a file in it, if the name has a digest of the content."""
    return value.removeprefix(f"{out}/") if OWN_FILE.search(value) else value


def _are_equal_files(*names: str) -> bool:
    paths = [Path(name) for name in names if "/" in name]
    return len(paths) == 2 and all(map(Path.is_file, paths)) and len({kept_digest(path) for path in paths}) == 1
