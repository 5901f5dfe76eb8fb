"""Fitting of a judge's calibration: Platt's curve on labelled pairs, and its error."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pacorl.core.batches import in_batches
from pacorl.core.calibration import Curve, Floats, calibration_error
from pacorl.io.images import open_image
from pacorl.io.terminal import Progress, silent
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import ask
from pacorl.records.leaks import pairs_trained_on
from pacorl.types import Comparison, Question

logger = logging.getLogger(__name__)
CHUNK = 256
"""Comparisons whose images are in memory at a time."""

FEWEST_FOR_BINS = 200
"""Pairs below which the bins of the error hold too few for a conclusion."""

Answers = tuple[Floats, NDArray[np.bool_]]
"""P(Yes) of comparisons, and their labels."""


def check_unseen(judge: str, pairs: Sequence[Comparison]) -> None:
    """Raise ValueError for pairs that the judge was trained on."""
    try:
        learned = pairs_trained_on(pairs, judge)
    except ValueError as fault:
        # The data may have moved since the training, and the judge is still of use.
        logger.warning("%s", fault)
        return
    if learned:
        raise ValueError(
            f"{len(learned)} of {len(pairs)} pairs are among the judge's training data, such as "
            f"{learned[0].images[0].name}'s, and it is surer of them than of others; give pairs that it was not "
            "trained on, such as the consistency_test.jsonl of an export"
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
    return np.array(p_yes), np.array([comparison.consistent for comparison in comparisons], dtype=bool)


def error_line(answers: Answers, curve: Curve) -> str:
    """Describe a curve's effect on the expected calibration error of its pairs, and whether they are too few."""
    p_N, yes_N = answers
    before, after = calibration_error(p_N, yes_N), calibration_error(curve.of(p_N), yes_N)
    line = f"ECE of these pairs: {before:.4f} before, {after:.4f} after"
    if len(p_N) < FEWEST_FOR_BINS:
        line += f"; fewer than {FEWEST_FOR_BINS} pairs are too few for a conclusion"
    return line
