"""Ranks in place of scores: only the order counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from pacorl.core.advantages import AggregateSpec, GroupedOptions, Scores

if TYPE_CHECKING:
    from torch import Tensor


class Ranked(GroupedOptions):
    """Options of ranked."""

    aggregate: Literal["ranked"] = "ranked"


def ranked(scores: Scores, options: Ranked) -> Tensor:
    """Rank each reward within its group, from −1 (worst) to 1 (best), and sum the ranks by weight.

    Invariant to outliers, scale and monotone transformations. Equal scores share the mean of their ranks,
    (#worse − #better)/(n − 1).
    """
    rank_RB = torch.zeros_like(scores.score_RB)
    _, group_B, size_G = scores.group_B[scores.valid_B].unique(return_inverse=True, return_counts=True)
    end_B = size_G.cumsum(0)[group_B]
    start_B = end_B - size_G[group_B]
    count_B = (size_G[group_B] - 1).clamp(min=1)  # a group of one has rank 0
    for rank_B, score_B in zip(rank_RB, scores.score_RB[:, scores.valid_B], strict=True):
        # Sorted by group and score: earlier groups and worse scores, then the sample's equals, then better scores.
        pairs = torch.stack([group_B.to(score_B), score_B + 0.0])  # −0 equals 0
        _, level_B, equals_L = pairs.unique(dim=1, return_inverse=True, return_counts=True)
        last_B = equals_L.cumsum(0)[level_B]
        worse_B = last_B - equals_L[level_B] - start_B
        better_B = end_B - last_B
        rank_B[scores.valid_B] = (worse_B - better_B).to(score_B) / count_B
    return scores.weight_R @ rank_RB


RANKED = AggregateSpec(Ranked, ranked)
