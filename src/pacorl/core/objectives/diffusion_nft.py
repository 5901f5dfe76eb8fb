"""DiffusionNFT: flow matching towards good endpoints and away from bad endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from pacorl.core.grid import sample_mean
from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec

if TYPE_CHECKING:
    from pacorl.core.objectives import Loss

WEIGHT_FLOOR = 1e-5
"""Least distance that is divided by, as released."""


class DiffusionNft(ObjectiveOptions):
    """Options of diffusion_nft."""

    name: Literal["diffusion_nft"] = "diffusion_nft"
    beta: float = Field(0.1, gt=0)
    """Distance of the implicit good and bad policies from the sampling policy."""


def diffusion_nft(end: Endpoint, options: DiffusionNft) -> Loss:
    """DiffusionNFT (arXiv 2509.16117), as released.

    With r = ½ + ½·clip(A, ±A_max)/A_max, the implicit good and bad policies v⁺ = βv + (1−β)v_old and
    v⁻ = (1+β)v_old − βv, and their guesses of the endpoint x̂0± = x − σv±, the loss is
    A_max·[r·‖x̂0⁺ − x0‖²/w⁺ + (1−r)·‖x̂0⁻ − x0‖²/w⁻]/β, where w± is the mean |x̂0± − x0| of the sample, detached.
    Norms are means over dimensions.
    """
    beta = options.beta
    limit = end.advantage_clip
    good_B = 0.5 + 0.5 * end.advantage_B.clamp(-limit, limit) / limit
    towards = beta * end.velocity_BNC + (1 - beta) * end.old_velocity_BNC
    away = (1 + beta) * end.old_velocity_BNC - beta * end.velocity_BNC
    distances = []
    for velocity_BNC in (towards, away):
        gap_BNC = end.noisy_BNC - end.sigma * velocity_BNC - end.clean_BNC
        # The detached distance gives near and far samples equal weight.
        weight_B = sample_mean(gap_BNC.detach().abs(), end.panels).clamp(min=WEIGHT_FLOOR)
        distances.append(sample_mean(gap_BNC**2, end.panels) / weight_B)
    towards_B, away_B = distances
    loss_B = limit * (good_B * towards_B + (1 - good_B) * away_B) / beta * end.used_B
    moved = (end.velocity_BNC - end.old_velocity_BNC).detach()
    return loss_B.mean(), {"velocity_change": (moved**2).mean()}


def lag(optimizer_step: int) -> float:
    """d = min(0.001·step, 0.5) of old ← d·old + (1−d)·trained (arXiv 2509.16117).

    Early on the sampling policy is the trained one. Later it lags behind, so that the loss does not contrast
    the newest update with itself.
    """
    return min(0.001 * optimizer_step, 0.5)


DIFFUSION_NFT = ObjectiveSpec(DiffusionNft, diffusion_nft, needs="endpoint", lag=lag)
