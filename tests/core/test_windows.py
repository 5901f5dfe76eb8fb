"""Noise windows: the same for all who ask with one seed, and where they should be."""

import pytest

from pacorl.core.windows import NoiseWindow, stage_size


def test_a_fixed_window_stays() -> None:
    assert {NoiseWindow().at(epoch, (1, 3), seed=0) for epoch in range(5)} == {(1, 3)}


def test_a_random_window_draws_k_of_n_anew_each_epoch() -> None:
    window = NoiseWindow(kind="random", size=2)
    drawn = [window.at(epoch, (0, 1, 2, 5), seed=7) for epoch in range(200)]
    assert drawn == [window.at(epoch, (0, 1, 2, 5), seed=7) for epoch in range(200)]
    assert drawn != [window.at(epoch, (0, 1, 2, 5), seed=8) for epoch in range(200)]
    assert len(set(drawn)) == 6, "not every pair was drawn"
    assert all(first < second for first, second in drawn)


def test_a_progressive_window_slides_and_stays_at_the_end() -> None:
    window = NoiseWindow(kind="sliding", size=2, stride=2, interval=3)
    places = [window.at(epoch, range(6), seed=0) for epoch in range(15)]
    assert places == [(0, 1)] * 3 + [(2, 3)] * 3 + [(4, 5)] * 9


def test_a_random_sliding_window_jumps_every_interval() -> None:
    window = NoiseWindow(kind="sliding", size=3, interval=4, order="random")
    places = [window.at(epoch, range(6), seed=1) for epoch in range(200)]
    assert all(places[epoch] == places[epoch - epoch % 4] for epoch in range(200))
    assert set(places) == {(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)}


@pytest.mark.parametrize(("epoch", "size"), [(0, None), (4, None), (5, (64, 64)), (9, (64, 64)), (10, (96, 64))])
def test_a_curriculums_newest_stage_holds(epoch: int, size: tuple[int, int] | None) -> None:
    assert stage_size([(5, (64, 64)), (10, (96, 64))], epoch) == size
