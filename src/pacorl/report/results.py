"""What a page says in numbers: metrics before and after, alarms, facts, where the run came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, sign_meaning
from pacorl.core.ranking import Interval, bootstrap
from pacorl.report.figures import MEANINGS, amount, duration, label
from pacorl.report.folder import Record, RunFolder, Sample, number, numbers

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
    def sure(self) -> bool:
        """Whether the difference's interval lies on one side of 0; without an interval nothing is sure."""
        low, high = (self.difference.low, self.difference.high) if self.difference else (None, None)
        return low is not None and high is not None and (low > 0 or high < 0)


def results(summary: Record) -> list[Result]:
    """Every metric that the summary has before or after, known ones first."""
    before, after, difference = (
        {name: interval for name, entry in section(summary, key).items() if (interval := _interval(entry))}
        for key in ("before", "after", "difference")
    )
    measured = [*before, *after]
    names = dict.fromkeys([name for name in MEANINGS if name in measured] + measured)
    return [Result(name, before.get(name), after.get(name), difference.get(name)) for name in names]


def _interval(entry: object) -> Interval | None:
    ends = entry if isinstance(entry, Mapping) else {"mean": entry}
    mean = number(ends.get("mean"))
    return None if mean is None else Interval(mean, number(ends.get("low")), number(ends.get("high")))


def compared(samples: Mapping[int, Sequence[Sample]]) -> list[Result]:
    """Every score of the first evaluation beside the newest one's, from the images that both made.

    It is what a run shows of itself before it has a summary; empty after one evaluation only.
    """
    if len(samples) < 2:
        return []
    first, last = ({sample.key: _scores(sample) for sample in samples[epoch]} for epoch in (min(samples), max(samples)))
    keys = sorted(first.keys() & last.keys())
    names = dict.fromkeys(name for key in keys for name in first[key] if name in last[key])
    rows: list[Result] = []
    for name in names:
        both = [key for key in keys if name in first[key] and name in last[key]]
        before, after = (np.array([side[key][name] for key in both]) for side in (first, last))
        rows.append(Result(name, *_bootstrapped([prompt for prompt, _ in both], before, after)))
    return rows


def _scores(sample: Sample) -> dict[str, float]:
    return {**sample.measures, **{f"{HELD_OUT}{name}": value for name, value in sample.held_out.items()}}


def _bootstrapped(prompts: Sequence[int], before: NDArray[np.float64], after: NDArray[np.float64]) -> list[Interval]:
    """Of both sides and their difference; prompts are drawn, because seeds of one prompt do not vary by themselves."""

    def means(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.array([before[rows].mean(), after[rows].mean(), (after - before)[rows].mean()])

    return bootstrap(prompts, means, draws=DRAWS)


def seconds(run: RunFolder) -> dict[str, float]:
    """Phase → seconds: the summary's, else added up over the lines of the log."""
    spent = numbers(section(run.summary, "seconds"))
    if not any(spent.values()):
        phases = [(name, run.epochs) for name in PHASES] + [("evaluation", run.evaluations)]
        spent = {name: sum(number(line.get(f"seconds/{name}")) or 0.0 for line in lines) for name, lines in phases}
    return {name: total for name, total in spent.items() if total}  # a bar of no width has no place in the legend


def facts(run: RunFolder, *, images: int) -> list[tuple[str, str]]:
    """(value, what it is) of the few numbers worth a glance."""
    judge = section(run.summary, "judge")
    rows = []
    for name, accuracy in numbers(judge).items():
        if name.endswith("_accuracy"):
            # `pair_accuracy` stands beside the `pairs` that it was measured on, and so on.
            count = number(judge.get(name.removesuffix("_accuracy") + "s"))
            rows.append((amount(accuracy), f"judge’s {label(name).lower()}" + (f", of {count:.0f}" if count else "")))
    epochs = len(run.epochs)
    # The config as it stands says how far the run is to go: with --resume that may be farther than it was.
    planned = re.search(r"^epochs: (\d+)$", run.config, re.MULTILINE)
    if planned and epochs < int(planned[1]):
        rows.append((f"{epochs}", f"of {int(planned[1])} epochs"))
    elif epochs:
        rows.append((f"{epochs}", "epoch" if epochs == 1 else "epochs"))
    if images:
        rows.append((f"{images}", "evaluation image" if images == 1 else "evaluation images"))
    total = sum(seconds(run).values())
    return rows + ([(duration(total), "in all")] if total else [])


def provenance(summary: Record) -> list[tuple[str, str]]:
    """Seed, config hash and versions."""
    origin = [(label(key), str(summary[key])) for key in ("seed", "config_hash") if key in summary]
    return origin + [(str(name), str(version)) for name, version in section(summary, "versions").items()]


def section(summary: Record, key: str) -> Mapping[str, Any]:
    """A section of the summary, empty if it is not there (or null)."""
    entries = summary.get(key) or {}
    if not isinstance(entries, Mapping):
        raise ValueError(f"summary.json: {key!r} should be an object, it is a {type(entries).__name__}")
    return entries


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
    epochs_of: dict[tuple[str, str], list[int]] = {}
    for where, records in (("training images", run.epochs), ("evaluation", run.evaluations)):
        for record in records:
            for key in record:
                if key.startswith(ALARM) and record[key]:
                    epochs_of.setdefault((where, key.removeprefix(ALARM)), []).append(int(record["epoch"]))
    raised = [
        RaisedAlarm(
            name=label(sign.removeprefix(HELD_OUT)) + (", held out" if sign.startswith(HELD_OUT) else ""),
            meaning=sign_meaning(sign),
            where=where,
            first=epochs[0],
            last=epochs[-1],
            times=len(epochs),
        )
        for (where, sign), epochs in epochs_of.items()
    ]
    return sorted(raised, key=lambda alarm: alarm.first)


def is_monitored(run: RunFolder) -> bool:
    """Whether the run measured any sign at all."""
    return any(key.startswith((MONITOR, HELD_OUT)) for record in [*run.epochs, *run.evaluations] for key in record)
