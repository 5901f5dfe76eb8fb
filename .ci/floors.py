"""Checks what a quickstart reached against the least that it must reach: `floors.py runs/quickstart/summary.json`.

Prints a table and exits with 1 where a floor is missed. docs/quickstart.md has the metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Floor:
    """The least that a number made from a metric's means before and after may be."""

    metric: str
    measure: str
    of: Callable[[float, float], float]
    least: float


def rise(before: float, after: float) -> float:
    return after - before


def fall(before: float, after: float) -> float:
    return before - after


def ratio(before: float, after: float) -> float:
    return after / before if before else float("inf") if after else 1.0


FLOORS = (
    Floor("attribute_agreement", "rise", rise, 0.03),
    Floor("all_equal_pairs", "ratio", ratio, 1.05),
    Floor("prompt_match", "rise", rise, -0.04),
    Floor("valid", "rise", rise, -0.04),
    Floor("diversity", "ratio", ratio, 0.8),  # by plain consistency it is 0.62 (research.claims, curve)
    Floor("kappa", "rise", rise, 0.0),
    Floor("across", "fall", fall, -0.1),
)

# Differences of decimal fractions: .85 − .88 is not quite −.03.
ROUNDING = 1e-9


def main(path: Path) -> int:
    summary = json.loads(path.read_text(encoding="utf-8"))
    rows = [_row(floor, summary) for floor in FLOORS]
    print(f"{'metric':<22}{'before':>8}{'after':>8}  {'measure':<8}{'reached':>8}{'floor':>8}")
    for metric, before, after, measure, reached, least in rows:
        verdict = "ok" if _holds(reached, least) else "MISSED"
        print(f"{metric:<22}{before:>8}{after:>8}  {measure:<8}{reached:>8.3f}{least:>8.3f}  {verdict}")
    missed = [metric for metric, *_, reached, least in rows if not _holds(reached, least)]
    if missed:
        print(f"{path}: below the floor: {', '.join(missed)}", file=sys.stderr)
    return int(bool(missed))


def _row(floor: Floor, summary: dict[str, Any]) -> tuple[str, str, str, str, float, float]:
    values = [summary[when][floor.metric] for when in ("before", "after")]
    # A measure of all sets together, such as diversity, has no interval.
    before, after = (float(value["mean"] if isinstance(value, dict) else value) for value in values)
    return floor.metric, f"{before:.3f}", f"{after:.3f}", floor.measure, floor.of(before, after), floor.least


def _holds(reached: float, least: float) -> bool:
    return reached >= least - ROUNDING


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: floors.py SUMMARY.json")
    sys.exit(main(Path(sys.argv[1])))
