"""What the watch on reward hacking said during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pacorl.report.curves import ALARM, HELD_OUT, SIGN
from pacorl.report.folder import Record, RunFolder
from pacorl.report.words import label

MEANINGS = {
    "duplicates": "panels of a sheet are becoming copies of each other",
    "blank": "panels are becoming empty",
    "lattice": "a fine regular pattern covers the pictures",
    "diversity": "different prompts get the same picture",
}
FALLING = "a measure that is not rewarded falls while the rewarded ones are trained"


@dataclass(frozen=True, slots=True)
class Alarm:
    """One sign that went beyond its limit."""

    name: str
    meaning: str
    where: str
    first: int
    """The epoch after which it was raised first."""
    last: int
    times: int


def alarms(run: RunFolder) -> list[Alarm]:
    """Every sign that was alarming, earliest first; training pictures and evaluations apart."""
    found = [*_alarms(run.epochs, "training pictures"), *_alarms(run.evaluations, "evaluation")]
    return sorted(found, key=lambda alarm: alarm.first)


def is_watched(run: RunFolder) -> bool:
    """Whether the run measured any sign at all."""
    return any(key.startswith((SIGN, HELD_OUT)) for record in [*run.epochs, *run.evaluations] for key in record)


def _alarms(records: Sequence[Record], where: str) -> list[Alarm]:
    raised: dict[str, list[int]] = {}
    for record in records:
        for key in record:
            if key.startswith(ALARM) and record[key]:
                raised.setdefault(key.removeprefix(ALARM), []).append(int(record["epoch"]))
    return [
        Alarm(
            name=label(sign.removeprefix(HELD_OUT)) + (", held out" if sign.startswith(HELD_OUT) else ""),
            meaning=MEANINGS.get(sign, FALLING),
            where=where,
            first=epochs[0],
            last=epochs[-1],
            times=len(epochs),
        )
        for sign, epochs in raised.items()
    ]
