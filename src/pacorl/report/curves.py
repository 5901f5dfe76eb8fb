"""Which curves a page draws, from the lines of metrics.jsonl: known ones first and grouped, then all the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pacorl.report.folder import Record, RunFolder, number
from pacorl.report.words import MEANINGS, amount, label

Points = list[tuple[float, float | None]]
"""(epoch, value); None where the value was not finite, which breaks the line."""

REWARDS, EVALUATION, WATCH, HEALTH, JUDGE, TIME, MORE = GROUPS = (
    "Rewards",
    "Evaluation",
    "HackingMonitor on reward hacking",
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

SIGN, HELD_OUT, ALARM, SECONDS = "watch/", "held_out/", "alarm/", "seconds/"
"""Prefixes of the keys that have places of their own."""

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
        """First and last value of the only line; empty where there are several."""
        known = [value for _, value in self.lines[0].points if value is not None]
        if len(self.lines) > 1:
            return ""
        return amount(known[0]) if len(known) == 1 else f"{amount(known[0])} → {amount(known[-1])}"


def charts(run: RunFolder) -> dict[str, list[Chart]]:
    """Group → its charts, in the order of GROUPS; groups without charts are left out."""
    epochs, evaluations = _series(run.epochs), _series(run.evaluations)
    drawn = [*_training_charts(epochs), *_evaluation_charts(evaluations), *_watch_charts(epochs, evaluations)]
    grouped = {group: [chart for chart in drawn if chart.group == group] for group in GROUPS}
    return {group: found for group, found in grouped.items() if found}


def _series(records: Sequence[Record]) -> dict[str, Points]:
    """Key → points over epochs, for every key that ever held a finite number."""
    found: dict[str, Points] = {}
    for record in records:
        for key, value in record.items():
            if key not in NOT_CHARTED and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(key, []).append((float(record["epoch"]), number(value)))
    return {key: points for key, points in found.items() if any(value is not None for _, value in points)}


def _training_charts(series: Mapping[str, Points]) -> list[Chart]:
    """One chart per title: keys in the order of RULES, and within a rule in the order the run wrote them."""
    found: dict[tuple[str, str], Chart] = {}
    banded = {f"reward/{name}/std" for name in _rewards(series)}
    places = {key: _place(key) for key in series if key not in banded and not key.startswith((SIGN, ALARM))}
    for key, (_, group, title, line) in sorted(places.items(), key=lambda item: item[1][0]):
        chart = found.setdefault((group, title), Chart(group=group, title=title, band=_band(series, key)))
        chart.lines.append(Line(label=line, points=thinned(series[key])))
    return list(found.values())


def _rewards(series: Mapping[str, Points]) -> list[str]:
    return [key.split("/", 1)[1].removesuffix("/mean") for key in series if re.fullmatch(RULES[0][0], key)]


def _place(key: str) -> tuple[int, str, str, str]:
    """Index of the first rule that `key` follows, its group, the title of its chart, the label of its line."""
    for index, (pattern, group, title) in enumerate(RULES):
        follows = re.fullmatch(pattern, key)
        if follows:
            line = label(follows.groupdict().get("line") or key.removeprefix("reward/"))
            return index, group, title or line, f"Step {line}" if line.isdecimal() else line
    return len(RULES), MORE, label(key), label(key)


def _band(series: Mapping[str, Points], key: str) -> list[tuple[float, float, float]]:
    """One standard deviation around a reward's mean, where the run wrote both."""
    spread = dict(series.get(key.removesuffix("/mean") + "/std", []) if key.endswith("/mean") else [])
    both = [(epoch, mean, spread.get(epoch)) for epoch, mean in thinned(series[key])]
    return [(epoch, mean - std, mean + std) for epoch, mean, std in both if mean is not None and std is not None]


def _evaluation_charts(series: Mapping[str, Points]) -> list[Chart]:
    known = [name for name in MEANINGS if name in series]
    apart = (SIGN, HELD_OUT, ALARM, SECONDS, CORRELATION, TRAINED, AVERAGE)
    names = known + [name for name in series if name not in known and not name.startswith(apart)]
    drawn = [
        Chart(group=EVALUATION, title=label(name), lines=[Line(label(name), thinned(series[name]))], dots=True)
        for name in names
    ]
    drawn += _average_charts(series)
    shared = ((CORRELATION, EVALUATION, "Training size with full size, correlation"), (SECONDS, TIME, "Per evaluation"))
    return drawn + [
        Chart(group=group, title=title, lines=found, dots=True)
        for prefix, group, title in shared
        if (found := _lines_of(series, prefix))
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
    own = {key.removeprefix(prefix): points for key, points in series.items() if key.startswith(prefix)}
    return [Line(label(name), thinned(points)) for name, points in own.items()]


def _watch_charts(epochs: Mapping[str, Points], evaluations: Mapping[str, Points]) -> list[Chart]:
    """What nobody rewards: held-out measures, and each sign of training pictures and of evaluations side by side."""
    held_out = [
        Chart(group=WATCH, title=f"{line.label}, held out", lines=[line], dots=True)
        for line in _lines_of(evaluations, HELD_OUT)
    ]
    signs = dict.fromkeys(key for key in [*epochs, *evaluations] if key.startswith(SIGN))
    kinds = (("Training", epochs), ("Evaluation", evaluations))
    return held_out + [
        Chart(
            group=WATCH,
            title=label(key.removeprefix(SIGN)),
            lines=[Line(kind, thinned(series[key])) for kind, series in kinds if key in series],
        )
        for key in signs
    ]


def thinned(points: Points) -> Points:
    """The points themselves, or the lowest and the highest of each bucket where there are too many, and both ends."""
    if len(points) <= 2 * BUCKETS:
        return points
    kept = {0, len(points) - 1}
    for bucket in range(BUCKETS):
        places = range(bucket * len(points) // BUCKETS, (bucket + 1) * len(points) // BUCKETS)
        finite = [(value, place) for place in places if (value := points[place][1]) is not None]
        kept |= {min(finite)[1], max(finite)[1]} if finite else {places[0]}
    return [points[place] for place in sorted(kept)]
