"""GRPO-Guard: the clipped objective with a centred ratio of equal scale at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pacorl.core.objectives import ObjectiveSpec, Step
from pacorl.core.objectives.grpo_clip import ClippedOptions, clipped
from pacorl.core.sde import Transition, kl

if TYPE_CHECKING:
    from pacorl.core.objectives import Loss


class GrpoGuard(ClippedOptions):
    """Options of grpo_guard; `clip_range` is of its own ratio, which is smaller by the step's std."""

    name: Literal["grpo_guard"] = "grpo_guard"


def grpo_guard(step: Step, options: GrpoGuard) -> Loss:
    """GRPO-Guard (arXiv 2510.22319).

    ρ = exp((log p − log p_old + m)·s) and the loss divided by |dt|, with s = σ_t√|dt| the step's std and
    m = ‖μ − μ_old‖²/(2s²) per sample, the mean over dimensions. m takes away the bias of the log-ratio below 0, so
    that good samples are clipped as bad ones are; s and |dt| give early and late steps one scale.
    """
    assert step.old_mean_BNC is not None, "grpo_guard needs rollouts that keep their means"
    centre_B = kl(step.transition, Transition(step.old_mean_BNC, step.transition.std), step.panels)
    ratio_B = ((step.log_prob_B - step.old_log_prob_B + centre_B) * step.transition.std).exp()
    loss, metrics = clipped(ratio_B, step.advantage_B, clip_range=options.epsilon)
    return loss / abs(step.dt), metrics


GRPO_GUARD = ObjectiveSpec(GrpoGuard, grpo_guard, needs="path", keeps_means=True)
