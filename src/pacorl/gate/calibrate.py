"""Fitting of a judge's calibration: Platt's curve on labelled pairs, and its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacorl.core.batches import in_batches
from pacorl.core.calibration import Curve, Floats, calibration_error
from pacorl.core.ranking import Interval, bootstrap
from pacorl.io.images import open_image
from pacorl.io.terminal import Progress, silent
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import ask
from pacorl.records.comparisons import group_of
from pacorl.types import Comparison, Question

CHUNK = 256
"""Comparisons whose images are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Answers:
    """A judge's answers to labelled comparisons."""

    p_N: Floats
    """P(Yes)."""
    yes_N: NDArray[np.bool_]
    """Labels."""
    groups: tuple[str, ...]
    """Comparisons of one group share images."""

    def errors(self, curve: Curve) -> list[Interval]:
        """Compute the expected calibration error before and after a curve, with bootstrap intervals over groups."""
        versions = (self.p_N, curve.of(self.p_N))
        return bootstrap(
            self.groups,
            lambda index_N: np.array([calibration_error(p_N[index_N], self.yes_N[index_N]) for p_N in versions]),
        )


def ask_comparisons(judge: Judge, comparisons: Sequence[Comparison], *, progress: Progress = silent) -> Answers:
    """Ask a judge about labelled comparisons. Raises RuntimeError for a missing answer, with its reason."""
    p_yes: list[float] = []
    # In chunks: the images of a whole data set would not fit into memory.
    for chunk in in_batches(comparisons, CHUNK):
        progress(len(p_yes), len(comparisons))
        questions = {}
        for number, comparison in enumerate(chunk):
            images = tuple(open_image(path) for path in comparison.images)
            questions[number] = Question(images, comparison.question)
        for verdict in ask(judge, questions).values():
            if verdict.p_yes is None:
                raise RuntimeError(f"the judge gave no answer: {verdict.error}")
            p_yes.append(verdict.p_yes)
    labels = np.array([comparison.consistent for comparison in comparisons], dtype=bool)
    return Answers(np.array(p_yes), labels, tuple(map(group_of, comparisons)))


def calibration_lines(answers: Answers, curve: Curve, held_out: Answers | None) -> list[str]:
    """Say in lines what a curve does to the error of the pairs that it was fit on, and of held-out pairs."""
    lines = [
        f"{len(answers.p_N)} pairs, {int(answers.yes_N.sum())} labelled Yes",
        f"temperature {curve.temperature:.3f}, bias {curve.bias:+.3f}",
    ]
    samples = [("of these pairs, which the curve has seen", answers)]
    if held_out:
        samples.append((f"held out, {len(held_out.p_N)} pairs", held_out))
    for kind, of_part in samples:
        before, after = of_part.errors(curve)
        lines.append(f"ECE, {kind}: {_interval(before)} before, {_interval(after)} after")
    return lines


def _interval(interval: Interval) -> str:
    if interval.low is None:
        return f"{interval.mean:.4f}"
    return f"{interval.mean:.4f} ({interval.low:.4f} to {interval.high:.4f})"
