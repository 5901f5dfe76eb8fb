"""How far people agree: Kendall's W and Krippendorff's α.

M people, N items. A ranking is given by the rank of each item, 1 for the best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pacorl.dataset.records import Answer


def kendall_w(rank_MN: Sequence[Sequence[float]]) -> float:
    """Coefficient of concordance of M people who ranked the same N items without ties: 0 for none, 1 for full.

    W = 12·S / (M²(N³ − N)), S the sum of squared deviations of the items' rank sums (Kendall & Babington Smith
    1939).

    Raises:
        ValueError: for fewer than two people or items.
    """
    rank = np.asarray(rank_MN, dtype=float)
    if rank.ndim != 2 or min(rank.shape) < 2:
        raise ValueError(f"Kendall's W needs at least two people and two items, got {rank.shape}")
    people, items = rank.shape
    sums = rank.sum(0)
    return float(12 * ((sums - sums.mean()) ** 2).sum() / (people**2 * (items**3 - items)))


def krippendorff_alpha(units: Sequence[Sequence[int]]) -> float | None:
    """Ordinal α: 1 for perfect agreement, 0 for chance, below 0 for systematic disagreement.

    Args:
        units: for each item that was judged, the ordinal values that it was given (Krippendorff, Computing
            Krippendorff's Alpha-Reliability, 2011). Items with one value say nothing and are left out.

    Returns:
        None if no item remains, or all values are the same.
    """
    compared = [unit for unit in units if len(unit) > 1]
    values = sorted({value for unit in compared for value in unit})
    if len(values) < 2:
        return None
    coincidence = _coincidences(compared, values)
    totals = coincidence.sum(1)  # n_c: how often each value was given, in units that can be compared
    distance = _ordinal_distance(totals)
    expected = np.outer(totals, totals) - np.diag(totals)
    observed_part, expected_part = (coincidence * distance).sum(), (expected * distance).sum() / (totals.sum() - 1)
    return float(1 - observed_part / expected_part)


def _coincidences(units: Sequence[Sequence[int]], values: Sequence[int]) -> NDArray[np.float64]:
    """How often two values met in a unit, each unit weighing as many as it has values."""
    index_of = {value: index for index, value in enumerate(values)}
    table = np.zeros((len(values), len(values)))
    for unit in units:
        counts = np.bincount([index_of[value] for value in unit], minlength=len(values)).astype(float)
        table += (np.outer(counts, counts) - np.diag(counts)) / (len(unit) - 1)
    return table


def _ordinal_distance(totals: NDArray[np.float64]) -> NDArray[np.float64]:
    """δ²(c, k) = (Σ_{g=c..k} n_g − (n_c + n_k)/2)²"""
    below = np.concatenate([[0], totals.cumsum()])
    index = np.arange(len(totals))
    low, high = np.minimum.outer(index, index), np.maximum.outer(index, index)
    between = below[high + 1] - below[low]
    distance = (between - (totals[low] + totals[high]) / 2) ** 2
    return np.where(low == high, 0.0, distance)


def agreement(answers: Sequence[Answer]) -> dict[str, float | int | None]:
    """Over the instances that several people ranked: mean W, ordinal α over (instance, candidate), and how many."""
    shared: dict[str, list[Answer]] = {}
    for answer in answers:
        shared.setdefault(answer.instance, []).append(answer)
    groups = [group for group in shared.values() if len(group) > 1]
    ranks = [_ranks(group) for group in groups]
    units = [[int(rank[name]) for rank in table] for table in ranks for name in table[0]]
    concordance = [kendall_w([list(rank.values()) for rank in table]) for table in ranks]
    return {
        "instances": len(groups),
        "kendall_w": float(np.mean(concordance)) if concordance else None,
        "krippendorff_alpha": krippendorff_alpha(units),
    }


def _ranks(group: Sequence[Answer]) -> list[Mapping[str, int]]:
    """Each person's rank of each candidate, candidates in one order."""
    names = sorted(group[0].candidates)
    return [{name: answer.candidates.index(name) + 1 for name in names} for answer in group]
