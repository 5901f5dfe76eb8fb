"""Measures of a judge against scikit-learn and sums by hand."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from pacorl.train_judge.trainer import auc, calibration_error, decision_metrics, order_gap


def test_auc_is_scikit_learns_ties_included() -> None:
    rng = np.random.default_rng(0)
    for size in (5, 50, 500):
        p = rng.random(size).round(1)
        y = rng.random(size) < 0.4
        y[:2] = True, False
        assert auc(p, y) == pytest.approx(roc_auc_score(y, p), abs=1e-12)
    assert math.isnan(auc(np.array([0.1, 0.9]), np.array([True, True])))


def test_calibration_by_hand() -> None:
    p = np.array([0.05, 0.01, 0.95, 1.0, 0.55])
    y = np.array([False, True, True, True, False])
    # bins 0, 9 and 5: |.06 − 1|, |1.95 − 2|, |.55 − 0|
    assert calibration_error(p, y) == pytest.approx((0.94 + 0.05 + 0.55) / 5)
    rng = np.random.default_rng(1)
    spread = rng.random(200_000)
    assert calibration_error(spread, rng.random(200_000) < spread) < 0.005


def test_order_gap_passes_over_single_images() -> None:
    assert order_gap(np.array([0.2, 0.9, 0.4]), np.array([0.5, np.nan, 0.3])) == pytest.approx(0.2)
    assert math.isnan(order_gap(np.array([0.2]), np.array([np.nan])))


def test_categories_are_measured_apart() -> None:
    found = decision_metrics(
        [0.9, 0.2, 0.4, 0.6],
        [True, False, True, False],
        swapped=[0.8, 0.2, None, None],
        category=["hat", "hat", "x", "x"],
    )
    assert (found["decision_accuracy"], found["decision_accuracy/hat"], found["decision_accuracy/x"]) == (0.5, 1.0, 0.0)
    assert (found["auc/hat"], found["auc/x"], found["auc"]) == (1.0, 0.0, 0.75)
    assert found["order_gap"] == pytest.approx(0.05)
    assert math.isnan(found["order_gap/x"])
    alone = decision_metrics([0.9], [True], swapped=[None], category=["hat"])
    assert set(alone) == {"decision_accuracy", "auc", "ece", "order_gap"}
