"""What a page says in numbers: metrics before and after, alarms, facts, where the run came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, sign_meaning
from pacorl.core.ranking import bootstrap
from pacorl.report.figures import Interval, interval_svg, unit_axis
from pacorl.report.folder import Record, RunFolder, Sample, number
from pacorl.report.words import MEANINGS, amount, duration, label

DRAWS = 1000

PHASES = ("rollout", "reward", "update")
"""What an epoch's line times, one after another; further times in it lie within these."""


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of the table."""

    name: str
    before: Interval | None
    after: Interval | None
    difference: Interval | None
    """Paired: the same prompts and seeds on both sides."""

    @property
    def title(self) -> str:
        return label(self.name)

    @property
    def meaning(self) -> str:
        return MEANINGS.get(self.name, "")

    @property
    def unit(self) -> bool:
        """Whether the plot's axis runs from 0 to 1."""
        return unit_axis(self.before, self.after)

    @property
    def plot(self) -> Markup:
        return interval_svg(self.before, self.after)


def results(summary: Record) -> list[Result]:
    """Every metric that the summary has before or after, known ones first."""
    before, after, difference = (_intervals(summary, key) for key in ("before", "after", "difference"))
    measured = [*before, *after]
    names = dict.fromkeys([name for name in MEANINGS if name in measured] + measured)
    return [Result(name, before.get(name), after.get(name), difference.get(name)) for name in names]


def compared(samples: Mapping[int, Sequence[Sample]]) -> list[Result]:
    """Every score of the first evaluation beside the newest one's, from the images that both made.

    It is what a run shows of itself before it has a summary; empty after one evaluation only.
    """
    if len(samples) < 2:
        return []
    first, last = ({sample.key: sample for sample in samples[epoch]} for epoch in (min(samples), max(samples)))
    keys = sorted(first.keys() & last.keys())
    names = dict.fromkeys(name for key in keys for name in _scores(first[key]) if name in _scores(last[key]))
    return [_compared(name, keys, first, last) for name in names]


def _scores(sample: Sample) -> dict[str, float]:
    return {**sample.scores, **{f"held_out/{name}": value for name, value in sample.held_out.items()}}


def _compared(
    name: str,
    keys: Sequence[tuple[int, int]],
    first: Mapping[tuple[int, int], Sample],
    last: Mapping[tuple[int, int], Sample],
) -> Result:
    both = [key for key in keys if name in _scores(first[key]) and name in _scores(last[key])]
    before, after = (np.array([_scores(side[key])[name] for key in both]) for side in (first, last))

    def means(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.array([before[rows].mean(), after[rows].mean(), (after - before)[rows].mean()])

    intervals = bootstrap([prompt for prompt, _ in both], means, draws=DRAWS)
    return Result(name, *(Interval(interval.mean, interval.low, interval.high) for interval in intervals))


def planned_epochs(config: str) -> int | None:
    """How many epochs a run's config.yaml asks for; None if it does not say."""
    match = re.search(r"^epochs: (\d+)$", config, re.MULTILINE)
    return int(match[1]) if match else None


def seconds_so_far(run: RunFolder) -> dict[str, float]:
    """Phase → seconds, added up over the lines of the log."""
    spent = {name: _total(run.epochs, f"seconds/{name}") for name in PHASES}
    spent["evaluation"] = _total(run.evaluations, "seconds/evaluation")
    return {name: value for name, value in spent.items() if value}


def _total(records: Sequence[Record], key: str) -> float:
    return sum(number(record.get(key)) or 0.0 for record in records)


def facts(
    summary: Record, *, epochs: int, images: int, spent: float, planned: int | None = None
) -> list[tuple[str, str]]:
    """(value, what it is) of the few numbers worth a glance."""
    rows = _accuracies(section(summary, "judge"))
    running = planned is not None and epochs < planned
    rows += [(f"{epochs}", f"of {planned} epochs")] if running else []
    rows += [(f"{epochs}", "epoch" if epochs == 1 else "epochs")] if epochs and not running else []
    rows += [(f"{images}", "evaluation image" if images == 1 else "evaluation images")] if images else []
    return rows + ([(duration(spent), "in all")] if spent else [])


def _accuracies(judge: Mapping[str, object]) -> list[tuple[str, str]]:
    """`pair_accuracy` with the `pairs` that it was measured on, and so on."""
    rows = []
    for name, measured in judge.items():
        if (value := number(measured)) is not None and name.endswith("_accuracy"):
            count = number(judge.get(name.removesuffix("_accuracy") + "s"))
            rows.append((amount(value), f"judge’s {label(name).lower()}" + (f", of {count:.0f}" if count else "")))
    return rows


def seconds(summary: Record) -> dict[str, float]:
    """Phase → seconds, if any were spent."""
    spent = {str(name): number(value) for name, value in section(summary, "seconds").items()}
    return {name: value for name, value in spent.items() if value}


def provenance(summary: Record) -> list[tuple[str, str]]:
    """Seed, config hash and versions."""
    origin = [(label(key), str(summary[key])) for key in ("seed", "config_hash") if key in summary]
    return origin + [(str(name), str(version)) for name, version in section(summary, "versions").items()]


def section(summary: Record, key: str) -> Mapping[str, Any]:
    """A section of the summary, empty if it is not there (or null)."""
    values = summary.get(key) or {}
    if not isinstance(values, Mapping):
        raise ValueError(f"summary.json: {key!r} should be an object, it is a {type(values).__name__}")
    return values


def _intervals(summary: Record, key: str) -> dict[str, Interval]:
    return {name: interval for name, value in section(summary, key).items() if (interval := _interval(value))}


def _interval(value: object) -> Interval | None:
    ends = value if isinstance(value, Mapping) else {"mean": value}
    mean = number(ends.get("mean"))
    return None if mean is None else Interval(mean, number(ends.get("low")), number(ends.get("high")))


# --- alarms ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RaisedAlarm:
    """One sign that went beyond its limit."""

    name: str
    meaning: str
    where: str
    first: int
    """The epoch after which it was raised first."""
    last: int
    times: int


def alarms(run: RunFolder) -> list[RaisedAlarm]:
    """Every sign that was alarming, earliest first; training images and evaluations apart."""
    raised = [*_alarms(run.epochs, "training images"), *_alarms(run.evaluations, "evaluation")]
    return sorted(raised, key=lambda alarm: alarm.first)


def is_monitored(run: RunFolder) -> bool:
    """Whether the run measured any sign at all."""
    return any(key.startswith((MONITOR, HELD_OUT)) for record in [*run.epochs, *run.evaluations] for key in record)


def _alarms(records: Sequence[Record], where: str) -> list[RaisedAlarm]:
    raised: dict[str, list[int]] = {}
    for record in records:
        for key in record:
            if key.startswith(ALARM) and record[key]:
                raised.setdefault(key.removeprefix(ALARM), []).append(int(record["epoch"]))
    return [
        RaisedAlarm(
            name=label(sign.removeprefix(HELD_OUT)) + (", held out" if sign.startswith(HELD_OUT) else ""),
            meaning=sign_meaning(sign),
            where=where,
            first=epochs[0],
            last=epochs[-1],
            times=len(epochs),
        )
        for sign, epochs in raised.items()
    ]
