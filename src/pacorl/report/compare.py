"""Two runs on one page (`pacorl report RUN RUN`): their last evaluations, the same prompts' images, their configs.

What is compared is what both were asked for: images of equal text and seed. Their order and the differences' intervals
are as between a run's first and last evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pacorl.io.documents import parse_yaml
from pacorl.io.files import write_atomic
from pacorl.report.curves import Chart, charts, line_chart_svg
from pacorl.report.figures import changes_svg, unit_axis
from pacorl.report.folder import RunFolder, Sample, read_run
from pacorl.report.page import MEASURES, OPEN_SETS, choose, links_to, match, measure_of, render, spread
from pacorl.report.results import Result, compared, facts, results

NOT_COMPARED = {"out"}
"""Keys that differ between any two runs."""


def write_comparison(first: Path, second: Path, out: Path | None = None) -> Path:
    """Write one page that compares two runs.

    Args:
        out: the page; `compare-FIRST.html` in the second run's folder if left out.

    Raises:
        ValueError: a folder is no run's, a file in it cannot be understood, or both are the same.
    """
    if first.resolve() == second.resolve():
        raise ValueError(f"{first} and {second} are the same run; name two")
    path = out or comparison_path(first, second)
    write_atomic(path, render("compare.html", **_contents(read_run(first), read_run(second))))
    return path


def comparison_path(first: Path, second: Path) -> Path:
    """The page in the second run's folder."""
    return second / f"compare-{first.resolve().name}.html"


def side_names(first: Path, second: Path) -> tuple[str, str]:
    """What the runs are called: their folders' names, with as many of the folders above as tell them apart."""
    one, other = first.resolve().parts, second.resolve().parts
    count = next((n for n in range(1, max(len(one), len(other))) if one[-n:] != other[-n:]), 1)
    return "/".join(one[-count:]), "/".join(other[-count:])


def _contents(first: RunFolder, second: RunFolder) -> dict[str, object]:
    names = side_names(first.path, second.path)
    samples, alone = asked_of_both(first, second)
    pairs, _ = match(samples)
    sets = choose(pairs, names=names)
    open_sets = [sets[index] for index in spread(len(sets), count=OPEN_SETS)]
    rows = results_of_both(first, second, samples)
    changes = [pair.change for pair in pairs if pair.change is not None]
    return {
        "title": f"{names[0]} and {names[1]}",
        "name": "two runs",
        "names": names,
        "measure": MEASURES[measure_of(samples)],
        "lead": sets[len(sets) // 2] if sets else None,
        "results": rows,
        "all_unit_axes": all(unit_axis(row.before, row.after) for row in rows),
        "open_sets": open_sets,
        "folded_sets": [row for row in sets if row not in open_sets],
        "changes": changes,
        "changes_plot": changes_svg(changes, links_to(pairs, sets)),
        "alone": alone,
        "charts": [(chart, line_chart_svg(chart)) for chart in charts_of_both(first, second, names)],
        "differences": differing_keys(first.config, second.config),
        "facts": [facts(run, images=len(last_samples(run))) for run in (first, second)],
    }


def last_samples(run: RunFolder) -> list[Sample]:
    """The newest evaluation's images."""
    return run.samples[max(run.samples)] if run.samples else []


def asked_of_both(first: RunFolder, second: RunFolder) -> tuple[dict[int, list[Sample]], int]:
    """The newest evaluations, as 0 and 1, less the images that only one run has; and how many those are.

    Two files of prompts may give one number to two texts, so the texts must be equal too.
    """
    sides = [{(*sample.key, sample.text): sample for sample in last_samples(run)} for run in (first, second)]
    shared = [key for key in sides[0] if key in sides[1]]
    samples = {index: [side[key] for key in shared] for index, side in enumerate(sides)} if shared else {}
    return samples, sum(map(len, sides)) - 2 * len(shared)


def results_of_both(first: RunFolder, second: RunFolder, samples: Mapping[int, list[Sample]]) -> list[Result]:
    """Every measure of the shared images with its paired difference, then what the summaries alone have."""
    rows = compared(samples)
    known = {row.name for row in rows}
    one, other = ({row.name: row.after for row in results(run.summary)} for run in (first, second))
    return rows + [Result(name, one[name], other[name], None) for name in one if name in other and name not in known]


def charts_of_both(first: RunFolder, second: RunFolder, names: tuple[str, str]) -> list[Chart]:
    """Every curve of one line that both runs have, as one chart of two lines."""
    one, other = ({(c.group, c.title): c for group in charts(run).values() for c in group} for run in (first, second))
    shared = [(one[key], other[key]) for key in one if key in other]
    return [
        replace(both[0], band=[], lines=[replace(c.lines[0], label=name) for c, name in zip(both, names, strict=True)])
        for both in shared
        if all(len(chart.lines) == 1 for chart in both)
    ]


def differing_keys(first: str, second: str) -> list[tuple[str, str, str]]:
    """(key, value, value) of every setting in which two configs differ, in their order; `–` if one lacks it."""
    one, other = (dict(_settings(parse_yaml(text, name="config.yaml") or {})) for text in (first, second))
    keys = [key for key in dict.fromkeys([*one, *other]) if key not in NOT_COMPARED]
    return [(key, one.get(key, "–"), other.get(key, "–")) for key in keys if one.get(key) != other.get(key)]


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf of a config by its dotted key; items of a list by their number."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in items:
            yield from _settings(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, str(value)
