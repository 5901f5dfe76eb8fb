"""The second-order solver and the grid of a suffix, against solutions that are known."""

import pytest
import torch

from pacorl.core.sampler import Suffix
from pacorl.core.sde import Past, ab2


def test_unequal_steps_are_exact_if_the_velocity_is_linear_in_sigma() -> None:
    """v = σ at .9 and .7, and a step from .7 to .6: ∫σdσ."""
    x, now, before = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (0.0, 0.7, 0.9))
    assert float(ab2(x, now, -0.1, Past(before, -0.2))) == pytest.approx((0.6**2 - 0.7**2) / 2)


def test_a_suffix_visits_evenly_chosen_steps() -> None:
    assert Suffix().grid(2, 10) == list(range(2, 11))
    assert Suffix(steps=4).grid(2, 10) == [2, 4, 6, 8, 10]
    assert Suffix(steps=3, solver="ab2").grid(2, 10) == [2, 5, 7, 10]
    assert Suffix().grid(10, 10) == [10]
