"""Build report.html from a run's folder: everything is inline, and the page loads no other file.

The gallery shows before and after of one prompt and seed, at evenly spread quantiles of the change.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from markupsafe import Markup
from PIL import Image

from pacorl.core.grid import panel_texts
from pacorl.io.files import write_atomic
from pacorl.io.images import ImageError, open_image
from pacorl.report.curves import Chart, charts, folded, line_chart_svg
from pacorl.report.figures import ShownImage, changes_svg, pair_matrix_svg, shares_svg, show, unit_axis
from pacorl.report.folder import RunFolder, Sample, read_run, settings_of
from pacorl.report.html import render
from pacorl.report.results import alarms, draws_differ, facts, is_monitored, paired_by, provenance, rows_of, seconds

logger = logging.getLogger(__name__)

Measure = Literal["consistency", "reward"]
MEASURES: dict[Measure, str] = {"consistency": "the judge’s consistency", "reward": "the reward"}
"""Measure that orders the gallery → its words on the page."""

SHOWN = 15
"""Odd, so that evenly spread ranks include the median."""
OPEN_SETS = 5
"""Number of sets that are open at first; the rest of the gallery is folded."""
TRAINING_IMAGES = 6


def write_report(run: Path) -> Path:
    """Build `report.html` in a run's folder from its files; a second build gives the same page.

    Returns:
        The page's path.

    Raises:
        ValueError: `run` is no run's folder, or a file in it cannot be understood.
    """
    path = run / "report.html"
    name = run.resolve().name
    write_atomic(path, render("run.html", name=name, **_contents(read_run(run).logged(), name)))
    return path


def write_page(run: Path) -> None:
    """Build `report.html` of a run that goes on; a fault is a warning, since the run is worth more than its page."""
    try:
        write_report(run)
    except (OSError, ValueError) as fault:
        logger.warning("%s was not built: %s", run / "report.html", fault)


def keep_page(trainer: Any, line: Mapping[str, Any]) -> None:
    """Build `report.html` after evaluations and checkpoints, as a listener of `PolicyTrainer`."""
    is_due = line["kind"] == "evaluation" or line["epoch"] % trainer.config.save_every == 0
    if is_due and trainer.runtime.is_main:
        write_page(trainer.config.out)


def _contents(run: RunFolder, name: str) -> dict[str, object]:
    # Times, and the table of results.
    spent = seconds(run)
    rows = rows_of(run)

    # Images: evenly spread training epochs, then the gallery.
    training_epochs = list(run.training_images)
    training_images = {}
    for index in spread(len(training_epochs), count=TRAINING_IMAGES):
        epoch = training_epochs[index]
        training_images[epoch] = show(_open(run.training_images[epoch]))
    pairs, unmatched = match(run.samples)
    sets = choose(pairs)
    open_sets = [sets[index] for index in spread(len(sets), count=OPEN_SETS)]
    changes = [pair.change for pair in pairs if pair.change is not None]

    return {
        "title": str(run.summary.get("title") or _title(run, name)),
        "verdict": [str(line) for line in run.summary.get("verdict") or ()],
        "alarms": alarms(run),
        "leaks": run.leaks,
        "monitored": is_monitored(run),
        "results": rows,
        "paired": paired_by(run),
        "all_unit_axes": all(unit_axis(row.before, row.after) for row in rows),
        "seconds": spent,
        "shares": shares_svg(spent) if spent else Markup(""),
        "training_images": training_images,
        "charts": drawn(chain(*charts(run).values())),
        "draws_differ": draws_differ(run),
        "config": run.config,
        "provenance": provenance(run.summary),
        "facts": facts(run, images=len(pairs)),
        "epochs": sorted(run.samples),
        "measure": MEASURES[measure_of(run.samples)],
        "unmatched": unmatched,
        "lead": sets[len(sets) // 2] if sets else None,  # the median of the changes: a page is not to open on its best
        "open_sets": open_sets,
        "folded_sets": [row for row in sets if row not in open_sets],
        "changes": changes,
        "changes_plot": changes_svg(changes, links_to(pairs, sets)),
    }


def _title(run: RunFolder, name: str) -> str:
    """The run's name, its rewards and its objective."""
    settings = settings_of(run.config)
    rewards = [value for key, value in settings.items() if re.fullmatch(r"rewards\.\d+\.name", key)]
    objective = settings.get("objective.name")
    if rewards and objective:
        return f"{name}: {' and '.join(rewards)} by {objective}"
    return name


def drawn(shown: Iterable[Chart]) -> dict[str, list[tuple[Chart, Markup]]]:
    """Group charts for a page, each with its plot."""
    plots = {}
    for group, members in folded(shown).items():
        plots[group] = [(chart, line_chart_svg(chart)) for chart in members]
    return plots


# --- the gallery -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt and seed at the first and at the last evaluation."""

    before: Sample
    after: Sample | None
    """None while there has been one evaluation only."""
    measure: Measure = "consistency"

    @property
    def key(self) -> tuple[int, int]:
        return self.before.key

    @property
    def change(self) -> float | None:
        """By how much the measure rose; None if either side lacks it."""
        before: float | None = getattr(self.before, self.measure)
        after: float | None = getattr(self.after, self.measure) if self.after else None
        if before is None or after is None:
            return None
        return after - before


@dataclass(frozen=True, slots=True)
class Side:
    """One image, the judge's matrix of it, and the value of the measure that orders the gallery."""

    name: str
    sample: Sample
    image: ShownImage
    matrix: Markup
    value: float | None


@dataclass(frozen=True, slots=True)
class Set:
    """One row of the gallery."""

    pair: Pair
    rank: str
    """Words for its rank among all pairs."""
    sides: list[Side]

    @property
    def id(self) -> str:
        """Id of its element on the page."""
        return "set-{}-{}".format(*self.pair.key)

    @property
    def panels(self) -> tuple[str, ...]:
        """One text per panel; empty if the prompt has none that fit its grid."""
        texts = panel_texts(self.pair.before.text)
        if len(texts) == self.pair.before.grid.count:
            return texts
        return ()

    @property
    def scores(self) -> list[tuple[str, float | None, float | None]]:
        """(name, before, after) of every score that either image has."""
        before = self.pair.before.measures
        after = self.pair.after.measures if self.pair.after else {}
        return [(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]

    @property
    def wide(self) -> bool:
        return any(side.image.wide for side in self.sides)


def match(samples: Mapping[int, Sequence[Sample]]) -> tuple[list[Pair], int]:
    """Pair the images of the first and the last evaluation, largest change first, and count the unpaired images.

    The change is the judge's consistency's, or the reward's in a run without a judge. Pairs that were not judged come
    last, in the order of their prompts. Missing image files do not count.
    """
    if not samples:
        return [], 0
    measure = measure_of(samples)
    first = {sample.key: sample for sample in samples[min(samples)] if sample.image.is_file()}
    if len(samples) == 1:
        return [Pair(first[key], None, measure) for key in sorted(first)], 0

    # Largest change first; unjudged pairs last, by prompt.
    last = {sample.key: sample for sample in samples[max(samples)] if sample.image.is_file()}
    pairs = [Pair(first[key], last[key], measure) for key in sorted(first.keys() & last.keys())]
    pairs.sort(key=lambda pair: float("inf") if pair.change is None else -pair.change)  # stable: then by prompt
    return pairs, len(first.keys() ^ last.keys())


def measure_of(samples: Mapping[int, Sequence[Sample]]) -> Measure:
    """The judge's consistency if any image has it, else the reward."""
    judged = any(sample.consistency is not None for sample in chain(*samples.values()))
    if judged:
        return "consistency"
    return "reward"


def choose(pairs: Sequence[Pair], *, count: int = SHOWN, names: Sequence[str] = ("Before", "After")) -> list[Set]:
    """Choose at most `count` of the sorted pairs at evenly spread ranks, from the largest change to the smallest.

    Args:
        names: names of the sides on the page.
    """
    # Evenly over the ranks, so that no eye chooses the images.
    sets = []
    for index in spread(len(pairs), count=count):
        pair = pairs[index]
        sides = []
        for name, sample in zip(names, (pair.before, pair.after), strict=True):
            if sample:
                title = f"P(Yes) of each pair of panels, {name.lower()}"
                matrix = pair_matrix_svg(sample.p_yes, title=title)
                sides.append(Side(name, sample, show(_open(sample.image)), matrix, getattr(sample, pair.measure)))
        sets.append(Set(pair, _rank_name(pairs, index), sides))
    return sets


def links_to(pairs: Sequence[Pair], sets: Sequence[Set]) -> dict[int, str]:
    """Map a pair's index to the id of its set. Unjudged pairs come last, so the index is also that of its bar."""
    id_of = {row.pair.key: row.id for row in sets}
    return {index: id_of[pair.key] for index, pair in enumerate(pairs) if pair.key in id_of}


def spread(length: int, *, count: int) -> list[int]:
    """Return at most `count` distinct indices of a sequence, evenly spread from its first to its last."""
    return [int(index) for index in np.linspace(0, length - 1, min(length, count)).round()]


def _open(path: Path) -> Image.Image:
    try:
        return open_image(path)
    except (ImageError, OSError) as error:
        raise ValueError(f"{error}; generate it again or delete it") from None


def _rank_name(pairs: Sequence[Pair], index: int) -> str:
    change = pairs[index].change
    if change is None:
        return f"Image {index + 1} of {len(pairs)}"
    # The first may have lost and the last may have gained, so the sign chooses the name.
    judged = sum(pair.change is not None for pair in pairs)
    if change == 0 and index in (0, judged - 1):
        return "No change"
    if index == 0:
        return "Largest gain" if change > 0 else "Smallest loss"
    if index == judged - 1:
        return "Smallest gain" if change > 0 else "Largest loss"
    if index == round((judged - 1) / 2):
        return "Median change"
    return f"Rank {index + 1} of {judged}"
