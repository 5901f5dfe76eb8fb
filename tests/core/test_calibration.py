from __future__ import annotations

import numpy as np
import pytest

from pacorl.core.calibration import Curve, calibration_error, fit_curve


def test_the_fit_recovers_the_curve_that_drew_the_labels() -> None:
    random = np.random.default_rng(0)
    p_N = 1 / (1 + np.exp(-random.normal(0, 6, 20_000)))
    truth = Curve(temperature=4, bias=0.7)
    yes_N = random.random(len(p_N)) < truth.of(p_N)
    fitted = fit_curve(p_N, yes_N)
    assert fitted.temperature == pytest.approx(4, rel=0.05)
    assert fitted.bias == pytest.approx(0.7, abs=0.05)
    assert calibration_error(fitted.of(p_N), yes_N) < 0.02 < calibration_error(p_N, yes_N)


def test_a_judge_without_an_error_keeps_a_finite_temperature() -> None:
    curve = fit_curve(np.array([0.0, 1.0, 1.0, 1.0]), np.array([False, True, True, True]))
    assert 0 < curve.temperature < np.inf
    assert [curve(1.0), curve(0.0)] == pytest.approx([4 / 5, 1 / 3], abs=1e-3), "Platt's targets of three and of one"


def test_answers_that_fall_with_the_labels_are_refused() -> None:
    with pytest.raises(ValueError, match="no higher for pairs labelled Yes"):
        fit_curve(np.array([0.1, 0.2, 0.8, 0.9]), np.array([True, True, False, False]))
    with pytest.raises(ValueError, match="pairs of both labels, there are 2 Yes and 0 No"):
        fit_curve(np.array([0.1, 0.2]), np.array([True, True]))


def test_the_error_is_the_weighted_distance_of_the_bins() -> None:
    p_N = np.array([0.91, 0.93, 0.95, 0.11])
    yes_N = np.array([True, True, False, False])
    assert calibration_error(p_N, yes_N) == pytest.approx((3 * (0.93 - 2 / 3) + 0.11) / 4)
