"""Line charts over epochs: quiet axes, one colour per line, data beside the drawing for the pointer's readout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from pacorl.report.curves import EVALUATION, Chart, Line, Points
from pacorl.report.svg import Scale, padded, tag, ticks
from pacorl.report.words import MINUS

WIDTH, HEIGHT = 384, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 376, 10, 154
COLOURS = 6
"""Line colours in the stylesheet; a chart with more lines starts over."""


def line_chart_svg(chart: Chart) -> Markup:
    """The chart's lines and band with axes; the frame and the numbers travel along as data attributes."""
    epochs, values = _extent(chart)
    x = Scale(epochs[0], epochs[1], LEFT, RIGHT)
    y = Scale(values[0], values[1], BOTTOM, TOP)
    drawn = [_line(line, x, y, index, dots=chart.dots) for index, line in enumerate(chart.lines)]
    return tag(
        "svg",
        *_axes(x, y),
        _band(chart, x, y),
        *drawn,
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=chart.title,
        data_frame=json.dumps([*epochs, LEFT, RIGHT, *values, BOTTOM, TOP]),
        data_lines=json.dumps([_data(line) for line in chart.lines], separators=(",", ":")),
    )


def _extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """First and last epoch, lowest and highest value; shares of an evaluation always run from 0 to 1."""
    epochs = [epoch for line in chart.lines for epoch, _ in line.points]
    values = [value for line in chart.lines for _, value in line.points if value is not None]
    values += [end for _, low, high in chart.band for end in (low, high)]
    first, last = min(epochs), max(epochs)
    whole = chart.group == EVALUATION and all(0 <= value <= 1 for value in values)
    return (first, last if last > first else first + 1), (0.0, 1.0) if whole else padded(values)


def _axes(x: Scale, y: Scale) -> list[Markup]:
    marks = []
    heights = ticks(y.low, y.high)
    for value in heights:
        marks.append(tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid"))
        marks.append(tag("text", _tick(value, heights), x=LEFT - 8, y=y(value) + 3.5, text_anchor="end"))
    for epoch in ticks(x.low, x.high):
        if epoch == int(epoch):
            marks.append(tag("text", str(int(epoch)), x=x(epoch), y=HEIGHT - 8, text_anchor="middle"))
    return marks


def _tick(value: float, among: Sequence[float]) -> str:
    """As short as it stays distinct from its neighbours."""
    if abs(value) < 1e-12:
        return "0"
    largest = max(abs(one) for one in among)
    text = f"{value:.2e}" if largest < 2e-3 or largest >= 1e5 else f"{value:.4f}"
    digits, e, exponent = text.partition("e")
    return (digits.rstrip("0").rstrip(".") + (e and f"e{int(exponent)}")).replace("-", MINUS)


def _band(chart: Chart, x: Scale, y: Scale) -> Markup:
    if not chart.band:
        return Markup("")
    upper = [f"{x(epoch):.1f},{y(high):.1f}" for epoch, _, high in chart.band]
    lower = [f"{x(epoch):.1f},{y(low):.1f}" for epoch, low, _ in reversed(chart.band)]
    return tag("polygon", points=" ".join(upper + lower), class_="band")


def _line(line: Line, x: Scale, y: Scale, index: int, *, dots: bool) -> Markup:
    runs = [_path(run, x, y) for run in _unbroken(line.points)]
    marks = [
        tag("circle", cx=x(epoch), cy=y(value), r=3)
        for epoch, value in line.points
        if value is not None and (dots or len(line.points) == 1)
    ]
    return tag("g", *runs, *marks, class_=f"line-{index % COLOURS}")


def _unbroken(points: Points) -> list[list[tuple[float, float]]]:
    """The stretches between missing values."""
    return [
        [(epoch, value) for epoch, value in run if value is not None]
        for known, run in groupby(points, key=lambda point: point[1] is not None)
        if known
    ]


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> Markup:
    return tag("polyline", points=" ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points))


def _data(line: Line) -> dict[str, object]:
    known = [(epoch, float(f"{value:.5g}")) for epoch, value in line.points if value is not None]
    return {"label": line.label, "points": known}
