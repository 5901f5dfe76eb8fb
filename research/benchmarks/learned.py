"""When a run has learned, and whether two forms differ: the statistics of `learning.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t as student
from sklearn.isotonic import IsotonicRegression

DRAWS = 4000


def crossing(spent: Sequence[float], grades: Sequence[float], rise: float) -> float | None:
    """Find what was spent when the grade had risen by `rise`, on a monotone fit through the evaluations.

    The first evaluation is of the untrained generator, and the others rise from it.

    Returns:
        In the unit of `spent`, between evaluations by a straight line. None for a run that did not get there: it is
        censored at its budget.
    """
    fitted = IsotonicRegression().fit_transform(np.arange(len(grades)), np.asarray(grades, dtype=float))
    risen = fitted - grades[0]
    reached = np.flatnonzero(risen >= rise)
    if not len(reached):
        return None

    last = int(reached[0])
    if last == 0:
        return float(spent[0])
    share = (rise - risen[last - 1]) / (risen[last] - risen[last - 1])
    return float(spent[last - 1] + share * (spent[last] - spent[last - 1]))


def pooled_ratio(form: Mapping[int, float], base: Mapping[int, float], *, seed: int = 0) -> dict[str, float]:
    """Divide what a form spends over all seeds by what the base spends; seeds are drawn again for the interval.

    Args:
        form: seed → spent until it had learned, or the budget of a run that had not.
        base: The same, of the form that it is compared with.
        seed: Of the draws.

    Returns:
        Ratio with its 95 % bootstrap interval.
    """
    seeds = sorted(set(form) & set(base))
    spent = np.array([[form[each], base[each]] for each in seeds])
    rows = np.random.default_rng(seed).integers(len(seeds), size=(DRAWS, len(seeds)))
    drawn: NDArray[np.float64] = spent[rows].sum(1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], [0.025, 0.975])
    total = spent.sum(0)
    return {"ratio": float(total[0] / total[1]), "low": float(low), "high": float(high)}


def detectable(form: Mapping[int, float], base: Mapping[int, float], seeds: int = 0) -> float | None:
    """Estimate the largest ratio below 1 that paired seeds would tell from 1 in four of five trials.

    It is by a paired t test of logarithms at the 5 % level, with the spread between the seeds that are given. None for
    fewer than two.

    Args:
        form: seed → spent.
        base: The same, of the form that it is compared with.
        seeds: Number of seeds of the trials; 0 for as many as are given.
    """
    pairs = sorted(set(form) & set(base))
    seeds = seeds or len(pairs)
    if len(pairs) < 2:
        return None
    logarithms = [math.log(form[each] / base[each]) for each in pairs]
    spread = float(np.std(logarithms, ddof=1))
    quantiles = student.ppf(0.975, seeds - 1) + student.ppf(0.8, seeds - 1)
    return math.exp(-quantiles * spread / math.sqrt(seeds))
