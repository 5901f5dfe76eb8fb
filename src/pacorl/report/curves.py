"""The curves of a page, from the lines of metrics.jsonl: known ones first and grouped, then all the rest.

`charts` says which there are; `line_chart_svg` draws one: quiet axes, one colour per line, and the numbers beside the
drawing for the pointer's readout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from markupsafe import Markup

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, SECONDS
from pacorl.report.figures import Scale, padded, tag, ticks
from pacorl.report.folder import Record, RunFolder, number
from pacorl.report.words import MEANINGS, MINUS, amount, label

Points = list[tuple[float, float | None]]
"""(epoch, value); None if the value was not finite, which breaks the line."""

REWARDS, EVALUATION, HACKING, HEALTH, JUDGE, TIME, MORE = GROUPS = (
    "Rewards",
    "Evaluation",
    "Signs of reward hacking",
    "Training health",
    "Judge",
    "Time",
    "More",
)

RULES: tuple[tuple[str, str, str], ...] = (
    (r"reward/(?P<line>.+)/mean", REWARDS, ""),
    (r"reward/(?P<line>.+)/cv", REWARDS, "Spread of rewards (std ÷ mean)"),
    (r"reward/.+", REWARDS, ""),
    (r"loss|grad_norm|clip_fraction|kl", HEALTH, ""),
    (r"ratio_deviation/(?P<line>.+)", HEALTH, "Ratio − 1 before the first update, by step"),
    (r"advantage/.+", HEALTH, ""),
    (r"judge/(?P<line>.+)", JUDGE, "Per epoch, by the judge’s server"),
    (r"samples/(?P<line>missing|not_finite)", REWARDS, "Share of scores that are"),
    (r"seconds/(?P<line>.+)", TIME, "Seconds per epoch"),
)
"""(pattern of a key, its group, the title of the chart that all such keys share; empty for a chart of its own)."""

BUCKETS = 200
"""A series is thinned to the extremes of so many buckets, so that a long run keeps its spikes and loses its weight."""

NOT_CHARTED = {"kind", "epoch", "step"}

CORRELATION, TRAINED, AVERAGE = "correlation/", "trained/", "average/"


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart."""

    label: str
    points: Points


@dataclass(frozen=True, slots=True)
class Chart:
    """One small plot over epochs."""

    group: str
    title: str
    lines: list[Line] = field(default_factory=list)
    band: list[tuple[float, float, float]] = field(default_factory=list)
    """(epoch, low, high) of one standard deviation around the only line."""
    dots: bool = False
    """Whether points are few and each deserves to be seen."""

    @property
    def ends(self) -> str:
        """First and last value of the only line; empty if there are several."""
        if len(self.lines) > 1:
            return ""
        values = [value for _, value in self.lines[0].points if value is not None]
        return amount(values[0]) if len(values) == 1 else f"{amount(values[0])} → {amount(values[-1])}"


def charts(run: RunFolder) -> dict[str, list[Chart]]:
    """Group → its charts, in the order of GROUPS; groups without charts are left out."""
    epochs, evaluations = _series(run.epochs), _series(run.evaluations)
    drawn = [*_training_charts(epochs), *_evaluation_charts(evaluations), *_hacking_charts(epochs, evaluations)]
    grouped = {group: [chart for chart in drawn if chart.group == group] for group in GROUPS}
    return {group: members for group, members in grouped.items() if members}


def _series(records: Sequence[Record]) -> dict[str, Points]:
    """Key → points over epochs, for every key that ever held a finite number."""
    series: dict[str, Points] = {}
    for record in records:
        for key, value in record.items():
            if key not in NOT_CHARTED and isinstance(value, int | float) and not isinstance(value, bool):
                series.setdefault(key, []).append((float(record["epoch"]), number(value)))
    return {key: points for key, points in series.items() if any(value is not None for _, value in points)}


def _training_charts(series: Mapping[str, Points]) -> list[Chart]:
    """One chart per title: keys in the order of RULES, and within a rule in the order the run wrote them."""
    drawn: dict[tuple[str, str], Chart] = {}
    banded = {f"reward/{name}/std" for name in _rewards(series)}
    rules = {key: _rule_of(key) for key in series if key not in banded and not key.startswith((MONITOR, ALARM))}
    for key, (_, group, title, line) in sorted(rules.items(), key=lambda item: item[1][0]):
        chart = drawn.setdefault((group, title), Chart(group=group, title=title, band=_band(series, key)))
        chart.lines.append(Line(label=line, points=thinned(series[key])))
    return list(drawn.values())


def _rewards(series: Mapping[str, Points]) -> list[str]:
    return [key.split("/", 1)[1].removesuffix("/mean") for key in series if re.fullmatch(RULES[0][0], key)]


def _rule_of(key: str) -> tuple[int, str, str, str]:
    """Index of the first rule that `key` follows, its group, the title of its chart, the label of its line."""
    for index, (pattern, group, title) in enumerate(RULES):
        follows = re.fullmatch(pattern, key)
        if follows:
            line = label(follows.groupdict().get("line") or key.removeprefix("reward/"))
            return index, group, title or line, f"Step {line}" if line.isdecimal() else line
    return len(RULES), MORE, label(key), label(key)


def _band(series: Mapping[str, Points], key: str) -> list[tuple[float, float, float]]:
    """One standard deviation around a reward's mean, if the run wrote both."""
    spread = dict(series.get(key.removesuffix("/mean") + "/std", []) if key.endswith("/mean") else [])
    both = [(epoch, mean, spread.get(epoch)) for epoch, mean in thinned(series[key])]
    return [(epoch, mean - std, mean + std) for epoch, mean, std in both if mean is not None and std is not None]


def _evaluation_charts(series: Mapping[str, Points]) -> list[Chart]:
    first = [name for name in MEANINGS if name in series]
    apart = (MONITOR, HELD_OUT, ALARM, SECONDS, CORRELATION, TRAINED, AVERAGE)
    names = first + [name for name in series if name not in first and not name.startswith(apart)]
    drawn = [
        Chart(group=EVALUATION, title=label(name), lines=[Line(label(name), thinned(series[name]))], dots=True)
        for name in names
    ]
    drawn += _average_charts(series)
    shared = ((CORRELATION, EVALUATION, "Training size with full size, correlation"), (SECONDS, TIME, "Per evaluation"))
    return drawn + [
        Chart(group=group, title=title, lines=lines, dots=True)
        for prefix, group, title in shared
        if (lines := _lines_of(series, prefix))
    ]


def _average_charts(series: Mapping[str, Points]) -> list[Chart]:
    """The trained adapter's score and its moving average's, over the same prompts, seeds and size."""
    names = [key.removeprefix(TRAINED) for key in series if key.startswith(TRAINED)]
    kinds = (("Trained adapter", TRAINED), ("Its average", AVERAGE))
    return [
        Chart(
            group=EVALUATION,
            title=f"{label(name)}, trained beside average",
            lines=[Line(kind, thinned(series[prefix + name])) for kind, prefix in kinds if prefix + name in series],
            dots=True,
        )
        for name in names
    ]


def _lines_of(series: Mapping[str, Points], prefix: str) -> list[Line]:
    """A line for each key that begins with `prefix`."""
    matching = {key.removeprefix(prefix): points for key, points in series.items() if key.startswith(prefix)}
    return [Line(label(name), thinned(points)) for name, points in matching.items()]


def _hacking_charts(epochs: Mapping[str, Points], evaluations: Mapping[str, Points]) -> list[Chart]:
    """What nobody rewards: held-out measures, and each sign of training images and of evaluations side by side."""
    held_out = [
        Chart(group=HACKING, title=f"{line.label}, held out", lines=[line], dots=True)
        for line in _lines_of(evaluations, HELD_OUT)
    ]
    signs = dict.fromkeys(key for key in [*epochs, *evaluations] if key.startswith(MONITOR))
    kinds = (("Training", epochs), ("Evaluation", evaluations))
    return held_out + [
        Chart(
            group=HACKING,
            title=label(key.removeprefix(MONITOR)),
            lines=[Line(kind, thinned(series[key])) for kind, series in kinds if key in series],
        )
        for key in signs
    ]


def thinned(points: Points) -> Points:
    """The points themselves, or the lowest and the highest of each bucket if there are too many, and both ends."""
    if len(points) <= 2 * BUCKETS:
        return points
    indices = {0, len(points) - 1}
    for bucket in range(BUCKETS):
        bucket_range = range(bucket * len(points) // BUCKETS, (bucket + 1) * len(points) // BUCKETS)
        finite = [(value, index) for index in bucket_range if (value := points[index][1]) is not None]
        indices |= {min(finite)[1], max(finite)[1]} if finite else {bucket_range[0]}
    return [points[index] for index in sorted(indices)]


# --- drawing ---------------------------------------------------------------------------------------------------------


WIDTH, HEIGHT = 384, 180
LEFT, RIGHT, TOP, BOTTOM = 46, 376, 10, 154
COLOURS = 6
"""Line colours in the stylesheet; a chart with more lines starts over."""


def line_chart_svg(chart: Chart) -> Markup:
    """The chart's lines and band with axes; the frame and the numbers travel along as data attributes."""
    epochs, values = _extent(chart)
    x = Scale(epochs[0], epochs[1], LEFT, RIGHT)
    y = Scale(values[0], values[1], BOTTOM, TOP)
    drawn = [_line_svg(line, x, y, index, dots=chart.dots) for index, line in enumerate(chart.lines)]
    return tag(
        "svg",
        *_axes(x, y),
        _band_svg(chart, x, y),
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
    largest = max(map(abs, among))
    text = f"{value:.2e}" if largest < 2e-3 or largest >= 1e5 else f"{value:.4f}"
    digits, e, exponent = text.partition("e")
    return (digits.rstrip("0").rstrip(".") + (e and f"e{int(exponent)}")).replace("-", MINUS)


def _band_svg(chart: Chart, x: Scale, y: Scale) -> Markup:
    if not chart.band:
        return Markup("")
    upper = [f"{x(epoch):.1f},{y(high):.1f}" for epoch, _, high in chart.band]
    lower = [f"{x(epoch):.1f},{y(low):.1f}" for epoch, low, _ in reversed(chart.band)]
    return tag("polygon", points=" ".join(upper + lower), class_="band")


def _line_svg(line: Line, x: Scale, y: Scale, index: int, *, dots: bool) -> Markup:
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
        for is_number, run in groupby(points, key=lambda point: point[1] is not None)
        if is_number
    ]


def _path(points: Sequence[tuple[float, float]], x: Scale, y: Scale) -> Markup:
    return tag("polyline", points=" ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points))


def _data(line: Line) -> dict[str, object]:
    points = [(epoch, float(f"{value:.5g}")) for epoch, value in line.points if value is not None]
    return {"label": line.label, "points": points}
