"""The numbers of a run's summary: its table of metrics before and after, its facts, where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from pacorl.report.bars import Interval, interval_svg, unit_axis
from pacorl.report.folder import Record, number
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


def facts(summary: Record, *, epochs: int, sheets: int) -> list[tuple[str, str]]:
    """(value, what it is) of the few numbers worth a glance."""
    spent = sum(seconds(summary).values())
    judge = {name: value for name, held in part(summary, "judge").items() if (value := number(held)) is not None}
    found = [(amount(value), f"judge’s {label(name).lower()}") for name, value in judge.items()]
    found += [(f"{epochs}", "epoch" if epochs == 1 else "epochs")] if epochs else []
    found += [(f"{sheets}", "evaluation sheet" if sheets == 1 else "evaluation sheets")] if sheets else []
    return found + ([(duration(spent), "in all")] if spent else [])


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
