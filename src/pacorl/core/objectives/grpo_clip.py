"""Flow-GRPO's clipped objective, and its clipping for other objectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pacorl.core.devices import widest_float
from pacorl.core.objectives import RATIO_DEVIATION, ObjectiveOptions, ObjectiveSpec, Step

if TYPE_CHECKING:
    from torch import Tensor

    from pacorl.core.objectives import Loss

SET_RANGE, PANEL_RANGE = 1e-4, 1e-3
"""Clip ranges of the paper, for the ratio of a whole set, and of a panel: a mean over fewer tokens varies more."""
TOLERATED_SHARE = 0.1
"""Share of the clip range that the ratio may be off before the first update; beyond it clipping feels the error."""


class ClippedOptions(ObjectiveOptions):
    """The settings of objectives that clip a ratio."""

    clip_range: float | None = Field(None, gt=0)
    """ε: how far the ratio may move before its gradient stops. Left out: 1e-4, the paper's, with the credit of sets,
    and 1e-3 with that of panels, whose ratio varies more."""

    @property
    def epsilon(self) -> float:
        """The clip range."""
        return SET_RANGE if self.clip_range is None else self.clip_range

    @property
    def ratio_tolerance(self) -> float:
        return TOLERATED_SHARE * self.epsilon


class GrpoClip(ClippedOptions):
    """Options of grpo_clip."""

    name: Literal["grpo_clip"] = "grpo_clip"


def grpo_clip(step: Step, options: GrpoClip) -> Loss:
    """Flow-GRPO's clipped objective (arXiv 2505.05470; 2512.04784, Eq. 1).

    −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over the batch, with ρ = exp(log p − log p_old). Log-probabilities are means
    over dimensions, so the clip range is small (1e-4 in the paper).
    """
    ratio_B = (step.log_prob_B - step.old_log_prob_B).exp()
    return clipped(ratio_B, step.advantage_B, clip_range=options.epsilon)


def clipped(ratio_B: Tensor, advantage_B: Tensor, *, clip_range: float) -> Loss:
    """PPO's pessimistic bound: the worse of the ratio and the clipped ratio, for each sample."""
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    loss = -(ratio_B * advantage_B).minimum(clipped_B * advantage_B).mean()

    deviation_B = (ratio_B.detach() - 1).abs()
    beyond_B = deviation_B > clip_range
    return loss, {
        RATIO_DEVIATION: deviation_B.max(),
        "clip_fraction": beyond_B.to(widest_float(deviation_B.device)).mean(),
    }


GRPO_CLIP = ObjectiveSpec(GrpoClip, grpo_clip, needs="path")
