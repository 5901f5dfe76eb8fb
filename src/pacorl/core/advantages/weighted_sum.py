"""The weighted sum of the rewards."""

from __future__ import annotations

from typing import Literal

from pacorl.core.advantages import AggregateSpec, Combined, GroupedOptions, Scores


class WeightedSum(GroupedOptions):
    """Options of weighted_sum."""

    aggregate: Literal["weighted_sum"] = "weighted_sum"


def weighted_sum(scores: Scores, options: WeightedSum) -> Combined:
    """r̂ = Σ_k w_k·R^k (arXiv 2512.04784, Eq. 2, left)."""
    return Combined(scores.weight_R @ scores.score_RB, slope_RB=scores.score_RB.new_ones(scores.score_RB.shape))


WEIGHTED_SUM = AggregateSpec(WeightedSum, weighted_sum)
