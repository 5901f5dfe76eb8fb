"""Flow-GRPO's SDE, which keeps the marginals of the ODE."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pacorl.core.sde import SdeSpec, Transition

if TYPE_CHECKING:
    from torch import Tensor


def flow_sde(
    x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
) -> Transition:
    """Flow-GRPO's SDE, which has the ODE's marginals (arXiv 2505.05470, Eq. 9; 2512.04784, Eq. 1).

    x' = x + [v + σ_t²/(2σ)·(x + (1−σ)v)]·dt + σ_t·√|dt|·ε with σ_t = a·√(σ/(1−σ)) and dt = σ' − σ.
    """
    dt = sigma_next - sigma
    # σ_t is infinite at σ = 1, so the first step takes the sampler's second sigma there, as the released code does.
    diffusion = noise_level * math.sqrt(sigma / (1 - min(sigma, sigma_max)))
    drift = diffusion**2 / (2 * sigma)
    mean = x_BNC * (1 + drift * dt) + velocity_BNC * ((1 + drift * (1 - sigma)) * dt)
    return Transition(mean, diffusion * math.sqrt(-dt))


FLOW_SDE = SdeSpec("flow_sde", flow_sde)
