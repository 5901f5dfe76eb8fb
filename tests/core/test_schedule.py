"""The learning rate by hand-worked numbers, and what seeds and windows an epoch draws."""

import pytest

from pacorl.core.schedule import NoiseWindow, learning_rate, seed_of


def test_seeds_tell_apart_what_reads_alike_in_a_row() -> None:
    """Epoch 1 of row 11, epoch 11 of row 1, and the text of a number."""
    assert len({seed_of(0, 1, 11), seed_of(0, 11, 1), seed_of(0, 111), seed_of(0, "1", 11)}) == 4


def test_a_constant_rate_after_a_rise() -> None:
    rates = [learning_rate(step, peak=1.0, schedule="constant", warmup=4, total=10) for step in range(6)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_half_cosine() -> None:
    rates = [learning_rate(step, peak=2.0, schedule="cosine", warmup=2, total=6) for step in (0, 1, 2, 4, 6, 9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0, 0.0])


def test_no_rise_no_fall() -> None:
    assert learning_rate(0, peak=3e-4, schedule="constant", warmup=0, total=1) == 3e-4


def test_a_fixed_window_stays() -> None:
    assert {NoiseWindow().at(epoch, (1, 3), seed=0) for epoch in range(5)} == {(1, 3)}


def test_a_random_window_draws_k_of_n_anew_each_epoch() -> None:
    window = NoiseWindow(kind="random", size=2)
    drawn = [window.at(epoch, (0, 1, 2, 5), seed=7) for epoch in range(200)]
    assert drawn == [window.at(epoch, (0, 1, 2, 5), seed=7) for epoch in range(200)]
    assert drawn != [window.at(epoch, (0, 1, 2, 5), seed=8) for epoch in range(200)]
    assert len(set(drawn)) == 6, "not every pair was drawn"
    assert all(first < second for first, second in drawn)


def test_a_window_slides_and_stays_at_the_end() -> None:
    window = NoiseWindow(kind="sliding", size=2)
    places = [window.at(epoch, (0, 1, 3, 4), seed=0) for epoch in range(5)]
    assert places == [(0, 1), (1, 3), (3, 4), (3, 4), (3, 4)]
