"""The learning rate by hand-worked numbers."""

import pytest

from pacorl.core.schedule import learning_rate


def test_a_constant_rate_after_a_rise() -> None:
    rates = [learning_rate(step, peak=1.0, schedule="constant", warmup=4, total=10) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_half_cosine() -> None:
    rates = [learning_rate(step, peak=2.0, schedule="cosine", warmup=2, total=6) for step in (0, 1, 2, 4, 6, 9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0, 0.0])


def test_no_rise_no_fall() -> None:
    assert learning_rate(0, peak=3e-4, schedule="constant", warmup=0, total=1) == 3e-4
