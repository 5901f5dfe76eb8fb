"""Which sheets a page shows: before and after of one prompt and seed, at evenly spread quantiles of the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup
from PIL import Image

from pacorl.core.grid import panel_texts
from pacorl.report.folder import Sample
from pacorl.report.matrix import pair_matrix_svg
from pacorl.report.pictures import Picture, show

SHOWN = 15
"""Odd, so that evenly spread ranks include the median."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt and seed at the first and at the last evaluation."""

    before: Sample
    after: Sample | None
    """None while there has been one evaluation only."""

    @property
    def key(self) -> tuple[int, int]:
        return self.before.key

    @property
    def change(self) -> float | None:
        """By how much the judge's consistency rose; None where either side was not judged."""
        if self.after is None or self.after.consistency is None or self.before.consistency is None:
            return None
        return self.after.consistency - self.before.consistency


@dataclass(frozen=True, slots=True)
class Side:
    """One sheet: its picture and what the judge says of it."""

    name: str
    sample: Sample
    picture: Picture
    matrix: Markup


@dataclass(frozen=True, slots=True)
class Set:
    """One row of the gallery."""

    pair: Pair
    place: str
    """What its rank among all pairs stands for."""
    sides: list[Side]

    @property
    def id(self) -> str:
        """Of its element on the page."""
        return "set-{}-{}".format(*self.pair.key)

    @property
    def panels(self) -> tuple[str, ...]:
        """One text per panel; empty where the prompt has none that fit its grid."""
        texts = panel_texts(self.pair.before.text)
        return texts if len(texts) == self.pair.before.grid.count else ()

    @property
    def scores(self) -> list[tuple[str, float | None, float | None]]:
        """(name, before, after) of every score that either sheet has."""
        before = self.pair.before.scores
        after = self.pair.after.scores if self.pair.after else {}
        return [(name, before.get(name), after.get(name)) for name in dict.fromkeys([*before, *after])]

    @property
    def wide(self) -> bool:
        return any(side.picture.wide for side in self.sides)


def match(samples: Mapping[int, Sequence[Sample]]) -> tuple[list[Pair], int]:
    """Pairs of the first and the last evaluation, largest change first, and how many sheets have no counterpart.

    Pairs that were not judged come last, in the order of their prompts. Sheets whose picture is not there yet do
    not count.
    """
    if not samples:
        return [], 0
    first = {sample.key: sample for sample in samples[min(samples)] if sample.image.is_file()}
    last = {sample.key: sample for sample in samples[max(samples)] if sample.image.is_file()}
    if len(samples) == 1:
        return [Pair(before=first[key], after=None) for key in sorted(first)], 0
    pairs = [Pair(before=first[key], after=last[key]) for key in sorted(first.keys() & last.keys())]
    pairs.sort(key=lambda pair: float("inf") if pair.change is None else -pair.change)
    return pairs, len(first.keys() ^ last.keys())


def choose(pairs: Sequence[Pair], *, count: int = SHOWN) -> list[Set]:
    """At most `count` of the sorted pairs at evenly spread ranks: the largest change, the smallest, and between."""
    chosen = spread(len(pairs), count=count)
    return [Set(pair=pairs[index], place=_place(pairs, index), sides=_sides(pairs[index])) for index in chosen]


def spread(length: int, *, count: int) -> list[int]:
    """At most `count` distinct indices of a sequence, evenly spread from its first to its last."""
    return [int(index) for index in np.linspace(0, length - 1, min(length, count)).round()]


def training_sheets(sheets: Mapping[int, Path], *, count: int) -> dict[int, Picture]:
    """At most `count` of the training sheets (epoch → picture), evenly spread over the run."""
    epochs = list(sheets)
    return {epochs[index]: show(_open(sheets[epochs[index]])) for index in spread(len(epochs), count=count)}


def _sides(pair: Pair) -> list[Side]:
    named = {"Before": pair.before, "After": pair.after}
    return [_side(name, sample) for name, sample in named.items() if sample]


def _side(name: str, sample: Sample) -> Side:
    matrix = pair_matrix_svg(sample.p_yes, title=f"P(Yes) of each pair of panels, {name.lower()}")
    return Side(name=name, sample=sample, picture=show(_open(sample.image)), matrix=matrix)


def _open(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path}: not a picture that can be read ({error}); paint it again or delete it") from None


def _place(pairs: Sequence[Pair], index: int) -> str:
    change = pairs[index].change
    if change is None:
        return f"Sheet {index + 1} of {len(pairs)}"
    if index == 0:
        return "Largest gain" if change > 0 else "Smallest loss"
    judged = sum(pair.change is not None for pair in pairs)
    if index == judged - 1:
        return "Smallest gain" if change > 0 else "Largest loss"
    return "Median change" if index == round((judged - 1) / 2) else f"Rank {index + 1} of {judged}"
