"""The weighted sum of the rewards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from pacorl.core.advantages import AggregateSpec, GroupedOptions, Scores

if TYPE_CHECKING:
    from torch import Tensor


class WeightedSum(GroupedOptions):
    """Options of weighted_sum."""

    aggregate: Literal["weighted_sum"] = "weighted_sum"


def weighted_sum(scores: Scores, options: WeightedSum) -> Tensor:
    """r̂ = Σ_k w_k·R^k (arXiv 2512.04784, Eq. 2, left)."""
    return scores.weight_R @ scores.score_RB


WEIGHTED_SUM = AggregateSpec(WeightedSum, weighted_sum, slope=lambda scores, options: torch.ones_like(scores.score_RB))
