"""Fitting of a judge's calibration: Platt's curve on labelled pairs, and its error."""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pacorl.core.batches import in_batches
from pacorl.core.calibration import Floats, calibration_error, fit_curve
from pacorl.io.images import open_image
from pacorl.io.terminal import Progress, silent
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import ask
from pacorl.records.leaks import pairs_trained_on
from pacorl.types import Comparison, Question

logger = logging.getLogger(__name__)
CHUNK = 256
"""Comparisons whose images are in memory at a time."""

FEWEST = 50
"""Pairs of each label at least: a curve of a dozen pairs may call almost anything Yes."""

Answers = tuple[Floats, NDArray[np.bool_]]
"""P(Yes) of comparisons, and their labels."""


def check_pairs(judge: str, pairs: Sequence[Comparison]) -> None:
    """Raise ValueError for too few pairs, and for pairs that the judge was trained on."""
    try:
        learned = pairs_trained_on(pairs, judge)
    except ValueError as fault:
        # The data may have moved since the training, and the judge is still of use.
        logger.warning("%s", fault)
        learned = []
    if learned:
        raise ValueError(
            f"{len(learned)} of {len(pairs)} pairs are among the judge's training data, such as "
            f"{learned[0].images[0].name}'s, and it is surer of them than of others; give pairs that it was not "
            "trained on, such as the consistency_test.jsonl of an export"
        )
    positives = sum(pair.consistent for pair in pairs)
    negatives = len(pairs) - positives
    if min(positives, negatives) < FEWEST:
        raise ValueError(
            f"{positives} pairs are labelled Yes and {negatives} No, too few for a curve; give {FEWEST} of each or "
            "more, 200 in all are better"
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


def held_out_line(answers: Answers) -> str:
    """Describe a curve's effect on pairs that it was not fitted to: each half of the pairs has the other half's curve.

    Raises:
        ValueError: if the curve does not lower their expected calibration error.
    """
    p_N, yes_N = answers
    # Both halves have equal shares of each label.
    by_label_N = np.argsort(yes_N, kind="stable")
    even_N, odd_N = by_label_N[::2], by_label_N[1::2]
    after_N = np.empty_like(p_N)
    for fitted_N, held_out_N in ((even_N, odd_N), (odd_N, even_N)):
        curve = fit_curve(p_N[fitted_N], yes_N[fitted_N])
        after_N[held_out_N] = curve.of(p_N[held_out_N])
    before, after = calibration_error(p_N, yes_N), calibration_error(after_N, yes_N)
    if after >= before:
        raise ValueError(
            f"a curve of half of the pairs does not lower the other half's ECE ({before:.4f} before, {after:.4f} "
            "after); take the judge as it is, or give more pairs"
        )
    return f"ECE of held-out pairs: {before:.4f} before, {after:.4f} after"
