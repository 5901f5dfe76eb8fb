"""The curves of a page, from the lines of metrics.jsonl: known ones first and grouped, then all the rest.

`charts` says which there are; `line_chart_svg` draws one: quiet axes, one colour per line, and the numbers beside the
drawing for the pointer's readout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from markupsafe import Markup

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, SECONDS, SUFFIX_CORRELATION
from pacorl.report.figures import MEANINGS, MINUS, Scale, amount, label, padded, tag, ticks
from pacorl.report.folder import Record, RunFolder, number

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

# The first pattern that matches counts: `reward/X/mean` must stand before `reward/.+`.
RULES: tuple[tuple[str, str, str], ...] = (
    (r"reward/(?P<line>.+)/mean", REWARDS, ""),
    (r"reward/(?P<line>.+)/cv", REWARDS, "Spread of rewards (std ÷ mean)"),
    (r"reward/.+", REWARDS, ""),
    (r"loss|grad_norm|clip_fraction|kl", HEALTH, ""),
    (r"ratio_deviation/(?P<line>.+)", HEALTH, "Ratio − 1 before the first update, by step"),
    (r"advantage/.+", HEALTH, ""),
    (SUFFIX_CORRELATION, HEALTH, "Advantages, cheap suffix with all steps"),
    (r"judge/(?P<line>.+)", JUDGE, "Per epoch, by the judge’s server"),
    (r"samples/(?P<line>missing|not_finite)", REWARDS, "Share of scores that are"),
    (r"seconds/(?P<line>.+)", TIME, "Seconds per epoch"),
)
"""(pattern of a key, its group, the title of the chart that all such keys share; empty for a chart of its own)."""

BUCKETS = 200
"""A series is thinned to the extremes of so many buckets, so that a long run keeps its spikes and loses its weight."""

RATIO = "reward/ratio"
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

    @property
    def flat(self) -> bool:
        """Whether no line has moved, over three points or more of all lines."""
        moved = any(len({value for _, value in line.points}) > 1 for line in self.lines)
        return not moved and sum(len(line.points) for line in self.lines) > 2


def charts(run: RunFolder) -> dict[str, list[Chart]]:
    """Group → its charts, in the order of GROUPS; groups without charts are left out."""
    epochs, evaluations = _series(run.epochs), _series(run.evaluations)
    drawn = [*_training_charts(epochs), *_evaluation_charts(evaluations), *_hacking_charts(epochs, evaluations)]
    grouped = {group: [chart for chart in drawn if chart.group == group] for group in GROUPS}
    return {group: members for group, members in grouped.items() if members}


def folded(run: RunFolder) -> dict[str, list[Chart]]:
    """The charts as a page shows them: what did not move stands under MORE, and is not looked through by everybody."""
    drawn = [chart for members in charts(run).values() for chart in members]
    grouped = {group: [chart for chart in drawn if (MORE if chart.flat else chart.group) == group] for group in GROUPS}
    return {group: members for group, members in grouped.items() if members}


def _series(records: Sequence[Record]) -> dict[str, Points]:
    """Key → points over epochs, for every key that ever held a finite number."""
    series: dict[str, Points] = {}
    for record in records:
        for key, value in record.items():
            # The log has null for a value that was not finite.
            if key not in NOT_CHARTED and (value is None or number(value) is not None):
                series.setdefault(key, []).append((float(record["epoch"]), number(value)))
    return {key: points for key, points in series.items() if any(value is not None for _, value in points)}


def _training_charts(series: Mapping[str, Points]) -> list[Chart]:
    """One chart per title: keys in the order of RULES, and within a rule in the order the run wrote them."""
    drawn: dict[tuple[str, str], Chart] = {}
    # A reward's spread is the band around its mean, and not a curve of its own.
    banded = {key.removesuffix("mean") + "std" for key in series if re.fullmatch(RULES[0][0], key)}
    rules = {key: _rule_of(key) for key in series if key not in banded and not key.startswith((MONITOR, ALARM))}
    if series.get(RATIO) in [points for key, points in series.items() if key.startswith("reward/") and key != RATIO]:
        rules.pop(RATIO)  # of two rewards, the one ratio has a name that says of which
    for key, (_, group, title, line) in sorted(rules.items(), key=lambda item: item[1][0]):  # stable within a rule
        chart = drawn.setdefault((group, title), Chart(group=group, title=title, band=_band(series, key)))
        chart.lines.append(Line(line, thinned(series[key])))
    return list(drawn.values())


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
    # At the points that are drawn of the mean: a band with all points would not follow its line.
    both = [(epoch, mean, spread.get(epoch)) for epoch, mean in thinned(series[key])]
    return [(epoch, mean - std, mean + std) for epoch, mean, std in both if mean is not None and std is not None]


def _evaluation_charts(series: Mapping[str, Points]) -> list[Chart]:
    first = [name for name in MEANINGS if name in series]
    apart = (MONITOR, HELD_OUT, ALARM, SECONDS, CORRELATION, TRAINED, AVERAGE)
    names = first + [name for name in series if name not in first and not name.startswith(apart)]
    drawn = [Chart(EVALUATION, label(name), [Line(label(name), thinned(series[name]))], dots=True) for name in names]
    # The trained adapter's score and its moving average's are over the same prompts, seeds and size.
    kinds = (("Trained adapter", TRAINED), ("Its average", AVERAGE))
    for name in [key.removeprefix(TRAINED) for key in series if key.startswith(TRAINED)]:
        lines = [Line(kind, thinned(series[prefix + name])) for kind, prefix in kinds if prefix + name in series]
        drawn.append(Chart(EVALUATION, f"{label(name)}, trained beside average", lines, dots=True))
    shared = ((CORRELATION, EVALUATION, "Training size with full size, correlation"), (SECONDS, TIME, "Per evaluation"))
    return drawn + [
        Chart(group, title, lines, dots=True) for prefix, group, title in shared if (lines := _lines_of(series, prefix))
    ]


def _hacking_charts(epochs: Mapping[str, Points], evaluations: Mapping[str, Points]) -> list[Chart]:
    """What nobody rewards: held-out measures, and each sign of training images and of evaluations side by side."""
    held_out = [
        Chart(HACKING, f"{line.label}, held out", [line], dots=True) for line in _lines_of(evaluations, HELD_OUT)
    ]
    signs = dict.fromkeys(key for key in [*epochs, *evaluations] if key.startswith(MONITOR))
    kinds = (("Training", epochs), ("Evaluation", evaluations))
    return held_out + [
        Chart(
            HACKING,
            label(key.removeprefix(MONITOR)),
            [Line(kind, thinned(series[key])) for kind, series in kinds if key in series],
        )
        for key in signs
    ]


def _lines_of(series: Mapping[str, Points], prefix: str) -> list[Line]:
    """A line for each key that begins with `prefix`."""
    keys = [key for key in series if key.startswith(prefix)]
    return [Line(label(key.removeprefix(prefix)), thinned(series[key])) for key in keys]


def thinned(points: Points) -> Points:
    """The points themselves, or the lowest and the highest of each bucket if there are too many, and both ends."""
    if len(points) <= 2 * BUCKETS:
        return points
    indices = {0, len(points) - 1}
    for bucket in range(BUCKETS):
        bucket_range = range(bucket * len(points) // BUCKETS, (bucket + 1) * len(points) // BUCKETS)
        finite = [(value, index) for index in bucket_range if (value := points[index][1]) is not None]
        # A bucket without a number keeps one gap, so that its line is broken as before.
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
    x = Scale(*epochs, LEFT, RIGHT)
    y = Scale(*values, BOTTOM, TOP)
    upper = [f"{x(epoch):.1f},{y(high):.1f}" for epoch, _, high in chart.band]
    lower = [f"{x(epoch):.1f},{y(low):.1f}" for epoch, low, _ in reversed(chart.band)]
    band = tag("polygon", points=" ".join(upper + lower), class_="band") if chart.band else Markup("")
    # The pointer's readout needs no more digits than a person reads.
    data = [
        {"label": line.label, "points": [(epoch, float(f"{value:.5g}")) for epoch, value in _finite(line.points)]}
        for line in chart.lines
    ]
    return tag(
        "svg",
        *_axes(x, y),
        band,
        *(_line_svg(line, x, y, index, dots=chart.dots) for index, line in enumerate(chart.lines)),
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=chart.title,
        data_frame=json.dumps([*epochs, LEFT, RIGHT, *values, BOTTOM, TOP]),
        data_lines=json.dumps(data, separators=(",", ":")),
    )


def _finite(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(epoch, value) for epoch, value in points if value is not None]


def _extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """First and last epoch, lowest and highest value; shares of an evaluation always run from 0 to 1."""
    epochs = [epoch for line in chart.lines for epoch, _ in line.points]
    values = [value for line in chart.lines for _, value in _finite(line.points)]
    values += [end for _, low, high in chart.band for end in (low, high)]
    first, last = min(epochs), max(epochs)
    whole = chart.group == EVALUATION and all(0 <= value <= 1 for value in values)
    # One epoch has no width, and a scale needs one.
    return (first, last if last > first else first + 1), (0.0, 1.0) if whole else padded(values)


def _axes(x: Scale, y: Scale) -> list[Markup]:
    marks = []
    heights = ticks(y.low, y.high)
    for value in heights:
        marks.append(tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid"))
        marks.append(tag("text", _tick(value, heights), x=LEFT - 8, y=y(value) + 3.5, text_anchor="end"))
    for epoch in ticks(x.low, x.high):
        if epoch == int(epoch):  # a short run has ticks between its epochs
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


def _line_svg(line: Line, x: Scale, y: Scale, index: int, *, dots: bool) -> Markup:
    """The stretches between missing values, and a dot per point if there are few."""
    marks = [
        tag("polyline", points=" ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in _finite(stretch)))
        for is_number, stretch in groupby(line.points, key=lambda point: point[1] is not None)
        if is_number
    ]
    if dots or len(line.points) == 1:  # a polyline of one point shows nothing
        marks += [tag("circle", cx=x(epoch), cy=y(value), r=3) for epoch, value in _finite(line.points)]
    return tag("g", *marks, class_=f"line-{index % COLOURS}")
