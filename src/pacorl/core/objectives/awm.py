"""AWM: advantage-weighted flow matching, a policy gradient whose likelihood is the evidence lower bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pacorl.core.objectives import Endpoint, ObjectiveSpec
from pacorl.core.objectives.grpo_clip import ClippedOptions, clipped
from pacorl.core.panels import sample_mean

if TYPE_CHECKING:
    from torch import Tensor

    from pacorl.core.objectives import Loss

DISTANCE_FLOOR = 1e-10
"""Added to a distance, so that a power below 1 has a finite gradient at 0, as released."""

WEIGHTS: Mapping[str, Callable[[float], float]] = {
    "uniform": lambda sigma: 1.0,
    "sigma": lambda sigma: sigma,
    "sigma_squared": lambda sigma: sigma**2,
    # −½·dλ/dσ·‖ε̂ − ε‖² with the log-SNR λ = 2·log((1−σ)/σ) and ε̂ − ε = (1−σ)·(v − u) (Kingma et al., 2107.00630).
    "elbo": lambda sigma: (1 - sigma) / sigma,
}
"""w(σ) of each weighting."""


class Awm(ClippedOptions):
    """Options of awm."""

    name: Literal["awm"] = "awm"
    clip_range: float = Field(1.0, gt=0)
    """ε of the ratio, as released: wide, since the ratio is of a lower bound, and clipping it early was no help in
    2602.04663."""
    weighting: Literal["uniform", "sigma", "sigma_squared", "elbo"] = "uniform"
    """w(σ). uniform: flow matching's own, the paper's. sigma and sigma_squared (the distance of endpoints) stress high
    noise levels. elbo: (1−σ)/σ, the bound itself."""
    power: float = Field(1.0, gt=0, le=1)
    """p of the distance D^p/p. 1: the paper's. The released recipes take 0.25 with weighting sigma, by which near and
    far samples pull more alike."""


def awm(end: Endpoint, options: Awm) -> Loss:
    """Advantage weighted matching (arXiv 2509.25050) in its policy-gradient form, on the ELBO of 2602.04663.

    The likelihood of an endpoint x0 is that of its lower bound at one noise level, log p = −w(σ)·D^p/p + const, with
    D = ‖v − (ε − x0)‖² at x = (1−σ)x0 + σε as a mean over dimensions. With ρ = exp(log p − log p_old), both at the
    same ε, the loss is −min(ρA, clip(ρ, 1−ε, 1+ε)A). At v = v_old its gradient is A·w(σ)·∇D (p = 1): flow matching
    towards good endpoints, and away from bad endpoints.
    """
    target = (end.noisy_BNC - end.clean_BNC) / end.sigma  # ε − x0

    def lower_bound(velocity_BNC: Tensor) -> Tensor:
        distance_B = sample_mean((velocity_BNC - target) ** 2, end.panels) + DISTANCE_FLOOR
        return -WEIGHTS[options.weighting](end.sigma) * distance_B**options.power / options.power

    ratio_B = (lower_bound(end.velocity_BNC) - lower_bound(end.old_velocity_BNC)).exp()
    loss, metrics = clipped(ratio_B, end.advantage_B, clip_range=options.clip_range)
    moved = (end.velocity_BNC - end.old_velocity_BNC).detach()
    return loss, metrics | {"velocity_change": (moved**2).mean()}


AWM = ObjectiveSpec(Awm, awm, needs="endpoint")
