"""How well a judge decides: accuracy, AUC, calibration, and how much the order of the two images matters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Labels = NDArray[np.bool_]

CALIBRATION_BINS = 10


def decision_metrics(
    p_yes: Sequence[float], consistent: Sequence[bool], *, swapped: Sequence[float | None], category: Sequence[str]
) -> dict[str, float]:
    """Measures of one judge on N comparisons, and of each category as `NAME/CATEGORY` where there are several.

    `swapped` is P(Yes) with the images exchanged, None where there is one image. A measure that the data does not
    define (an AUC without a No, an order gap without pairs) is NaN.
    """
    p, y = np.asarray(p_yes, dtype=float), np.asarray(consistent, dtype=bool)
    other = np.array([np.nan if value is None else value for value in swapped], dtype=float)
    named = np.asarray(category)
    found = _measures(p, y, other)
    kinds = sorted(set(category))
    for kind in kinds if len(kinds) > 1 else []:
        part = named == kind
        found |= {f"{name}/{kind}": value for name, value in _measures(p[part], y[part], other[part]).items()}
    return found


def _measures(p: Values, y: Labels, other: Values) -> dict[str, float]:
    return {
        "decision_accuracy": float(((p > 0.5) == y).mean()),
        "auc": auc(p, y),
        "ece": calibration_error(p, y),
        "order_gap": order_gap(p, other),
    }


def auc(p_yes: Values, consistent: Labels) -> float:
    """The chance that a Yes is scored above a No, ties counted half; NaN where either is absent."""
    yes, no = int(consistent.sum()), int((~consistent).sum())
    if not yes or not no:
        return float("nan")
    _, place, count = np.unique(p_yes, return_inverse=True, return_counts=True)
    rank = np.cumsum(count) - (count - 1) / 2  # the mean rank of each value, from 1
    return float((rank[place][consistent].sum() - yes * (yes + 1) / 2) / (yes * no))


def calibration_error(p_yes: Values, consistent: Labels, *, bins: int = CALIBRATION_BINS) -> float:
    """Expected calibration error: |mean P(Yes) − share of Yes| over equal bins of P(Yes), weighted by their sizes."""
    bin_of = np.minimum((p_yes * bins).astype(int), bins - 1)
    gaps = [abs(float((p_yes[bin_of == one] - consistent[bin_of == one]).sum())) for one in range(bins)]
    return sum(gaps) / len(p_yes)


def order_gap(p_yes: Values, swapped: Values) -> float:
    """Mean |P(Yes | a, b) − P(Yes | b, a)|; NaN where no comparison has two images."""
    gaps = np.abs(p_yes - swapped)[~np.isnan(swapped)]
    return float(gaps.mean()) if len(gaps) else float("nan")
