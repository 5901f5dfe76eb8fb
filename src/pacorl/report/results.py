"""Numbers of a page: metrics before and after, alarms, facts, provenance."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pacorl.core.metric_names import ALARM, HELD_OUT, MONITOR, PROMPT_SHARE, SECONDS, sign_meaning
from pacorl.core.ranking import Interval, bootstrap
from pacorl.report.figures import MEANINGS, PARTS, amount, duration, label
from pacorl.report.folder import Record, RunFolder, Sample, number, numbers

DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Result:
    """One metric of the table."""

    name: str
    before: Interval | None
    after: Interval | None
    difference: Interval | None
    """Paired: the same prompts and seeds on both sides."""
    starts: tuple[float | None, float | None] = (None, None)
    """Means before training, of two runs' sides."""
    unscored: int = 0
    """Images of both sides that lack this score on one of them."""

    @property
    def sure(self) -> bool:
        """Whether the difference has an interval, and 0 is outside of it."""
        if self.difference is None or self.difference.low is None or self.difference.high is None:
            return False
        return self.difference.low > 0 or self.difference.high < 0


def results(summary: Record) -> list[Result]:
    """Read every metric that the summary has before or after, in the order of MEANINGS and then the summary's."""
    before = _intervals(summary, "before")
    after = _intervals(summary, "after")
    difference = _intervals(summary, "difference")
    measured = [*before, *after]
    names = dict.fromkeys([name for name in MEANINGS if name in measured] + measured)
    return [Result(name, before.get(name), after.get(name), difference.get(name)) for name in names]


def rows_of(run: RunFolder) -> list[Result]:
    """The table of a run's page: the summary's results, else the comparison of its first and newest evaluation."""
    return results(run.summary) or compared(run.samples)


def paired_by(run: RunFolder) -> tuple[str, str]:
    """Return what both sides of a difference share, and the unit of its interval."""
    if "held_out_pairs" in run.summary:
        return "pairs", "groups of pairs (prompts)"
    return "prompts and seeds", "prompts"


def _intervals(summary: Record, key: str) -> dict[str, Interval]:
    """Read a section's entries, intervals or plain numbers; entries without a finite mean are left out."""
    intervals = {}
    for name, entry in section(summary, key).items():
        if not is_measure(name):
            continue
        ends = entry if isinstance(entry, Mapping) else {"mean": entry}
        mean = number(ends.get("mean"))
        if mean is not None:
            groups = number(ends.get("groups"))
            ends_known = (number(ends.get("low")), number(ends.get("high")))
            intervals[name] = Interval(mean, *ends_known, None if groups is None else int(groups))
    return intervals


def is_measure(name: str) -> bool:
    """Whether an entry of an evaluation is a measure, not its position or a time."""
    return name not in ("kind", "epoch", "step") and not name.startswith(SECONDS)


def compared(samples: Mapping[int, Sequence[Sample]]) -> list[Result]:
    """Compare every score of the first and the newest evaluation, over the images that both have.

    A run without a summary shows these; empty after one evaluation only.
    """
    if len(samples) < 2:
        return []
    # Scores by image, on both sides.
    first = {sample.key: _scores(sample) for sample in samples[min(samples)]}
    last = {sample.key: _scores(sample) for sample in samples[max(samples)]}

    # Score → the images with it on both sides.
    keys_of: dict[str, list[tuple[int, int]]] = {}
    shared = sorted(first.keys() & last.keys())
    for key in shared:
        for name in first[key]:
            if name in last[key]:
                keys_of.setdefault(name, []).append(key)

    # Paired: each row compares the same images.
    rows = []
    for name, keys in keys_of.items():
        before = np.array([first[key][name] for key in keys])
        after = np.array([last[key][name] for key in keys])
        first_side, last_side, difference = _bootstrapped([prompt for prompt, _ in keys], before, after)
        rows.append(Result(name, first_side, last_side, difference, unscored=len(shared) - len(keys)))
    return rows


def _scores(sample: Sample) -> dict[str, float]:
    return {**sample.measures, **{f"{HELD_OUT}{name}": value for name, value in sample.held_out.items()}}


def _bootstrapped(prompts: Sequence[int], before: NDArray[np.float64], after: NDArray[np.float64]) -> list[Interval]:
    """Bootstrap both sides and their difference over prompts, because seeds of one prompt are not independent."""

    sides = np.stack([before, after, after - before])

    def means(rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(sides[:, rows].mean(1))

    return bootstrap(prompts, means, draws=DRAWS)


def seconds(run: RunFolder) -> dict[str, float]:
    """Phase → seconds: the summary's, else the sums over the lines of the log; phases without time are left out.

    Empty if the log has times of evaluations alone.
    """
    spent = numbers(section(run.summary, "seconds"))
    if not any(spent.values()):
        for name in PARTS:
            lines = run.evaluations if name == "evaluation" else run.epochs
            spent[name] = sum(number(line.get(f"seconds/{name}")) or 0.0 for line in lines)
    # A judge's log has no times of its training, and its evaluations' are not all.
    if not any(spent.get(name) for name in spent if name != "evaluation"):
        return {}
    return {name: total for name, total in spent.items() if total}


def facts(run: RunFolder, *, images: int) -> list[tuple[str, str]]:
    """(value, description) of the few numbers worth a glance."""
    rows = []

    # The judge's accuracies; `pair_accuracy` was measured on `pairs` pairs, and so on.
    judge = section(run.summary, "judge")
    for name, accuracy in numbers(judge).items():
        if name.endswith("_accuracy"):
            count = number(judge.get(name.removesuffix("_accuracy") + "s"))
            measured_on = f", of {count:.0f}" if count else ""
            rows.append((amount(accuracy), f"judge’s {label(name).lower()}{measured_on}"))

    # Without a curve P(Yes) orders images, and is no share of them.
    judged = any(sample.p_yes for samples in run.samples.values() for sample in samples)
    if judged and re.search(r"^  calibration: ''$", run.config, re.MULTILINE):
        rows.append(("uncalibrated", "judge’s P(Yes)"))

    # Progress, as planned by the config of today: --resume may have extended the run.
    epochs = len(run.epochs)
    planned = re.search(r"^epochs: (\d+)$", run.config, re.MULTILINE)
    if planned and epochs < int(planned[1]):
        rows.append((f"{epochs}", f"of {int(planned[1])} epochs"))
    elif epochs:
        rows.append((f"{epochs}", "epoch" if epochs == 1 else "epochs"))
    if images:
        rows.append((f"{images}", "evaluation image" if images == 1 else "evaluation images"))

    # Time of all phases.
    total = sum(seconds(run).values())
    if total:
        rows.append((duration(total), "in all"))
    return rows


def provenance(summary: Record) -> list[tuple[str, str]]:
    """Seed, config hash and versions."""
    origin = []
    for key in ("seed", "config_hash"):
        if key in summary:
            origin.append((label(key), str(summary[key])))
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
    """A sign beyond its limit."""

    name: str
    meaning: str
    where: str
    first: int
    """The epoch after which it was raised first."""
    last: int
    times: int


def alarms(run: RunFolder) -> list[RaisedAlarm]:
    """List every alarming sign, earliest first; training images and evaluations apart."""
    epochs_of: dict[tuple[str, str], list[int]] = {}
    for where, records in (("training images", run.epochs), ("evaluation", run.evaluations)):
        for record in records:
            for key in record:
                if key.startswith(ALARM) and record[key]:
                    epochs_of.setdefault((where, key.removeprefix(ALARM)), []).append(int(record["epoch"]))

    # One row per sign, however often it was raised.
    raised = []
    for (where, sign), epochs in epochs_of.items():
        name = label(sign.removeprefix(HELD_OUT))
        if sign.startswith(HELD_OUT):
            name += ", held out"
        raised.append(RaisedAlarm(name, sign_meaning(sign), where, epochs[0], epochs[-1], len(epochs)))
    return sorted(raised, key=attrgetter("first"))


def draws_differ(run: RunFolder) -> bool:
    """Whether an epoch draws a part of the training prompts, so that epochs have different ones."""
    return any((number(line.get(PROMPT_SHARE)) or 1.0) < 1 for line in run.epochs)


def is_monitored(run: RunFolder) -> bool:
    """Whether the run measured any sign at all."""
    return any(key.startswith((MONITOR, HELD_OUT)) for key in chain(*run.epochs, *run.evaluations))
