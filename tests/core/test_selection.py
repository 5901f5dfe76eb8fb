"""Which groups are dropped before an update, and what is said of them."""

import pytest
import torch

from pacorl.core.advantages import advantages
from pacorl.core.advantages.weighted_sum import WeightedSum
from pacorl.core.selection import Selection, drop_alike_groups
from pacorl.types import Advantages, RewardTable

NAN = float("nan")
GROUPS = [7, 7, 7, 3, 3, 3]


def selected(scores: list[list[float]], selection: Selection, *, weights: list[float]) -> tuple[Advantages, Advantages]:
    score_RB = torch.tensor(scores, dtype=torch.float64)
    names = tuple(f"reward{number}" for number in range(len(scores)))
    table = RewardTable(names, score_RB, score_RB.isfinite(), torch.tensor(GROUPS))
    values = advantages(table, WeightedSum(), weights=weights)
    return values, drop_alike_groups(values, table, selection, weights=weights)


def test_a_group_that_is_alike_is_dropped_and_counted() -> None:
    values, found = selected([[0.50, 0.51, 0.52, 0.1, 0.5, 0.9]], Selection(min_std=0.05), weights=[1.0])
    assert found.kept_B is not None
    assert found.kept_B.tolist() == [False] * 3 + [True] * 3
    assert found.used_B.tolist() == [False] * 3 + [True] * 3
    assert torch.equal(found.value_B, values.value_B)
    assert found.stats["groups/alike"] == 1
    assert found.stats["samples/used"] == 0.5
    assert found.stats["groups/dropped"] == 0, "which are those with too few judged samples"


def test_the_std_is_that_of_the_weighted_sum() -> None:
    """Two rewards that say the opposite make a group alike; either by itself does not."""
    scores = [[0.1, 0.5, 0.9, 0.1, 0.5, 0.9], [0.9, 0.5, 0.1, 0.1, 0.5, 0.9]]
    _, found = selected(scores, Selection(min_std=0.05), weights=[0.5, 0.5])
    assert found.kept_B is not None
    assert found.kept_B.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(("above", "kept"), [(0.8, [True, False]), (0.2, [False, False]), (0.95, None)])
def test_only_good_groups_may_be_dropped(above: float, kept: list[bool] | None) -> None:
    scores = [[0.5, 0.5, 0.5, 0.9, 0.9, 0.9]]
    _, found = selected(scores, Selection(min_std=0.05, above_mean=above), weights=[1.0])
    assert (None if found.kept_B is None else found.kept_B[[0, 3]].tolist()) == kept


def test_missing_scores_say_nothing_about_a_group() -> None:
    _, found = selected([[0.5, NAN, 0.5, NAN, NAN, 0.9]], Selection(min_std=0.05), weights=[1.0])
    assert found.kept_B is not None
    assert found.kept_B.tolist() == [False] * 3 + [True] * 3
    assert not found.used_B.any()
    assert found.stats["groups/alike"] == found.stats["groups/dropped"] == 1


def test_nothing_changes_if_it_is_off_or_no_group_is_alike() -> None:
    scores = [[0.5, 0.51, 0.52, 0.1, 0.5, 0.9]]
    values, off = selected(scores, Selection(), weights=[1.0])
    assert off.kept_B is None
    assert torch.equal(off.used_B, values.used_B)
    assert off.stats == values.stats
    _, low = selected(scores, Selection(min_std=1e-3), weights=[1.0])
    assert low.kept_B is None
    assert low.stats["groups/alike"] == 0
