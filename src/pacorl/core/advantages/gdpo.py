"""GDPO: each reward is normalised before the sum."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

import torch

from pacorl.core.advantages import AggregateOptions, AggregateSpec, Combined, Scores, group_centred, group_divisor


class Gdpo(AggregateOptions):
    """Options of gdpo."""

    aggregate: Literal["gdpo"] = "gdpo"

    # Each reward was divided by its groups' standard deviations already.
    std: ClassVar[Literal["group", "global"]] = "global"  # type: ignore[misc]


def gdpo(scores: Scores, options: Gdpo) -> Combined:
    """Normalise each reward within its group before the sum, so that its scale has no effect (GDPO)."""
    valid_B, group_B = scores.valid_B, scores.group_B
    centred_RB = torch.stack([group_centred(score_B, valid_B, group_B) for score_B in scores.score_RB])
    divide = partial(group_divisor, valid_B=valid_B, group_B=group_B, std="group", floor=options.floor)
    divisor_RB = torch.stack([divide(score_B) for score_B in scores.score_RB])
    return Combined(scores.weight_R @ (centred_RB / divisor_RB), slope_RB=1 / divisor_RB)


GDPO = AggregateSpec(Gdpo, gdpo)
