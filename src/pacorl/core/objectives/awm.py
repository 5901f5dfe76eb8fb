"""AWM: advantage-weighted flow matching, a policy gradient whose likelihood is the evidence lower bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pacorl.core.grid import sample_mean
from pacorl.core.objectives import Endpoint, ObjectiveSpec
from pacorl.core.objectives.grpo_clip import ClippedOptions, clipped

if TYPE_CHECKING:
    from torch import Tensor

    from pacorl.core.objectives import Loss


class Awm(ClippedOptions):
    """Options of awm."""

    name: Literal["awm"] = "awm"
    clip_range: float | None = Field(1.0, gt=0)
    """ε of the ratio, as released: wide, since the ratio is of a lower bound, and clipping it early was no help in
    2602.04663."""


def awm(end: Endpoint, options: Awm) -> Loss:
    """Advantage weighted matching (arXiv 2509.25050) in its policy-gradient form, on the ELBO of 2602.04663.

    The likelihood of an endpoint x0 is that of its lower bound at one noise level, log p = −D + const, with
    D = ‖v − (ε − x0)‖² at x = (1−σ)x0 + σε as a mean over dimensions: the paper's weight of 1. With
    ρ = exp(log p − log p_old), both at the same ε, the loss is −min(ρA, clip(ρ, 1−ε, 1+ε)A). At v = v_old its gradient
    is A·∇D: flow matching towards good endpoints, and away from bad endpoints.
    """
    target = (end.noisy_BNC - end.clean_BNC) / end.sigma  # ε − x0

    def lower_bound(velocity_BNC: Tensor) -> Tensor:
        return -sample_mean((velocity_BNC - target) ** 2, end.panels)

    ratio_B = (lower_bound(end.velocity_BNC) - lower_bound(end.old_velocity_BNC)).exp()
    loss, metrics = clipped(ratio_B, end.advantage_B * end.used_B, clip_range=options.epsilon)
    moved = (end.velocity_BNC - end.old_velocity_BNC).detach()
    return loss, metrics | {"velocity_change": (moved**2).mean()}


AWM = ObjectiveSpec(Awm, awm, needs="endpoint")
