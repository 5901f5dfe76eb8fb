"""The curves of a page, from the lines of metrics.jsonl: known metrics first and grouped, then all the rest.

`charts` selects them; `line_chart_svg` draws one of them: quiet axes, one colour per line, and the numbers as data for
the pointer's readout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from markupsafe import Markup

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, PROMPT_SHARE, SECONDS
from pacorl.report.figures import MEANINGS, MINUS, PARTS, Scale, amount, label, padded, tag, ticks
from pacorl.report.folder import Record, RunFolder, number

Points = list[tuple[float, float | None]]
"""(epoch, value); None if the value was not finite, which breaks the line."""
Series = Mapping[str, Points]
"""Key → its points."""

EVALUATION, REWARDS, HACKING, HEALTH, JUDGE, TIME, MORE = GROUPS = (
    "Evaluation",
    "Rewards in training",
    "Signs of reward hacking",
    "Training health",
    "Judge",
    "Time",
    "More",
)

# The first match counts: `reward/X/mean` has to precede `reward/.+`.
RULES: tuple[tuple[str, str, str], ...] = (
    (r"reward/(?P<line>.+)/mean", REWARDS, ""),
    (r"reward/(?P<line>.+)/cv", REWARDS, "Spread of rewards (std ÷ mean)"),
    (r"reward/(?P<line>.+)/tamed", REWARDS, "Log-tamed in the epoch (1: yes)"),
    (r"reward/.+", REWARDS, ""),
    (r"loss|grad_norm|clip_fraction|kl", HEALTH, ""),
    (r"ratio_deviation/(?P<line>.+)", HEALTH, "Ratio − 1 before the first update, by step"),
    (r"advantage/.+", HEALTH, ""),
    (r"judge/(?P<line>.+)", JUDGE, "Per epoch, by the judge’s server"),
    (r"samples/(?P<line>missing|not_finite)", REWARDS, "Share of scores that are"),
    (r"seconds/(?P<line>.+)", TIME, "Seconds per epoch"),
)
"""(pattern of a key, its group, the title of the chart that all such keys share; empty for a chart of its own)."""

TIME_RULE = len(RULES) - 1

BUCKETS = 200
"""A series is thinned to the extremes of so many buckets, so that a long run keeps its spikes and loses its weight."""

RATIO = "reward/ratio"
NOT_CHARTED = {"kind", "epoch", "step", PROMPT_SHARE}


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
    """Whether each point is marked, because there are few."""

    @property
    def ends(self) -> str:
        """First and last value of the only line; empty if there are several."""
        if len(self.lines) > 1:
            return ""
        values = [value for _, value in _finite(self.lines[0].points)]
        if len(values) == 1:
            return amount(values[0])
        return f"{amount(values[0])} → {amount(values[-1])}"

    @property
    def flat(self) -> bool:
        """Whether no line has moved, over three points or more of all lines."""
        count = 0
        for line in self.lines:
            count += len(line.points)
            if len({value for _, value in line.points}) > 1:
                return False
        return count > 2


def charts(run: RunFolder) -> dict[str, list[Chart]]:
    """Group → its charts, in the order of GROUPS; groups without charts are left out."""
    epochs = _series(run.epochs)
    evaluations = _series(run.evaluations)
    grouped: dict[str, list[Chart]] = {group: [] for group in GROUPS}
    for chart in _training_charts(epochs) + _evaluation_charts(evaluations) + _hacking_charts(epochs, evaluations):
        grouped[chart.group].append(chart)
    return {group: members for group, members in grouped.items() if members}


def folded(shown: Iterable[Chart]) -> dict[str, list[Chart]]:
    """Group charts, the flat ones in MORE, the last group of the page."""
    grouped: dict[str, list[Chart]] = {group: [] for group in GROUPS}
    for chart in shown:
        grouped[MORE if chart.flat else chart.group].append(chart)
    return {group: members for group, members in grouped.items() if members}


def _series(records: Sequence[Record]) -> dict[str, Points]:
    """Key → points over epochs, for every key that ever held a finite number."""
    series: dict[str, Points] = {}
    for record in records:
        for key, value in record.items():
            # The log has null for values that were not finite.
            if key not in NOT_CHARTED and (value is None or number(value) is not None):
                series.setdefault(key, []).append((float(record["epoch"]), number(value)))
    return {key: points for key, points in series.items() if _finite(points)}


def _training_charts(series: Series) -> list[Chart]:
    """One chart per title: keys in the order of RULES, and within a rule in the order the run wrote them."""
    # A reward's spread is the band around its mean, and not a curve of its own.
    banded = {key.removesuffix("mean") + "std" for key in series if re.fullmatch(RULES[0][0], key)}
    # A run with two rewards logs their only ratio twice: under its pair's name, which is the clearer, and as RATIO.
    ratios = [points for key, points in series.items() if key.startswith("reward/") and key != RATIO]
    if series.get(RATIO) in ratios:
        banded.add(RATIO)

    keys: list[list[str]] = [[] for _ in range(len(RULES) + 1)]
    for key in series:
        if key not in banded and not key.startswith((MONITOR, ALARM)):
            keys[_rule_of(key)[0]].append(key)

    drawn: dict[tuple[str, str], Chart] = {}
    # Parts of the time in the order of their colours.
    keys[TIME_RULE].sort(key=_part_of)
    for key in chain(*keys):
        _, group, title, line = _rule_of(key)
        chart = drawn.setdefault((group, title), Chart(group=group, title=title, band=_band(series, key)))
        chart.lines.append(Line(line, thinned(series[key])))
    return list(drawn.values())


def _part_of(key: str) -> int:
    name = key.removeprefix(SECONDS)
    return PARTS.index(name) if name in PARTS else len(PARTS)


def _rule_of(key: str) -> tuple[int, str, str, str]:
    """Index of the first rule for `key`, its group, the title of its chart, the label of its line."""
    for index, (pattern, group, title) in enumerate(RULES):
        follows = re.fullmatch(pattern, key)
        if follows is None:
            continue
        line = label(follows.groupdict().get("line") or key.removeprefix("reward/"))
        name = f"Step {line}" if line.isdecimal() else line
        return index, group, title or line, name
    return len(RULES), MORE, label(key), label(key)


def _band(series: Series, key: str) -> list[tuple[float, float, float]]:
    """One standard deviation around a reward's mean, if the run wrote both."""
    if not key.endswith("/mean"):
        return []
    spread = dict(series.get(key.removesuffix("/mean") + "/std", []))
    band = []
    # Only the drawn points of the mean: a band of all points would not follow its line.
    for epoch, mean in _finite(thinned(series[key])):
        std = spread.get(epoch)
        if std is not None:
            band.append((epoch, mean - std, mean + std))
    return band


def _evaluation_charts(series: Series) -> list[Chart]:
    # One chart per measure, known measures first; measures of parts, such as `kappa/hat`, share one.
    first = [name for name in MEANINGS if name in series]
    separate = (MONITOR, HELD_OUT, ALARM, SECONDS)
    of_measure: dict[str, Chart] = {}
    for name in first + [name for name in series if name not in first and not name.startswith(separate)]:
        measure, _, part = name.partition("/")
        chart = of_measure.setdefault(measure, Chart(EVALUATION, label(measure), dots=True))
        chart.lines.append(Line(label(part or measure), thinned(series[name])))
    drawn = [*of_measure.values()]

    times = _lines_of(series, SECONDS)
    if times:
        drawn.append(Chart(TIME, "Per evaluation", times, dots=True))
    return drawn


def _hacking_charts(epochs: Series, evaluations: Series) -> list[Chart]:
    """Unrewarded measures: held-out scores, and each sign of training images and of evaluations in one chart."""
    drawn = []
    for line in _lines_of(evaluations, HELD_OUT):
        drawn.append(Chart(HACKING, f"{line.label}, held out", [line], dots=True))
    # Training and evaluation in one chart: a sign in either is enough.
    for key in dict.fromkeys([*epochs, *evaluations]):
        if key.startswith(MONITOR):
            chart = Chart(HACKING, label(key.removeprefix(MONITOR)))
            for kind, series in (("Training", epochs), ("Evaluation", evaluations)):
                if key in series:
                    chart.lines.append(Line(kind, thinned(series[key])))
            drawn.append(chart)
    return drawn


def _lines_of(series: Series, prefix: str) -> list[Line]:
    """Return a line for each key that begins with `prefix`."""
    lines = []
    for key, points in series.items():
        if key.startswith(prefix):
            lines.append(Line(label(key.removeprefix(prefix)), thinned(points)))
    return lines


def thinned(points: Points) -> Points:
    """Keep the lowest and highest point of each bucket and both ends; all points if there are at most 2 · BUCKETS."""
    if len(points) <= 2 * BUCKETS:
        return points
    # Extremes, not means: a spike in the loss must remain visible.
    indices = {0, len(points) - 1}
    for bucket in range(BUCKETS):
        start = bucket * len(points) // BUCKETS
        stop = (bucket + 1) * len(points) // BUCKETS
        finite = []
        for offset, (_, value) in enumerate(points[start:stop]):
            if value is not None:
                finite.append((value, start + offset))

        if finite:
            indices |= {min(finite)[1], max(finite)[1]}
        else:
            indices.add(start)  # a gap, so that the line stays broken here
    return [points[index] for index in sorted(indices)]


# --- drawing ---------------------------------------------------------------------------------------------------------


WIDTH = 384
HEIGHT = 180
LEFT = 46
RIGHT = 376
TOP = 10
BOTTOM = 154
NARROW = 0.1
"""An evaluation's values within such a band fill their axis: on one from 0 to 1 their curve would be a line."""
COLOURS = 6
"""Line colours in the stylesheet; a chart with more lines starts over."""


def line_chart_svg(chart: Chart) -> Markup:
    """Draw the chart's lines and band with axes; data attributes hold the frame and the numbers."""
    # The frame. SVG's y grows downwards, so that the scale of values is reversed.
    epochs, values = _extent(chart)
    x = Scale(*epochs, LEFT, RIGHT)
    y = Scale(*values, BOTTOM, TOP)
    drawn = _axes(x, y)

    # The band: its upper edge forwards, its lower edge back.
    if chart.band:
        upper = [(epoch, high) for epoch, _, high in chart.band]
        lower = [(epoch, low) for epoch, low, _ in reversed(chart.band)]
        drawn.append(tag("polygon", points=_path(upper + lower, x, y), class_="band"))

    # The lines, and their numbers in five digits: a reader of the pointer's readout needs no more.
    data = []
    for index, line in enumerate(chart.lines):
        drawn.append(_line_svg(line, x, y, index, dots=chart.dots))
        points = [(epoch, float(f"{value:.5g}")) for epoch, value in _finite(line.points)]
        data.append({"label": line.label, "points": points})

    return tag(
        "svg",
        *drawn,
        class_="chart",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=chart.title,
        data_frame=json.dumps([*epochs, LEFT, RIGHT, *values, BOTTOM, TOP]),
        data_lines=json.dumps(data, separators=(",", ":")),
    )


def _finite(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    return [(epoch, value) for epoch, value in points if value is not None]


def _path(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    """Format points for an SVG element's `points`."""
    return " ".join(f"{x(epoch):.1f},{y(value):.1f}" for epoch, value in points)


def _extent(chart: Chart) -> tuple[tuple[float, float], tuple[float, float]]:
    """First and last epoch, lowest and highest value; an evaluation's shares run from 0 to 1 unless they lie close."""
    epochs = []
    values = []
    for line in chart.lines:
        epochs += [epoch for epoch, _ in line.points]
        values += [value for _, value in _finite(line.points)]
    for _, low, high in chart.band:
        values += [low, high]

    # A run of one epoch has a single point.
    first = min(epochs)
    last = max(epochs)
    if last == first:
        last = first + 1  # a scale needs a width
    if (
        chart.group == EVALUATION
        and min(values) >= 0
        and max(values) <= 1
        and not 0 < max(values) - min(values) < NARROW
    ):
        return (first, last), (0.0, 1.0)
    return (first, last), padded(values)


def _axes(x: Scale, y: Scale) -> list[Markup]:
    marks = []
    heights = ticks(y.low, y.high)
    for value in heights:
        marks.append(tag("line", x1=LEFT, x2=RIGHT, y1=y(value), y2=y(value), class_="grid"))
        marks.append(tag("text", _tick(value, heights), x=LEFT - 8, y=y(value) + 3.5, text_anchor="end"))
    for epoch in ticks(x.low, x.high):
        if epoch == int(epoch):  # a short run has ticks between its epochs
            marks.append(tag("text", str(int(epoch)), x=x(epoch), y=HEIGHT - 8, text_anchor="middle"))
    marks.append(tag("text", "epoch", x=LEFT - 8, y=HEIGHT - 8, text_anchor="end"))
    return marks


def _tick(value: float, among: Sequence[float]) -> str:
    """Format a tick with as few digits as keep it distinct from its neighbours."""
    if abs(value) < 1e-12:
        return "0"
    largest = max(abs(among[0]), abs(among[-1]))
    if 2e-3 <= largest < 1e5:
        text = f"{value:.4f}".rstrip("0").rstrip(".")
    else:
        digits, _, exponent = f"{value:.2e}".partition("e")
        text = digits.rstrip("0").rstrip(".") + f"e{int(exponent)}"
    return text.replace("-", MINUS)


def _line_svg(line: Line, x: Scale, y: Scale, index: int, *, dots: bool) -> Markup:
    """Draw the stretches between missing values, and a dot per point if there are few."""
    # A missing value ends a stretch, so that no line bridges it.
    stretches: list[list[tuple[float, float]]] = [[]]
    for epoch, value in line.points:
        if value is None:
            stretches.append([])
        else:
            stretches[-1].append((epoch, value))

    marks = []
    for stretch in stretches:
        if stretch:
            marks.append(tag("polyline", points=_path(stretch, x, y)))

    if dots or len(line.points) == 1:  # a polyline of one point is invisible
        marks += [tag("circle", cx=x(epoch), cy=y(value), r=3) for epoch, value in _finite(line.points)]
    return tag("g", *marks, class_=f"line-{index % COLOURS}")
