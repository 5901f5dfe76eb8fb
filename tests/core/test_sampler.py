"""A group's tree, by hand."""

from __future__ import annotations

from pacorl.core.sampler import Tree, TreeOptions


def test_a_node_is_named_by_the_first_sample_below_it() -> None:
    tree = Tree(seeds=2, branches=(2, 3))
    assert tree.group_size == 12
    assert [tree.leaves(level) for level in range(3)] == [6, 3, 1]
    levels = [[tree.node_of(row, level) for row in (4, 10, 23)] for level in range(3)]
    assert levels == [[0, 6, 18], [3, 9, 21], [4, 10, 23]]


def test_a_tree_branches_at_the_first_step_unless_it_is_said() -> None:
    assert TreeOptions().resolve(4, steps=2) == Tree(4, (1, 1))
    assert TreeOptions(seeds=1).resolve(4, steps=2) == Tree(1, (4, 1))
    assert TreeOptions(branches=(1, 4)).resolve(8, steps=2) == Tree(2, (1, 4))
