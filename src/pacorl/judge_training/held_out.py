"""Held-out pairs of a judge's training: its answers before and after, and their paired comparison.

`held_out/before.json` and `held_out/after.json` in the run's folder have P(Yes) of each pair; before.json is of step 0,
after.json of the newest evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pacorl.core.ranking import Interval, bootstrap, difference
from pacorl.io.documents import JsonObject, read_object, write_json
from pacorl.io.files import kept_digest, text_digest
from pacorl.judge_training.examples import ComparisonDataset, in_both_orders
from pacorl.judge_training.loop import METRICS, decision_metrics, processes
from pacorl.records.comparisons import group_of
from pacorl.types import Comparison

BEFORE, AFTER = SIDES = ("before", "after")
DRAWS = 1000
ACCURACY, AUC = "decision_accuracy", "auc"


class HeldOut:
    """Evaluation pairs of a run, and the judge's answers to them."""

    def __init__(self, comparisons: Sequence[Comparison], folder: Path) -> None:
        self.comparisons = comparisons
        self.folder = folder
        self.rows: ComparisonDataset = in_both_orders(comparisons)
        """Evaluation set."""
        self.labels = [comparison.consistent for comparison in comparisons]
        self.groups = [group_of(comparison) for comparison in comparisons]

    @cached_property
    def digest(self) -> str:
        """Digest of the questions, labels, groups and images."""
        content = []
        for pair in self.comparisons:
            images = [kept_digest(path) for path in pair.images]
            content.append([images, pair.question, pair.consistent, pair.group])
        return text_digest(json.dumps(content))[:16]

    def measure(self, p_yes: Mapping[int, float], step: int) -> dict[str, float]:
        """Compute the metrics of an evaluation from P(Yes) by row of `rows`, and write the answers."""
        swapped: list[float | None] = [None] * len(self.comparisons)
        # The rows of exchanged images follow all others, in the same order.
        pairs = [index for index, comparison in enumerate(self.comparisons) if len(comparison.images) == 2]
        for row, index in enumerate(pairs, start=len(self.comparisons)):
            swapped[index] = p_yes[row]
        straight = [p_yes[row] for row in range(len(self.comparisons))]

        if processes().is_main_process:
            side = AFTER if step else BEFORE
            write_json(
                self.folder / f"{side}.json",
                {"step": step, "pairs": self.digest, "p_yes": straight, "swapped": swapped},
            )
        categories = [comparison.category for comparison in self.comparisons]
        return decision_metrics(straight, self.labels, swapped=swapped, category=categories)

    def summary(self, first: Mapping[str, Any], last: Mapping[str, Any]) -> JsonObject:
        """Summarise the evaluations before and after training.

        Args:
            first, last: lines of the log, for the figures without intervals.

        Returns:
            Counts and digest of the pairs, `before`, `after` and `difference` by metric, and the measured in words.
        """
        tables: dict[str, dict[str, Any]] = {BEFORE: {}, AFTER: {}, "difference": {}}
        intervals: dict[str, dict[str, Interval]] = {}
        for side, line in zip(SIDES, (first, last), strict=True):
            intervals[side] = self._intervals(side)
            # A resumed run may have begun on other pairs, whose figures do not belong beside these.
            if intervals[side]:
                tables[side] = {name: value for name, value in line.items() if name.partition("/")[0] in METRICS}
                tables[side] |= _plain(intervals[side])
        changes = {}
        for name, after in intervals[AFTER].items():
            if name in intervals[BEFORE]:
                changes[name] = difference(intervals[BEFORE][name], after)
        tables["difference"] = _plain(changes)

        commoner = max(self.labels.count(label) for label in (True, False)) / len(self.labels)
        return {
            "held_out_pairs": len(self.labels),
            "held_out_groups": len(set(self.groups)),
            "held_out_digest": self.digest,
            "commoner_label": commoner,
            **tables,
            "verdict": self._verdict(intervals[AFTER], changes, commoner),
        }

    def _intervals(self, side: str) -> dict[str, Interval]:
        """Bootstrap every metric of one side over groups; empty if its answers are absent or of other pairs."""
        path = self.folder / f"{side}.json"
        answers = read_object(path) if path.is_file() else {}
        if answers.get("pairs") != self.digest:
            return {}
        p_N = np.array(answers["p_yes"], dtype=float)
        swapped_N = np.array(answers["swapped"], dtype=float)
        y_N = np.array(self.labels)
        names = list(self._metrics(p_N, swapped_N, y_N))
        # The same groups are drawn on both sides, so that the difference is paired.
        intervals = bootstrap(
            self.groups,
            lambda rows: np.array([*self._metrics(p_N[rows], swapped_N[rows], y_N[rows]).values()]),
            draws=DRAWS,
        )
        return dict(zip(names, intervals, strict=True))

    @staticmethod
    def _metrics(p_N: Any, swapped_N: Any, y_N: Any) -> dict[str, float]:
        return decision_metrics(p_N, y_N, swapped=swapped_N, category=[""])

    def _verdict(self, after: Mapping[str, Interval], changes: Mapping[str, Interval], commoner: float) -> list[str]:
        """State what was measured, and the paired difference."""
        unit = "prompts" if any(comparison.group for comparison in self.comparisons) else "first images"
        line = f"{len(self.labels)} held-out pairs of {len(set(self.groups))} {unit}"
        if ACCURACY in after:
            line += f"; accuracy {after[ACCURACY].mean:.3f}, of always answering the commoner label {commoner:.3f}"
        if not changes:
            return [f"{line}. There are no answers before training to these pairs."]
        # AUC needs no threshold, but both labels.
        name, words = (AUC, "AUC") if not np.isnan(changes[AUC].mean) else (ACCURACY, "accuracy")
        change = changes[name]
        ends = (
            f" ({change.low:+.3f} to {change.high:+.3f})" if change.low is not None and change.high is not None else ""
        )
        return [f"{line}.", f"{words} {change.mean:+.3f}{ends} from before training, on the same pairs."]


def _plain(intervals: Mapping[str, Interval]) -> JsonObject:
    """Convert to JSON, which has no NaN."""
    plain: JsonObject = {}
    for name, interval in intervals.items():
        if not np.isnan(interval.mean):
            plain[name] = interval.document()
    return plain
