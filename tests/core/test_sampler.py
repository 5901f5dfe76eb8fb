"""A group's tree, the second-order solver, the grid of a suffix, and tied items, against known solutions."""

import pytest
import torch

from pacorl.core.batches import components
from pacorl.core.sampler import Suffix, Tree, TreeOptions
from pacorl.core.sde import Past, ab2


def test_a_node_is_named_by_the_first_sample_below_it() -> None:
    tree = Tree(seeds=2, branches=(2, 3))
    assert tree.seeds * tree.leaves(0) == 12
    assert [tree.leaves(level) for level in range(3)] == [6, 3, 1]
    levels = [[tree.node_of(row, level) for row in (4, 10, 23)] for level in range(3)]
    assert levels == [[0, 6, 18], [3, 9, 21], [4, 10, 23]]


def test_a_tree_branches_at_the_first_step_unless_it_is_said() -> None:
    assert TreeOptions().resolve(4, steps=2) == Tree(4, (1, 1))
    assert TreeOptions(seeds=1).resolve(4, steps=2) == Tree(1, (4, 1))
    assert TreeOptions(branches=(1, 4)).resolve(8, steps=2) == Tree(2, (1, 4))


def test_unequal_steps_are_exact_if_the_velocity_is_linear_in_sigma() -> None:
    """v = σ at .9 and .7, and a step from .7 to .6: ∫σdσ."""
    x, now, before = (torch.full((1, 1, 1), value, dtype=torch.float64) for value in (0.0, 0.7, 0.9))
    assert float(ab2(x, now, -0.1, Past(before, -0.2))) == pytest.approx((0.6**2 - 0.7**2) / 2)


def test_a_suffix_visits_evenly_chosen_steps() -> None:
    assert Suffix().grid(2, 10) == list(range(2, 11))
    assert Suffix(steps=4).grid(2, 10) == [2, 4, 6, 8, 10]
    assert Suffix(steps=3, solver="ab2").grid(2, 10) == [2, 5, 7, 10]
    assert Suffix().grid(10, 10) == [10]


def test_an_item_that_shares_with_two_groups_joins_them() -> None:
    ties = [("a", 2), ("d", 4), ("e", 4), ("e", 2), ("f", 5)]
    assert components(ties) == [["a", "d", "e"], ["f"]]
