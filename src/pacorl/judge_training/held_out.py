"""Held-out pairs of a judge's training: its answers before and after, and their paired comparison.

`held_out/before.json` and `held_out/after.json` in the run's folder have P(Yes) of each pair; before.json is of step 0,
after.json of the newest evaluation.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np

from pacorl.core.ranking import Interval, bootstrap, difference, too_few
from pacorl.io.documents import JsonObject, read_object, write_json
from pacorl.io.files import kept_digest, text_digest
from pacorl.judge_training.examples import in_both_orders
from pacorl.judge_training.loop import decision_metrics, processes
from pacorl.records.images import copied_images
from pacorl.types import Comparison

BEFORE, AFTER = "before", "after"
DRAWS = 1000
ACCURACY = "decision_accuracy"
SHIFT = 0.1
"""Lack of accuracy beside the AUC that only a shifted P(Yes) explains."""
WORST = 6
"""Pairs that the page shows."""


class HeldOut:
    """Evaluation pairs of a run, and the judge's answers to them."""

    def __init__(self, comparisons: Sequence[Comparison], folder: Path) -> None:
        self.comparisons = comparisons
        self.folder = folder
        self.rows = in_both_orders(comparisons)
        """Evaluation set."""
        self.label_N = np.array([comparison.consistent for comparison in comparisons])
        # By default pairs of one first image are a group.
        self.groups = [comparison.group or str(comparison.images[0]) for comparison in comparisons]

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
        count = len(self.comparisons)
        # Rows with exchanged images come last, in the same order.
        straight = [p_yes[row] for row in range(count)]
        swapped = [p_yes[count + row] for row in range(count)]
        if processes().is_main_process:
            answers = {"step": step, "pairs": self.digest, "p_yes": straight, "swapped": swapped}
            write_json(self.folder / f"{AFTER if step else BEFORE}.json", answers)
        return decision_metrics(np.array(straight), self.label_N, swapped_N=np.array(swapped))

    def summary(self) -> JsonObject:
        """Summarise the answers before and after training, and copy the images of the worst pairs for the page.

        Returns:
            Counts and digest of the pairs, `before`, `after` and their paired `difference` by metric with intervals,
            `verdict`, the measured in words, and the `worst` pairs.
        """
        before = self._intervals(BEFORE)
        after = self._intervals(AFTER)
        changes = {name: difference(before[name], after[name]) for name in after if before}
        pairs, groups = len(self.groups), len(set(self.groups))
        few = too_few(pairs, groups)

        # Each figure with its difference and its yardstick.
        texts = {name: interval.text() for name, interval in after.items()}
        for name, change in changes.items():
            texts[name] += f", {change.text(signed=True)} from before"
        words = "not shown to be better than before training"
        gain = changes.get(ACCURACY)
        if gain and (gain.low or 0) > 0 and not few:
            words = f"better than before training by {gain.text(signed=True)} of accuracy"
        p_N = np.array(read_object(self.folder / f"{AFTER}.json")["p_yes"])
        says_yes, labelled_yes = (p_N > 0.5).mean(), self.label_N.mean()
        commoner = max(labelled_yes, 1 - labelled_yes)
        verdict = [
            f"The judge is {words}, on {pairs} pairs of {groups} prompts or first images that it was not trained on. "
            f"It says Yes to {says_yes:.0%} of them, and {labelled_yes:.0%} are labelled Yes.",
            f"Accuracy {texts[ACCURACY]}; the commoner label alone has {commoner:.3f}, and a good judge the share of "
            "pairs that two people order alike.",
        ]
        # Pairs of one label have no AUC.
        if not isnan(after["auc"].mean):
            verdict.append(f"AUC {texts['auc']}; chance has 0.5.")
            if after["auc"].mean > after[ACCURACY].mean + SHIFT:
                verdict[-1] += " It orders pairs better than it says Yes and No, which `pacorl calibrate` mends."
        if few:
            verdict.append(f"{few}.")

        # The pairs farthest from their labels.
        worst = []
        for index in np.argsort(-np.abs(p_N - self.label_N), kind="stable")[:WORST]:
            pair, p_yes = self.comparisons[index], float(p_N[index])
            images = copied_images(pair.images, self.folder / "worst")
            worst.append({"images": images, "question": pair.question, "consistent": pair.consistent, "p_yes": p_yes})
        return {
            "held_out_pairs": pairs,
            "held_out_digest": self.digest,
            BEFORE: _plain(before),
            AFTER: _plain(after),
            "difference": _plain(changes),
            "verdict": verdict,
            "worst": worst,
        }

    def _intervals(self, side: str) -> dict[str, Interval]:
        """Bootstrap every metric of one side over groups; empty if its answers are absent or of other pairs."""
        path = self.folder / f"{side}.json"
        answers = read_object(path) if path.is_file() else {}
        if answers.get("pairs") != self.digest:
            return {}
        p_N = np.array(answers["p_yes"])
        swapped_N = np.array(answers["swapped"])

        def metrics(rows: Any) -> dict[str, float]:
            return decision_metrics(p_N[rows], self.label_N[rows], swapped_N=swapped_N[rows])

        # The same groups are drawn on both sides, so that the difference is paired.
        intervals = bootstrap(self.groups, lambda rows: np.array([*metrics(rows).values()]), draws=DRAWS)
        return dict(zip(metrics(slice(None)), intervals, strict=True))


def _plain(intervals: Mapping[str, Interval]) -> JsonObject:
    """Convert to JSON, which has no NaN."""
    return {name: interval.document() for name, interval in intervals.items() if not np.isnan(interval.mean)}
