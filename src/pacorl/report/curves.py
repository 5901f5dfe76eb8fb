"""The curves of a page: reward, evaluation, losses, KL. Every other metric is in the run's tracker (TensorBoard)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from pacorl.core.metric_names import MONITOR, SECONDS
from pacorl.report.figures import MEANINGS, label
from pacorl.report.folder import Record, RunFolder, numbers

Points = list[tuple[float, float]]
"""(epoch, value) of the finite values."""

MEASURE = f"((?!kind$|epoch$|step$|.*loss$|{SECONDS}|{MONITOR}).+)"
"""Keys of an evaluation's measures; a loss has another scale."""
MOST_LINES = 6
"""Line colours in the stylesheet."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values to coordinates; equal values map to the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True, slots=True)
class Chart:
    """One small plot over epochs, which `drawings.html` draws in 384 × 180 pixels."""

    title: str
    lines: dict[str, Points]
    """Label → points."""

    @property
    def x(self) -> Scale:
        epochs = [epoch for epoch, _ in chain(*self.lines.values())]
        return Scale(min(epochs), max(epochs), 46, 376)

    @property
    def y(self) -> Scale:
        values = [value for _, value in chain(*self.lines.values())]
        return Scale(min(values), max(values), 154, 10)  # SVG's y grows downwards


def charts(run: RunFolder) -> list[Chart]:
    """Select the curves that the run has: its rewards, its evaluations, its losses, its KL."""
    drawn = [
        Chart("Reward of training samples", _lines(run.epochs, "reward/(.+)/mean")),
        Chart("Evaluation", _lines(run.evaluations, MEASURE)),
        Chart("Loss", _lines(run.epochs, "(loss)")),
        Chart("Held-out loss", _lines(run.evaluations, "(.*loss)")),
        Chart("KL to the reference", _lines(run.epochs, "(kl)")),
    ]
    return [chart for chart in drawn if chart.lines]


def _lines(records: Sequence[Record], pattern: str) -> dict[str, Points]:
    """Label → points of the keys that match, at most MOST_LINES; the measures of MEANINGS first."""
    series: dict[str, Points] = {}
    for record in records:
        for key, value in numbers(record).items():
            match = re.fullmatch(pattern, key)
            if match:
                series.setdefault(match[1], []).append((float(record["epoch"]), value))
    known = [name for name in MEANINGS if name in series]
    names = list(dict.fromkeys([*known, *series]))
    return {label(name): series[name] for name in names[:MOST_LINES]}
