"""What seeds and windows an epoch draws."""

from pacorl.core.schedule import NoiseWindow, seed_of


def test_seeds_tell_apart_what_reads_alike_in_a_row() -> None:
    """Epoch 1 of row 11, epoch 11 of row 1, and the text of a number."""
    assert len({seed_of(0, 1, 11), seed_of(0, 11, 1), seed_of(0, 111), seed_of(0, "1", 11)}) == 4


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
