"""Coefficients-preserving sampling: noise that leaves the shares of signal and noise as they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pacorl.core.sde import SdeSpec, Transition

if TYPE_CHECKING:
    from torch import Tensor


def cps(
    x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
) -> Transition:
    """Coefficients-preserving sampling (arXiv 2509.05952): s = σ'·sin(aπ/2), mean = (1−σ')·x̂0 + √(σ'² − s²)·x̂1.

    The log-probability is the true Gaussian's; the published code leaves out 1/(2s²), so clip ranges differ.

    Raises:
        ValueError: if σ' is 0, where it adds no noise.
    """
    if sigma_next == 0:
        raise ValueError("cps adds no noise where the next sigma is 0; leave the last step out of sampling.sde_steps")
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = x_BNC - sigma * velocity_BNC
    noise = x_BNC + (1 - sigma) * velocity_BNC
    return Transition((1 - sigma_next) * clean + math.sqrt(sigma_next**2 - std**2) * noise, abs(std))


def check_steps(sde_steps: Sequence[int], *, steps: int, noise_level: float) -> None:
    """Refuse the last step, which has no noise, and levels beyond 1.

    Raises:
        ValueError: if one is asked for.
    """
    if sde_steps[-1] == steps - 1:
        raise ValueError(
            "sampling.sde_steps: cps adds no noise at the last step, so it cannot be trained; leave it out"
        )
    if noise_level > 1:
        raise ValueError(f"sampling.noise_level {noise_level} is beyond 1, where all noise of cps is new; lower it")


CPS = SdeSpec("cps", cps, check_steps)
