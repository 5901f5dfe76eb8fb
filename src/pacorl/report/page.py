"""Build report.html from a run's folder: everything is inline, and the page loads no other file.

The gallery shows before and after of one prompt and seed, at evenly spread quantiles of the change.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from pacorl.core.grid import panel_texts
from pacorl.core.metric_names import SHOWN_EVERY
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image
from pacorl.models.policies import POLICIES
from pacorl.report.curves import charts
from pacorl.report.figures import ShownImage, show
from pacorl.report.folder import RunFolder, Sample, read_run
from pacorl.report.html import render
from pacorl.report.results import JUDGE_NOTE, alarms, interval_note, is_monitored, pair_up, provenance, rows_of

logger = logging.getLogger(__name__)

CONSISTENCY = "consistency"
REWARD = "reward"
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
    pairs, unmatched = match(evaluations[0], evaluations[-1] if len(evaluations) > 1 else None)
    contents: dict[str, Any] = {
        "name": run.resolve().name,
        "title": str(read.summary.get("title") or run.resolve().name),
        "story": story(read),
        "verdict": [str(line) for line in read.summary.get("verdict") or ()],
        "alarms": alarms(read),
        "leaks": read.leaks,
        "monitored": is_monitored(read),
        "results": rows_of(read),
        "note": JUDGE_NOTE if "held_out_pairs" in read.summary else interval_note("prompts and seeds of noise"),
        "charts": charts(read),
        "config": read.config,
        "provenance": provenance(read.summary),
        "epochs": sorted(read.samples),
        "unmatched": unmatched,
        "next": next_command(read),
    }
    write_atomic(path, render("run.html", **contents, **gallery(pairs)))
    return path


def write_page(run: Path) -> None:
    """Build `report.html` during a run; a fault is a warning, since the run is worth more than its page."""
    try:
        write_report(run)
    except (OSError, ValueError) as fault:
        logger.warning("%s was not built: %s", run / "report.html", fault)


def keep_page(trainer: Any, line: Mapping[str, Any]) -> None:
    """Build `report.html` after evaluations and every few epochs, as a listener of `PolicyTrainer`."""
    is_due = line["kind"] == "evaluation" or line["epoch"] % SHOWN_EVERY == 0
    if is_due and trainer.runtime.is_main:
        write_page(trainer.config.out)


# --- history and next steps ------------------------------------------------------------------------------------------


def story(run: RunFolder) -> str:
    """Summarize the model, method, judge and baseline of a run; empty without a config."""
    settings = run.settings
    model = settings.get("model.checkpoint") or "the default model"
    if "character" in settings:
        name = Path(settings["character"]).name
        return (
            f"A LoRA of {model} was trained on pictures of {name}. Before is {model} without it, from the same noise."
        )
    if "data.train.0" in settings:
        sources = ", ".join(value for key, value in settings.items() if key.startswith("data.train."))
        return f"The judge {model} was trained on the pairs of {sources}. Before is {model} itself, on the same pairs."
    if "objective.name" not in settings:
        return ""

    names = [value for key, value in settings.items() if key.startswith("rewards.") and key.endswith(".name")]
    text = f"A LoRA of {model} was trained by {settings['objective.name']} on the prompts of "
    text += f"{settings.get('prompts.train')}, rewarded by {' and '.join(names) or 'nothing'}"
    if settings.get("judge.checkpoint"):
        text += f" of the judge {settings['judge.checkpoint']}"
    return f"{text}. Before is {model} without the LoRA, from the same prompts and noise."


def next_command(run: RunFolder) -> str:
    """Build the command that comes next: the rest of a stopped run, or the use of its result; empty if unknown."""
    settings = run.settings
    folder = shlex.quote(str(run.path))
    kinds = {"character": "train-character", "data.train.0": "train-reward", "objective.name": "train-policy"}
    command = next((command for key, command in kinds.items() if key in settings), "")
    if not command:
        return ""
    if not run.summary and not (run.path / "adapter").is_dir():
        character = f"{shlex.quote(settings['character'])} --config " if "character" in settings else ""
        return f"pacorl {command} {character}{folder}/config.yaml --resume auto"
    if command == "train-reward":
        judge = "merged" if (run.path / "merged").is_dir() else "adapter"
        data = shlex.quote(settings.get("data.evaluation.0", "PAIRS"))  # never the training pairs
        return f"pacorl calibrate {folder}/{judge} {data}"
    kind = settings.get("model.kind", "")
    is_editor = kind in POLICIES and not POLICIES[kind].sets
    request = "--image IMAGE --instruction TEXT" if is_editor else "--prompt TEXT"
    model = shlex.quote(settings.get("model.checkpoint", ""))
    return f"pacorl generate --model {model} --adapter {folder}/adapter {request}"


# --- the gallery -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt and seed at the first and at the last evaluation."""

    before: Sample
    after: Sample | None
    """None while there has been one evaluation only."""
    measure: str = CONSISTENCY

    @property
    def change(self) -> float | None:
        """By how much the measure rose; None if either side lacks it."""
        before = value_of(self.before, self.measure)
        after = value_of(self.after, self.measure) if self.after else None
        if before is None or after is None:
            return None
        return after - before


@dataclass(frozen=True, slots=True)
class Side:
    """One image, and its value of the measure that orders the gallery."""

    name: str
    sample: Sample
    image: ShownImage
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
        return f"set-{self.pair.before.prompt_id}-{self.pair.before.seed}"

    @property
    def panels(self) -> tuple[str, ...]:
        """One text per panel; empty if the prompt has none that fit its grid."""
        texts = panel_texts(self.pair.before.text)
        if len(texts) != self.pair.before.grid.count:
            return ()
        return texts

    @property
    def scores(self) -> list[tuple[str, list[float | None]]]:
        """(name, value of each side) of every score that an image has."""
        measures = [side.sample.measures for side in self.sides]
        names = dict.fromkeys(chain(*measures))
        return [(name, [side.get(name) for side in measures]) for name in names]

    @property
    def wide(self) -> bool:
        return any(side.image.wide for side in self.sides)


def value_of(sample: Sample, measure: str) -> float | None:
    return sample.reward if measure == REWARD else sample.measures.get(measure)


def gallery(pairs: Sequence[Pair], *, names: Sequence[str] = ("Before", "After")) -> dict[str, Any]:
    """Choose the sets of a page and encode their images; `lead` is the one of the median change."""
    sets = choose(pairs, names=names)
    leads = [row for row in sets if row.pair is pairs[middle(pairs)]]  # a page is not to open on its best
    return {
        "measure": MEASURES[pairs[0].measure if pairs else CONSISTENCY],
        "lead": leads[0] if leads else None,
        "sets": sets,
        "is_ordered": any(pair.change is not None for pair in pairs),
    }


def match(first: Sequence[Sample], last: Sequence[Sample] | None) -> tuple[list[Pair], int]:
    """Pair the images of two evaluations, largest change first, and count the unpaired images.

    The change is the judge's consistency's, or the reward's in a run without a judge. Pairs that were not judged come
    last, in the order of their prompts. Missing image files do not count.

    Args:
        last: None while there has been one evaluation only.
    """
    first = [sample for sample in first if sample.image.is_file()]
    measure = CONSISTENCY if any(CONSISTENCY in sample.measures for sample in first) else REWARD
    if last is None:
        return [Pair(sample, None, measure) for sample in sorted(first, key=attrgetter("key"))], 0

    last = [sample for sample in last if sample.image.is_file()]
    pairs = [Pair(before, after, measure) for before, after in pair_up(first, last)]
    pairs.sort(key=lambda pair: float("inf") if pair.change is None else -pair.change)  # stable: then by prompt
    return pairs, len(first) + len(last) - 2 * len(pairs)


def middle(pairs: Sequence[Pair]) -> int:
    """Find the rank of the median change; of two middle ones that of the mean's sign, and nearer to it."""
    changes = [pair.change for pair in pairs if pair.change is not None]
    last = len(changes or pairs) // 2
    if not changes or len(changes) % 2:
        return last
    mean = fmean(changes)
    return min((last - 1, last), key=lambda rank: (changes[rank] * mean <= 0, abs(changes[rank] - mean)))


def choose(pairs: Sequence[Pair], *, count: int = SHOWN, names: Sequence[str] = ("Before", "After")) -> list[Set]:
    """Choose at most `count` of the sorted pairs at evenly spread ranks, from the largest change to the smallest.

    names: of the sides on the page.
    """
    # Evenly over the ranks, so that no eye chooses the images.
    sets = []
    places = np.linspace(0, len(pairs) - 1, min(len(pairs), count))
    if pairs:
        places[np.abs(places - middle(pairs)).argmin()] = middle(pairs)
    for index in map(int, places + 0.5):
        pair = pairs[index]
        sides = []
        for name, sample in zip(names, (pair.before, pair.after), strict=True):
            if sample:
                image = show(open_image(sample.image))
                sides.append(Side(name, sample, image, value_of(sample, pair.measure)))
        sets.append(Set(pair, _rank_name(pairs, index), sides))
    return sets


def _rank_name(pairs: Sequence[Pair], index: int) -> str:
    judged = sum(pair.change is not None for pair in pairs)
    if judged and index == middle(pairs):
        return "Median change"
    return f"Rank {index + 1} of {judged}" if index < judged else f"Image {index + 1} of {len(pairs)}"
