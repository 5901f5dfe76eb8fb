"""Figures and verdicts of predictions, and means by arm, from the results of a claim."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pacorl.core.ranking import Floats, Indices, Interval, bootstrap
from research.claims.claim import Claim, Prediction, Result, Results

HOLDS = "**holds**"
FAILS = "**does not hold**"
UNDECIDED = "undecided"
NOT_RUN = "not run yet"

Judged = tuple[Prediction, Interval | None, int, str]
"""A prediction, its figure, the number of seeds and the verdict."""


def figure_of(prediction: Prediction, claim: Claim, results: Results) -> tuple[Interval | None, int]:
    """Compare the arms over their common seeds. Returns the figure, None without such seeds, and their count."""
    seeds = [seed for seed in claim.seeds if all((side, seed) in results for side in prediction.sides)]
    if not seeds:
        return None, 0
    # Paired by seed: both arms are drawn together.
    columns = []
    for side in prediction.sides:
        columns.append([results[side, seed].metrics[prediction.metric] for seed in seeds])
    values = np.array(columns)

    def compare(rows: Indices) -> Floats:
        first, *second = values[:, rows].mean(1)
        if prediction.figure == "mean":
            return np.array([first])
        return np.array([first / second[0] if prediction.figure == "ratio" else first - second[0]])

    return bootstrap(seeds, compare, fewest=2)[0], len(seeds)


def runs_of(arm: str, claim: Claim, results: Results) -> list[Result]:
    """List an arm's results in the order of the seeds."""
    return [results[arm, seed] for seed in claim.seeds if (arm, seed) in results]


def mean_of(values: Sequence[float]) -> Interval:
    """Average over seeds."""
    column = np.array(values)
    return bootstrap(range(len(values)), lambda rows: np.array([column[rows].mean()]), fewest=2)[0]


def verdict(prediction: Prediction, figure: Interval | None, count: int, seeds: int) -> str:
    """Apply the rule, once every seed has run."""
    if figure is None:
        return NOT_RUN
    if count < seeds or figure.low is None or figure.high is None:
        return UNDECIDED
    low, high = prediction.region
    if low <= figure.low and figure.high <= high:
        return HOLDS
    if figure.high < low or high < figure.low:
        return FAILS
    return UNDECIDED


def judged(claim: Claim, results: Results) -> list[Judged]:
    """List the predictions with their figures, numbers of seeds and verdicts."""
    rows = []
    for prediction in claim.predictions:
        figure, count = figure_of(prediction, claim, results)
        rows.append((prediction, figure, count, verdict(prediction, figure, count, len(claim.seeds))))
    return rows
