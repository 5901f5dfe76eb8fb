"""Build report.html from a run's folder: everything is inline, and the page loads no other file.

The gallery shows before and after of one prompt and seed, at evenly spread quantiles of the change.
"""

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from pacorl.config.user_files import is_in_file
from pacorl.core.grid import panel_texts
from pacorl.io.files import inside, write_atomic
from pacorl.io.images import open_image
from pacorl.report.curves import charts
from pacorl.report.figures import ShownImage, show
from pacorl.report.folder import CONSISTENCY, REWARD, RunFolder, Sample, read_run
from pacorl.report.html import render
from pacorl.report.results import INTERVAL_NOTE, pair_up, rows_of

logger = logging.getLogger(__name__)

MEASURES = {CONSISTENCY: "the judge’s consistency", REWARD: "the reward"}
"""Measure that orders the gallery → its words on the page."""

SHOWN = 9
"""Sets of a gallery: odd, so that evenly spread ranks include the median."""


def write_report(run: Path) -> Path:
    """Build `report.html` in a run's folder from its files; a second build gives the same page. Returns its path.

    Raises:
        ValueError: `run` is no run's folder, or a file in it cannot be understood.
    """
    path = run / "report.html"
    read = read_run(run)
    # A run stopped before its first evaluation has a page without images.
    evaluations = list(read.samples.values()) or [[]]
    sets, unmatched = match(evaluations[0], evaluations[-1] if len(evaluations) > 1 else None)
    # The pairs that a trained judge decides most wrongly.
    worst = []
    for pair in read.summary.get("worst", []):
        images = [show(open_image(inside(run / "held_out", image))) for image in pair["images"]]
        worst.append({**pair, "images": images})
    name = run.resolve().name
    page = render(
        "run.html",
        run=read,
        name=name,
        title=read.summary.get("title") or name,
        results=rows_of(read),
        note=INTERVAL_NOTE,
        charts=charts(read),
        epochs=list(read.samples),
        unmatched=unmatched,
        next=next_command(read),
        worst=worst,
        **gallery(sets),
    )
    write_atomic(path, page)
    return path


def write_page(run: Path) -> None:
    """Build `report.html` during a run; a fault is a warning, since the run is worth more than its page."""
    try:
        write_report(run)
    except (OSError, ValueError) as fault:
        logger.warning("%s was not built: %s", run / "report.html", fault)


def keep_page(trainer: Any, line: Mapping[str, Any]) -> None:
    """Build `report.html` after evaluations, as a listener of `PolicyTrainer`."""
    if line["kind"] == "evaluation" and trainer.runtime.is_main:
        write_page(trainer.config.out)


def next_command(run: RunFolder) -> str:
    """Build the command that comes next: the rest of a stopped run, or the use of its result; empty if unknown."""
    kind = run.settings.get("model.kind", "")
    return render(
        "next.txt",
        run=run,
        has_adapter=(run.path / "adapter").is_dir(),
        kind=kind if is_in_file(kind) else "",
        quoted=shlex.quote,
    ).strip()


@dataclass(frozen=True, slots=True)
class Side:
    """One image of a set."""

    name: str
    sample: Sample
    image: ShownImage


@dataclass(frozen=True, slots=True)
class Set:
    """One prompt and seed at the first and at the last evaluation, or in two runs."""

    before: Sample
    after: Sample | None
    """None while there has been one evaluation only."""
    measure: str = CONSISTENCY
    id: str = ""
    """Id of its element, if the page shows it."""
    rank: str = ""
    """Words for its rank among all sets, if the page shows it."""
    sides: tuple[Side, ...] = ()
    """Its images, if the page shows them."""

    @property
    def change(self) -> float | None:
        """Rise of the measure; None if either side lacks it."""
        before = self.before.value(self.measure)
        after = self.after.value(self.measure) if self.after else None
        if before is None or after is None:
            return None
        return after - before

    @property
    def panels(self) -> tuple[str, ...]:
        """One text per panel; empty if the prompt has none that fit its grid."""
        texts = panel_texts(self.before.text)
        if len(texts) != self.before.grid.count:
            return ()
        return texts

    @property
    def scores(self) -> list[tuple[str, list[float | None]]]:
        """(name, value of each side) of every score that an image has."""
        measures = [side.sample.measures for side in self.sides]
        return [(name, [side.get(name) for side in measures]) for name in dict.fromkeys(chain(*measures))]

    @property
    def wide(self) -> bool:
        return any(side.image.wide for side in self.sides)


def match(first: Sequence[Sample], last: Sequence[Sample] | None) -> tuple[list[Set], int]:
    """Pair the images of two evaluations, largest change first, and count the unpaired images.

    The change is the judge's consistency's, or the reward's in a run without a judge. Sets that were not judged come
    last, in the order of their prompts. Missing image files do not count.

    Args:
        last: None while there has been one evaluation only.
    """
    first = [sample for sample in first if sample.image.is_file()]
    measure = CONSISTENCY if any(CONSISTENCY in sample.measures for sample in first) else REWARD
    if last is None:
        return [Set(sample, None, measure) for sample in sorted(first, key=attrgetter("key"))], 0

    last = [sample for sample in last if sample.image.is_file()]
    sets = [Set(before, after, measure) for before, after in pair_up(first, last)]
    return by_change(sets), len(first) + len(last) - 2 * len(sets)


def by_change(sets: Sequence[Set]) -> list[Set]:
    """Sort sets, the largest change first, and sets without one last; equal ones keep their order."""
    return sorted(sets, key=lambda row: float("inf") if row.change is None else -row.change)


def gallery(sets: Sequence[Set], *, names: Sequence[str] = ("Before", "After")) -> dict[str, Any]:
    """Choose at most SHOWN of the sorted sets at evenly spread ranks, and encode their images.

    `lead` is the set of the median change, or of the lower of the two next to it: a page is not to open on its best.

    Args:
        names: of the sides on the page.
    """
    changes = [row.change for row in sets if row.change is not None]
    median = len(changes or sets) // 2
    # Evenly over the ranks, so that no eye chooses the images.
    places = np.linspace(0, len(sets) - 1, min(len(sets), SHOWN))
    if sets:
        places[np.abs(places - median).argmin()] = median
    shown: dict[int, Set] = {}
    for index in (places + 0.5).astype(int).tolist():
        row = sets[index]
        sides = []
        for name, sample in zip(names, (row.before, row.after), strict=True):
            if sample:
                sides.append(Side(name, sample, show(open_image(sample.image))))
        rank = f"Image {index + 1} of {len(sets)}"
        if index == median and changes:
            rank += ", the median change" if len(changes) % 2 else ", next to the median change"
        shown[index] = replace(row, id=f"set-{index + 1}", rank=rank, sides=tuple(sides))
    return {
        "measure": MEASURES[sets[0].measure if sets else CONSISTENCY],
        "lead": shown.get(median),
        "sets": list(shown.values()),
        "images": len(sets),
        "prompts": len({row.before.prompt_id for row in sets}),
        "is_ordered": bool(changes),
    }
