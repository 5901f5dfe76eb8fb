"""Which groups are dropped before an update, and what is said of them."""

import pytest
import torch

from pacorl.core.advantages import advantages
from pacorl.core.advantages.weighted_sum import WeightedSum
from pacorl.core.selection import Selection, best_and_worst, by_row, drop_alike_groups
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


def values_of(value_B: list[float], used_B: list[bool]) -> Advantages:
    return Advantages(torch.tensor(value_B, dtype=torch.float64), torch.tensor(used_B), {"samples/used": 1.0})


def test_the_best_and_the_worst_of_each_group_are_kept() -> None:
    values = values_of([0.3, -2.0, 0.1, 2.0, -0.4, 1.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0], [True] * 12)
    assert best_and_worst(values, drawn=6, keep=2) == [1, 3, 6, 11]
    assert best_and_worst(values, drawn=6, keep=4) == [1, 3, 4, 5, 6, 7, 10, 11]


def test_a_group_with_too_few_judged_scouts_is_filled_up() -> None:
    values = values_of([0.0, 3.0, 0.0, 1.0, 0.0, 2.0], [False, True, False, True, False, True])
    assert best_and_worst(values, drawn=6, keep=2) == [1, 3]
    assert best_and_worst(values, drawn=6, keep=4) == [0, 1, 3, 5]
    assert len(best_and_worst(values_of([0.0] * 6, [False] * 6), drawn=6, keep=4)) == 4


def test_scouts_that_are_all_alike_leave_a_full_group() -> None:
    assert len(best_and_worst(values_of([0.0] * 6, [True] * 6), drawn=6, keep=4)) == 4


def test_advantages_by_global_row() -> None:
    values = Advantages(
        torch.tensor([1.0, -1.0]),
        torch.tensor([True, True]),
        {},
        torch.tensor([[2.0, 3.0]]),
        torch.tensor([True, False]),
    )
    found = by_row(values, [1, 4])
    assert found.value_B.tolist() == [0, 1, 0, 0, -1]
    assert found.used_B.tolist() == [False, True, False, False, True]
    assert found.at(0).tolist() == [0, 2, 0, 0, 3]
    assert found.kept_B is not None
    assert found.kept_B.tolist() == [False, True, False, False, False]
    assert torch.equal(by_row(values, [0, 1]).value_B, values.value_B)
