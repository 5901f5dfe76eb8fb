"""GDPO: each reward is normalised before the sum."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pacorl.core.advantages import AggregateOptions, AggregateSpec, Scores, group_centred, group_divisor


class Gdpo(AggregateOptions):
    """Options of gdpo."""

    aggregate: Literal["gdpo"] = "gdpo"

    # Each reward was divided by its groups' standard deviations already.
    std: ClassVar[Literal["group", "global"]] = "global"  # type: ignore[misc]


def gdpo(scores: Scores, options: Gdpo) -> Tensor:
    """Normalise each reward within its group before the sum, so that its scale has no effect (GDPO)."""
    normal_RB = []
    for score_B, divisor_B in zip(scores.score_RB, divisors(scores, options), strict=True):
        normal_RB.append(group_centred(score_B, scores.valid_B, scores.group_B) / divisor_B)
    return scores.weight_R @ torch.stack(normal_RB)


def slope(scores: Scores, options: Gdpo) -> Tensor:
    """(R, B) slopes: 1 over the standard deviation of each reward in its group."""
    return 1 / torch.stack(divisors(scores, options))


def divisors(scores: Scores, options: Gdpo) -> list[Tensor]:
    """Compute the (B,) standard deviation of each reward in its group."""
    divide = partial(group_divisor, valid_B=scores.valid_B, group_B=scores.group_B, std="group", floor=options.floor)
    return [divide(score_B) for score_B in scores.score_RB]


GDPO = AggregateSpec(Gdpo, gdpo, slope)
