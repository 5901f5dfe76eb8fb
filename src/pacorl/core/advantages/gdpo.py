"""GDPO: each reward is normalised before the sum."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from pacorl.core.advantages import AggregateOptions, AggregateSpec, Scores, group_divisor, normalize_groups


class Gdpo(AggregateOptions):
    """Options of gdpo."""

    aggregate: Literal["gdpo"] = "gdpo"

    # Each reward was divided by its groups' standard deviations already.
    std: ClassVar[Literal["group", "global"]] = "global"  # type: ignore[misc]


def gdpo(scores: Scores, options: Gdpo) -> Tensor:
    """Normalise each reward within its group before the sum, so that its scale has no effect (GDPO)."""
    normal_RB = []
    for score_B in scores.score_RB:
        normal_RB.append(normalize_groups(score_B, scores.valid_B, scores.group_B, floor=options.floor))
    return scores.weight_R @ torch.stack(normal_RB)


def slope(scores: Scores, options: Gdpo) -> Tensor:
    """(R, B) slopes: 1 over the standard deviation of each reward in its group."""
    divisor_RB = []
    for score_B in scores.score_RB:
        divisor_RB.append(group_divisor(score_B, scores.valid_B, scores.group_B, std="group", floor=options.floor))
    return 1 / torch.stack(divisor_RB)


GDPO = AggregateSpec(Gdpo, gdpo, slope)
