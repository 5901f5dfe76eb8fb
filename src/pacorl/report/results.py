"""The numbers of a run's summary: its table of metrics before and after, its facts, where it came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from pacorl.core.ranking import bootstrap
from pacorl.report.bars import Interval, interval_svg, unit_axis
from pacorl.report.folder import Record, RunFolder, Sample, number
from pacorl.report.words import MEANINGS, amount, duration, label


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
    held = [*before, *after]
    names = dict.fromkeys([name for name in MEANINGS if name in held] + held)
    return [Result(name, before.get(name), after.get(name), difference.get(name)) for name in names]


DRAWS = 1000

PHASES = ("rollout", "reward", "update")
"""What an epoch's line times, one after another; further times in it lie within these."""


def compared(samples: Mapping[int, Sequence[Sample]]) -> list[Result]:
    """Every score of the first evaluation beside the newest one's, from the sheets that both painted.

    What a run shows of itself before it has a summary. None where there was one evaluation only.
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
    known = [key for key in keys if name in _scores(first[key]) and name in _scores(last[key])]
    before, after = (np.array([_scores(side[key])[name] for key in known]) for side in (first, last))

    def means(places: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.array([before[places].mean(), after[places].mean(), (after - before)[places].mean()])

    found = bootstrap([prompt for prompt, _ in known], means, draws=DRAWS)
    return Result(name, *(Interval(one.mean, one.low, one.high) for one in found))


def planned_epochs(config: str) -> int | None:
    """How many epochs a run's config.yaml asks for; None where it does not say."""
    found = re.search(r"^epochs: (\d+)$", config, re.MULTILINE)
    return int(found[1]) if found else None


def seconds_so_far(run: RunFolder) -> dict[str, float]:
    """Phase → seconds, added up over the lines of the log."""
    spent = {name: _total(run.epochs, f"seconds/{name}") for name in PHASES}
    spent["evaluation"] = _total(run.evaluations, "seconds/evaluation")
    return {name: value for name, value in spent.items() if value}


def _total(records: Sequence[Record], key: str) -> float:
    return sum(number(record.get(key)) or 0.0 for record in records)


def facts(
    summary: Record, *, epochs: int, sheets: int, spent: float, planned: int | None = None
) -> list[tuple[str, str]]:
    """(value, what it is) of the few numbers worth a glance."""
    found = _accuracies(part(summary, "judge"))
    running = planned is not None and epochs < planned
    found += [(f"{epochs}", f"of {planned} epochs")] if running else []
    found += [(f"{epochs}", "epoch" if epochs == 1 else "epochs")] if epochs and not running else []
    found += [(f"{sheets}", "evaluation sheet" if sheets == 1 else "evaluation sheets")] if sheets else []
    return found + ([(duration(spent), "in all")] if spent else [])


def _accuracies(judge: Mapping[str, object]) -> list[tuple[str, str]]:
    """`pair_accuracy` with the `pairs` that it was measured on, and so on."""
    found = []
    for name, held in judge.items():
        if (value := number(held)) is not None and name.endswith("_accuracy"):
            asked = number(judge.get(name.removesuffix("_accuracy") + "s"))
            found.append((amount(value), f"judge’s {label(name).lower()}" + (f", of {asked:.0f}" if asked else "")))
    return found


def seconds(summary: Record) -> dict[str, float]:
    """Phase → seconds, where any were spent."""
    spent = {str(name): number(value) for name, value in part(summary, "seconds").items()}
    return {name: value for name, value in spent.items() if value}


def provenance(summary: Record) -> list[tuple[str, str]]:
    """Seed, config hash and versions."""
    known = [(label(key), str(summary[key])) for key in ("seed", "config_hash") if key in summary]
    return known + [(str(name), str(version)) for name, version in part(summary, "versions").items()]


def part(summary: Record, key: str) -> Mapping[str, Any]:
    """A section of the summary, empty where it is not there (or null)."""
    found = summary.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"summary.json: {key!r} should be an object, it is a {type(found).__name__}")
    return found


def _intervals(summary: Record, key: str) -> dict[str, Interval]:
    return {name: interval for name, held in part(summary, key).items() if (interval := _interval(held))}


def _interval(held: object) -> Interval | None:
    ends = held if isinstance(held, Mapping) else {"mean": held}
    mean = number(ends.get("mean"))
    return None if mean is None else Interval(mean, number(ends.get("low")), number(ends.get("high")))
