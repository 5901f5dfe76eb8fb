"""Aggregation and normalisation against numbers worked by hand."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from scored import table

from pacorl.core.advantages import AdvantageOptions, Floor, coefficient_of_variation, is_tamed, log_tamed
from pacorl.core.advantages import advantages as advantages_of
from pacorl.types import Advantages, RewardTable

NAN = float("nan")


def advantages(table: RewardTable, *, weights: Sequence[float], **settings: Any) -> Advantages:
    return advantages_of(table, AdvantageOptions(**settings), weights=weights)


def test_log_tame_off_its_domain_keeps_the_order() -> None:
    score_RB = torch.tensor([[-3.0, -1.0, 0.0, 5.0]], dtype=torch.float64)
    assert log_tamed(score_RB)[0].tolist() == pytest.approx([-math.log(4), -math.log(2), 0.0, math.log(6)])


@pytest.mark.parametrize("std", ["group", "global"])
def test_the_std_is_of_the_population(std: str) -> None:
    """Of the group, or of all samples."""
    scores = [0.0, 1.0, 0.0, 1.0, 2.0]
    found = advantages(table([scores], [0, 0, 1, 1, 1]), weights=[1.0], aggregate="weighted_sum", std=std)
    stds = [0.5, 0.5, *[math.sqrt(2 / 3)] * 3] if std == "group" else [statistics.pstdev(scores)] * 5
    centred = [-0.5, 0.5, -1.0, 0.0, 1.0]
    assert found.value_B.tolist() == pytest.approx([value / of for value, of in zip(centred, stds, strict=True)])


@pytest.mark.parametrize("aggregate", ["log_tamed", "weighted_sum"])
@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 3.0)])
def test_weights_decide_between_rewards_that_disagree(aggregate: str, weights: tuple[float, float]) -> None:
    found = advantages(table([[1.0, 1.1], [1.1, 1.0]], [0, 0]), weights=weights, aggregate=aggregate)
    assert found.value_B.tolist() == pytest.approx([-1.0, 1.0] if weights[0] > weights[1] else [1.0, -1.0])


def test_rewards_below_zero_vary_as_their_opposites_do() -> None:
    assert coefficient_of_variation(torch.tensor([[-1.0, -3.0]])).tolist() == pytest.approx([0.5])


def test_a_missing_score_makes_no_reward_vary() -> None:
    """It is held as 0 among scores near 1, which log_tamed must not see."""
    scores = table([[1.0, 1.1, 1.3, NAN]], [0] * 4)
    tamed, plain = (advantages(scores, weights=[1.0], aggregate=name) for name in ("log_tamed", "weighted_sum"))
    assert tamed.value_B.tolist() == plain.value_B.tolist()


@pytest.mark.parametrize("std", ["group", "global"])
def test_without_a_floor_rounding_alone_teaches_nothing(std: Literal["group", "global"]) -> None:
    """One image's P(Yes) from two batches; a real difference of 1e-5 counts in full, as in Eq. 2."""
    alike = advantages(table([[0.97, 0.97 + 1e-7, 0.97, 0.97]], [0] * 4), weights=[1.0], std=std)
    assert alike.value_B.tolist() == [0.0] * 4
    apart = advantages(table([[0.97, 0.97 + 2e-5]], [0, 0]), weights=[1.0], aggregate="weighted_sum", std=std)
    assert apart.value_B.tolist() == pytest.approx([-1.0, 1.0])


@pytest.mark.parametrize(
    ("floor", "sure", "all_but_equal"), [("none", 1.0, 1.0), ("max", 1.0, 1.0), ("add", 2 / 3, 1 / 11)]
)
def test_each_form_of_the_floor_by_hand(floor: Floor, sure: float, all_but_equal: float) -> None:
    """Group stds of 2e-4, a judge that is sure, and of 1e-5; beside them one of 1, which no floor moves by more than
    1e-4."""
    scores = [0.5 - 2e-4, 0.5 + 2e-4, 0.5 - 1e-5, 0.5 + 1e-5, 1.0, 3.0]
    found = advantages(table([scores], [0, 0, 1, 1, 2, 2]), weights=[1.0], aggregate="weighted_sum", floor=floor)
    assert found.value_B.tolist()[:4] == pytest.approx([-sure, sure, -all_but_equal, all_but_equal])
    assert found.value_B.tolist()[4:] == pytest.approx([-1.0, 1.0], abs=1.1e-4)


def test_advantages_are_clipped_on_both_sides() -> None:
    scores = [[0.0] * 99 + [1.0], [1.0] * 99 + [0.0]]
    for number, sign in enumerate((1, -1)):
        found = advantages(table([scores[number]], [0] * 100), weights=[1.0], clip=5.0).value_B
        assert found[-1] == 5.0 * sign
        assert found[:-1].abs().max() < 1


def test_a_mean_of_zero_is_a_large_variation_and_no_fault() -> None:
    score_RB = torch.tensor([[-1.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    assert coefficient_of_variation(score_RB).isfinite().all()
    assert is_tamed(score_RB, 0.2).tolist() == [True, False]
    found = advantages(table([[-1, 1], [0, 0]], [0, 0]), weights=[1.0, 1.0])
    assert found.value_B.tolist() == pytest.approx([-1.0, 1.0], abs=1e-3)
    assert found.stats["reward/reward0/tamed"] == 1.0


def test_missing_scores_and_groups_of_equal_ones_are_counted() -> None:
    found = advantages(table([[1, 3, 5, NAN, 2, 4], [1, 1, 2, 2, 1, 1]], [0, 0, 1, 1, 2, 2]), weights=[1.0, 1.0])
    # Without the sample of one reward, its group has one, which nothing can be compared with.
    assert found.used_B.tolist() == [True, True, False, False, True, True]
    assert found.stats["samples/missing"] == pytest.approx(1 / 12)
    assert found.stats["reward/reward1/zero_std_groups"] == 1.0
    assert found.stats["reward/reward0/zero_std_groups"] == 0.0


# --- panel credit ----------------------------------------------------------------------------------------------


def by_panel(scores: list[list[float]], parts: list[list[list[float]]], groups: list[int]) -> RewardTable:
    """Rewards of sets; `parts` per reward, sample and panel."""
    return dataclasses.replace(table(scores, groups), part_RBP=torch.tensor(parts, dtype=torch.float64))


def panel_values(found: Advantages) -> list[list[float]]:
    assert found.value_BP is not None
    return found.value_BP.tolist()  # type: ignore[no-any-return]


SETS = [0.5, 1.0, 0.3]
"""Scores of three sets, of which some lies in no part of their two panels."""


def test_panels_of_nearly_tied_sets_are_divided_by_their_own_std() -> None:
    """Two siblings whose sets are alike, since one has a better panel 0 and the other a better panel 1."""
    rewards = by_panel([[0.500, 0.501]], [[[0.4, 0.1], [0.101, 0.4]]], [0, 0])
    found = advantages(rewards, weights=[1.0], aggregate="weighted_sum", credit="panel", clip=1000.0)
    assert panel_values(found) == [pytest.approx([1.0, -1.0]), pytest.approx([-1.0, 1.0])]
    found = advantages(rewards, weights=[1.0], aggregate="weighted_sum", credit="panel", floor="add")
    assert panel_values(found)[1] == pytest.approx([-0.1495 / 0.1496, 0.15 / 0.1501])
    tied = by_panel([[0.5, 0.501]], [[[0.3, 0.1], [0.3 + 1e-9, 0.2]]], [0, 0])
    found = advantages(tied, weights=[1.0], aggregate="weighted_sum", credit="panel")
    assert panel_values(found) == [pytest.approx([0.0, -1.0]), pytest.approx([0.0, 1.0])]


def test_a_panel_needs_its_part_of_every_reward() -> None:
    """As a panel that a smaller set lacks: a reward without parts has a value there all the same."""
    parts = [[[0.2, NAN], [0.3, 0.3], [0.1, 0.2]], [[1.0, 1.0]] * 3]
    found = advantages(
        by_panel([SETS, [1.0] * 3], parts, [0] * 3), weights=[1.0, 1.0], aggregate="weighted_sum", credit="panel"
    )
    std = statistics.pstdev(SETS)
    assert [row[1] for row in panel_values(found)] == pytest.approx([0.0, 0.05 / std, -0.05 / std])
