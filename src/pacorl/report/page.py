"""From a run's folder to report.html: everything inline, nothing asked from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import jinja2
from markupsafe import Markup

from pacorl.io.files import write_atomic
from pacorl.report import words
from pacorl.report.curves import charts, line_chart_svg
from pacorl.report.figures import changes_svg, shares_svg
from pacorl.report.folder import RunFolder, read_run
from pacorl.report.gallery import MEASURES, Pair, Set, choose, match, measure_of, spread, training_images
from pacorl.report.results import (
    alarms,
    compared,
    facts,
    is_monitored,
    planned_epochs,
    provenance,
    results,
    seconds,
    seconds_so_far,
)

OPEN_SETS = 5
"""So many of the gallery's sets are open at once; the others wait behind a fold."""

TRAINING_IMAGES = 6


def write_report(run: Path) -> Path:
    """Build `report.html` in a run's folder from what is there; doing it again gives the same page.

    Returns:
        The page's path.

    Raises:
        ValueError: `run` is no run's folder, or a file in it cannot be understood.
    """
    path = run / "report.html"
    write_atomic(path, render("run.html", **_contents(read_run(run))))
    return path


def render(template: str, /, **contents: object) -> str:
    """A template of this package, with the stylesheet and the script inside; all texts are escaped."""
    return _environment().get_template(template).render(**contents)


@cache  # a run writes its page after every evaluation, and compiling the templates takes a third of it
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pacorl.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "label": words.label,
        "amount": words.amount,
        "change": words.change,
        "duration": words.duration,
    }
    return environment


def _contents(run: RunFolder) -> dict[str, object]:
    name = run.path.resolve().name
    spent = seconds(run.summary) or seconds_so_far(run)
    return {
        "title": str(run.summary.get("title") or name),
        "name": name,
        "verdict": [str(line) for line in run.summary.get("verdict") or ()],
        "alarms": alarms(run),
        "monitored": is_monitored(run),
        "results": results(run.summary) or compared(run.samples),
        "seconds": spent,
        "shares": shares_svg(spent) if spent else Markup(""),
        "training_images": training_images(run.training_images, count=TRAINING_IMAGES),
        "charts": {
            group: [(chart, line_chart_svg(chart)) for chart in members] for group, members in charts(run).items()
        },
        "config": run.config,
        "provenance": provenance(run.summary),
        **_gallery(run),
    }


def _gallery(run: RunFolder) -> dict[str, object]:
    pairs, unmatched = match(run.samples)
    sets = choose(pairs)
    open_sets = [sets[index] for index in spread(len(sets), count=OPEN_SETS)]
    return {
        "facts": facts(
            run.summary,
            epochs=len(run.epochs),
            images=len(pairs),
            spent=sum((seconds(run.summary) or seconds_so_far(run)).values()),
            planned=planned_epochs(run.config),
        ),
        "epochs": sorted(run.samples),
        "pairs": pairs,
        "measure": MEASURES[measure_of(run.samples)],
        "unmatched": unmatched,
        "open_sets": open_sets,
        "folded_sets": [row for row in sets if row not in open_sets],
        "changes": [pair.change for pair in pairs if pair.change is not None],
        "changes_plot": _changes_plot(pairs, sets),
    }


def _changes_plot(pairs: Sequence[Pair], sets: Sequence[Set]) -> Markup:
    """Every image's change as a bar; unjudged pairs come last in `pairs`, so indices hold."""
    shown = {row.pair.key: row.id for row in sets}
    links = {index: shown[pair.key] for index, pair in enumerate(pairs) if pair.key in shown}
    return changes_svg([pair.change for pair in pairs if pair.change is not None], links)
