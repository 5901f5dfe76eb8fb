"""What both aggregates promise."""

from __future__ import annotations

import pytest
import torch
from scored import table

from pacorl.core.advantages import AdvantageOptions, advantages

NAN = float("nan")
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
SCORES = [[0.1, 0.4, 0.2, 0.9, 0.3, 0.8, 0.5, 0.6], [1.0, 3.0, 2.0, 4.0, 2.5, 3.5, 1.5, 2.0]]
BOTH = pytest.mark.parametrize(
    "options",
    [AdvantageOptions(aggregate="log_tamed"), AdvantageOptions(aggregate="weighted_sum")],
    ids=["log_tamed", "weighted_sum"],
)


def value_of(options: AdvantageOptions, scores: list[list[float]], groups: list[int] = GROUPS) -> torch.Tensor:
    return advantages(table(scores, groups), options, weights=[1.0] * len(scores)).value_B


@BOTH
def test_better_samples_have_larger_advantages_around_zero(options: AdvantageOptions) -> None:
    one = value_of(options, SCORES[:1])
    for first in (0, 4):
        group = one[first : first + 4]
        assert group.argsort().tolist() == torch.tensor(SCORES[0][first : first + 4]).argsort().tolist()
        assert float(group.sum()) == pytest.approx(0, abs=1e-9)


@BOTH
def test_equal_rewards_teach_nothing(options: AdvantageOptions) -> None:
    value_B = value_of(options, [[0.7] * 4 + SCORES[0][4:], [0.3] * 4 + SCORES[1][4:]])
    assert value_B[:4].tolist() == pytest.approx([0.0] * 4, abs=1e-9)
    assert value_B[4:].any()


@BOTH
def test_a_missing_score_is_not_zero_but_absent(options: AdvantageOptions) -> None:
    with_missing = [[*SCORES[0][:7], NAN], SCORES[1]]
    found = advantages(table(with_missing, GROUPS), options, weights=[1.0, 2.0])
    without = advantages(table([row[:7] for row in SCORES], GROUPS[:7]), options, weights=[1.0, 2.0])
    assert found.used_B.tolist() == [True] * 7 + [False]
    assert found.value_B.tolist() == pytest.approx([*without.value_B.tolist(), 0.0])


@BOTH
def test_order_and_clip_hold(options: AdvantageOptions) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = value_of(
        options, [[row[place] for place in order] for row in SCORES], [GROUPS[place] for place in order]
    )
    torch.testing.assert_close(shuffled, value_of(options, SCORES)[order])
    narrow = advantages(table(SCORES, GROUPS), options.model_copy(update={"clip": 0.5}), weights=[1.0, 1.0])
    assert narrow.value_B.abs().max() == 0.5


@BOTH
def test_a_run_where_nothing_was_judged_goes_on(options: AdvantageOptions) -> None:
    found = advantages(table([[NAN] * 8, SCORES[1]], GROUPS), options, weights=[1.0, 1.0])
    assert not found.used_B.any()
    assert not found.value_B.any()
    assert found.stats["samples/used"] == 0.0
