"""The curves of a page: reward, evaluation, losses, KL. Every other metric is in the run's tracker (TensorBoard)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from markupsafe import Markup

from pacorl.core.metric_names import MONITOR, SECONDS
from pacorl.report.figures import MEANINGS, amount, label, tag
from pacorl.report.folder import Record, RunFolder, number

Points = list[tuple[float, float | None]]
"""(epoch, value); None if the value was not finite, which breaks the line."""

MEASURE = f"((?!kind$|epoch$|step$|.*loss$|{SECONDS}|{MONITOR}).+)"
"""Keys of an evaluation's measures; a loss has another scale."""
MOST_LINES = 6
"""Line colours in the stylesheet."""


@dataclass(frozen=True, slots=True)
class Chart:
    """One small plot over epochs."""

    title: str
    lines: dict[str, Points]
    """Label → points."""


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
        for key, value in record.items():
            match = re.fullmatch(pattern, key)
            # The log has null for values that were not finite.
            if match and (value is None or number(value) is not None):
                series.setdefault(match[1], []).append((float(record["epoch"]), number(value)))
    drawn = [name for name in MEANINGS if name in series]
    names = [name for name in dict.fromkeys([*drawn, *series]) if any(value is not None for _, value in series[name])]
    return {label(name): series[name] for name in names[:MOST_LINES]}


# --- drawing ---------------------------------------------------------------------------------------------------------


WIDTH = 384
HEIGHT = 180
LEFT = 46
RIGHT = 376
TOP = 10
BOTTOM = 154


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values to coordinates; equal values map to the middle."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)


def line_chart_svg(chart: Chart) -> Markup:
    """Draw the chart's lines; its axes have their lowest and their highest value. Few points have a dot each."""
    points = list(chain.from_iterable(chart.lines.values()))
    epochs = [epoch for epoch, _ in points]
    values = [value for _, value in points if value is not None]
    x = Scale(min(epochs), max(epochs), LEFT, RIGHT)
    y = Scale(min(values), max(values), BOTTOM, TOP)  # SVG's y grows downwards

    drawn = [tag("text", "epoch", x=LEFT - 8, y=HEIGHT - 8, text_anchor="end")]
    for value in dict.fromkeys((y.low, y.high)):
        drawn.append(tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid"))
        drawn.append(tag("text", amount(value), x=LEFT - 8, y=y(value) + 3.5, text_anchor="end"))
    for epoch in dict.fromkeys((x.low, x.high)):
        drawn.append(tag("text", f"{epoch:g}", x=x(epoch), y=HEIGHT - 8, text_anchor="middle"))
    drawn += [_line_svg(line, x, y, index) for index, line in enumerate(chart.lines.values())]
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag("svg", *drawn, class_="chart", viewBox=box, role="img", aria_label=chart.title)


def _line_svg(line: Points, x: Scale, y: Scale, index: int) -> Markup:
    """Draw the stretches between missing values, so that no line bridges them."""
    stretches: list[list[str]] = [[]]
    dots = []
    for epoch, value in line:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{x(epoch):.1f},{y(value):.1f}")
            dots.append(tag("circle", cx=x(epoch), cy=y(value), r=2.5))
    marks = [tag("polyline", points=" ".join(stretch)) for stretch in stretches if stretch]
    return tag("g", *marks, *(dots if len(dots) <= 12 else []), class_=f"line-{index}")
