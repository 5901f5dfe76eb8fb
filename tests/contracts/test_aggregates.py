"""What every aggregate of the table promises; a new entry is tested on the day it is added."""

from __future__ import annotations

import pytest
import torch
from scored import table

from pacorl.core.advantages import AGGREGATES, AggregateSpec, advantages

NAN = float("nan")
GROUPS = [0, 0, 0, 0, 1, 1, 1, 1]
SCORES = [[0.1, 0.4, 0.2, 0.9, 0.3, 0.8, 0.5, 0.6], [1.0, 3.0, 2.0, 4.0, 2.5, 3.5, 1.5, 2.0]]
SPECS = pytest.mark.parametrize("spec", [AGGREGATES[name] for name in AGGREGATES], ids=list(AGGREGATES))


def value_of(spec: AggregateSpec, scores: list[list[float]], groups: list[int] = GROUPS) -> torch.Tensor:
    return advantages(table(scores, groups), spec.options(), weights=[1.0] * len(scores)).value_B


@SPECS
def test_better_samples_have_larger_advantages_around_zero(spec: AggregateSpec) -> None:
    one = value_of(spec, SCORES[:1])
    for first in (0, 4):
        group = one[first : first + 4]
        assert group.argsort().tolist() == torch.tensor(SCORES[0][first : first + 4]).argsort().tolist()
        assert float(group.sum()) == pytest.approx(0, abs=1e-9)


@SPECS
def test_equal_rewards_teach_nothing(spec: AggregateSpec) -> None:
    value_B = value_of(spec, [[0.7] * 4 + SCORES[0][4:], [0.3] * 4 + SCORES[1][4:]])
    assert value_B[:4].tolist() == pytest.approx([0.0] * 4, abs=1e-9)
    assert value_B[4:].any()


@SPECS
def test_a_missing_score_is_not_zero_but_absent(spec: AggregateSpec) -> None:
    with_missing = [[*SCORES[0][:7], NAN], SCORES[1]]
    found = advantages(table(with_missing, GROUPS), spec.options(), weights=[1.0, 2.0])
    without = advantages(table([row[:7] for row in SCORES], GROUPS[:7]), spec.options(), weights=[1.0, 2.0])
    assert found.used_B.tolist() == [True] * 7 + [False]
    assert found.value_B.tolist() == pytest.approx([*without.value_B.tolist(), 0.0])


@SPECS
def test_order_and_clip_hold(spec: AggregateSpec) -> None:
    order = [5, 2, 7, 0, 3, 6, 1, 4]
    shuffled = value_of(spec, [[row[place] for place in order] for row in SCORES], [GROUPS[place] for place in order])
    torch.testing.assert_close(shuffled, value_of(spec, SCORES)[order])
    narrow = advantages(table(SCORES, GROUPS), spec.options(clip=0.5), weights=[1.0, 1.0])
    assert narrow.value_B.abs().max() == 0.5


@SPECS
def test_a_run_where_nothing_was_judged_goes_on(spec: AggregateSpec) -> None:
    found = advantages(table([[NAN] * 8, SCORES[1]], GROUPS), spec.options(), weights=[1.0, 1.0])
    assert not found.used_B.any()
    assert not found.value_B.any()
    assert found.stats["samples/used"] == 0.0
