"""One stochastic step of a flow-matching sampler and its log-probability.

The same kernels serve sampling and training, in fp32. Time runs from σ = 1 (noise) to σ = 0 (picture);
x is the latent at σ, x' at the next σ' < σ, v the velocity, a the noise level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Transition(NamedTuple):
    """The Gaussian that x' is drawn from."""

    mean_BNC: Tensor
    std: float


def ode(x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float) -> Tensor:
    """Euler's step without noise."""
    return x_BNC + velocity_BNC * (sigma_next - sigma)


def flow_sde(
    x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
) -> Transition:
    """Flow-GRPO's SDE, which has the ODE's marginals (arXiv 2505.05470, Eq. 9; 2512.04784, Eq. 1).

    x' = x + [v + σ_t²/(2σ)·(x + (1−σ)v)]·dt + σ_t·√|dt|·ε with σ_t = a·√(σ/(1−σ)) and dt = σ' − σ.

    `sigma_max` stands for σ inside σ_t where σ is 1, so that σ_t stays finite: the sampler's second sigma.
    """
    dt = sigma_next - sigma
    diffusion = noise_level * math.sqrt(sigma / (1 - min(sigma, sigma_max)))
    drift = diffusion**2 / (2 * sigma)
    mean = x_BNC * (1 + drift * dt) + velocity_BNC * ((1 + drift * (1 - sigma)) * dt)
    return Transition(mean, diffusion * math.sqrt(-dt))


def cps(
    x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
) -> Transition:
    """Coefficients-preserving sampling (arXiv 2509.05952): noise that leaves the signal and noise shares intact.

    s = σ'·sin(aπ/2), mean = (1−σ')·x̂0 + √(σ'² − s²)·x̂1. Raises ValueError at σ' = 0, where it adds none.
    The log-probability is the true Gaussian's; the published code leaves out 1/(2s²), so clip ranges differ.
    """
    if sigma_next == 0:
        raise ValueError("cps adds no noise where the next sigma is 0; leave the last step out of sampling.sde_steps")
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = x_BNC - sigma * velocity_BNC
    noise = x_BNC + (1 - sigma) * velocity_BNC
    return Transition((1 - sigma_next) * clean + math.sqrt(sigma_next**2 - std**2) * noise, abs(std))


KERNELS: dict[str, Callable[..., Transition]] = {"flow_sde": flow_sde, "cps": cps}


def log_prob(next_latents_BNC: Tensor, transition: Transition) -> Tensor:
    """(B,) Gaussian log-density of x', averaged (not summed) over tokens and channels, as the field does."""
    scaled = (next_latents_BNC - transition.mean_BNC) / transition.std
    density = -0.5 * scaled**2 - math.log(transition.std) - 0.5 * math.log(2 * math.pi)
    return density.flatten(1).mean(1)


def kl(transition: Transition, reference: Transition) -> Tensor:
    """(B,) KL divergence between two steps of equal std, averaged over dimensions.

    (μ − μ_ref)² / (2σ_t²·|dt|), with |dt| (the released codes leave it out).
    """
    difference = (transition.mean_BNC - reference.mean_BNC) / transition.std
    return 0.5 * (difference**2).flatten(1).mean(1)
