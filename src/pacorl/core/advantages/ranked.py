"""Ranks in place of scores: only the order counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pacorl.core.advantages import AggregateSpec, GroupedOptions, Scores

if TYPE_CHECKING:
    from torch import Tensor


class Ranked(GroupedOptions):
    """Options of ranked."""

    aggregate: Literal["ranked"] = "ranked"


def ranked(scores: Scores, options: Ranked) -> Tensor:
    """Each reward's rank in its group, from −1 (worst) to 1 (best), then the weighted sum.

    No outlier, scale or monotone change of a reward moves anything. Equals share the mean of their ranks,
    (#worse − #better)/(n − 1).
    """
    group_B, valid_B, score_RB = scores.group_B, scores.valid_B, scores.score_RB
    together_BB = (group_B[:, None] == group_B) & valid_B[:, None] & valid_B
    count_B = (together_BB.sum(1) - 1).clamp(min=1)  # a group of one has rank 0
    order_RBB = (score_RB[:, :, None] - score_RB[:, None, :]).sign() * together_BB
    return scores.weight_R @ (order_RBB.sum(2) / count_B)


RANKED = AggregateSpec(Ranked, ranked)
