"""A group's tree, by hand."""

from __future__ import annotations

import pytest

from pacorl.core.sampler import Tree, TreeOptions


def test_a_node_is_named_by_the_first_sample_below_it() -> None:
    tree = Tree(seeds=2, branches=(2, 3))
    assert tree.group_size == 12
    assert [tree.leaves(level) for level in range(3)] == [6, 3, 1]
    assert tree.nodes([4, 10, 23]) == [[0, 6, 18], [3, 9, 21], [4, 10, 23]]


@pytest.mark.parametrize(
    ("child", "level", "noise"),
    [(0, 0, (0, 1.0)), (2, 0, (0, -1.0)), (6, 0, (4, -1.0)), (2, 1, (2, 1.0)), (3, 1, (2, -1.0))],
)
def test_every_second_child_mirrors_its_elder_sibling(child: int, level: int, noise: tuple[int, float]) -> None:
    """Two children and two children each; row 6 is a child of the second group's node."""
    assert Tree(1, (2, 2), antithetic=True).noise_of(child, level) == noise
    assert Tree(1, (2, 2)).noise_of(child, level) == (child, 1.0)


def test_an_only_child_mirrors_nobody() -> None:
    """Two noises, whose only children branch at the next step alone."""
    tree = Tree(2, (1, 2), antithetic=True)
    assert [tree.noise_of(child, 0) for child in (0, 2)] == [(0, 1.0), (2, 1.0)]
    assert tree.noise_of(3, 1) == (2, -1.0)


def test_a_tree_branches_at_the_first_step_unless_it_is_said() -> None:
    assert TreeOptions().resolve(4, steps=2) == Tree(4, (1, 1))
    assert TreeOptions(seeds=1).resolve(4, steps=2) == Tree(1, (4, 1))
    assert TreeOptions(branches=(1, 4)).resolve(8, steps=2) == Tree(2, (1, 4))
