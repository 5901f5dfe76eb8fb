"""One step of a flow-matching sampler: stochastic, with its log-probability, or of the ODE dx/dσ = v.

The same functions serve sampling and training, in fp32. Time runs from σ = 1 (noise) to σ = 0 (image);
x is the latent at σ, x' at the next σ' < σ, v the velocity, a the noise level. `sigma_max` is the sampler's second
sigma, for an SDE whose noise is infinite at σ = 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pacorl.core.grid import Panels, sample_mean

if TYPE_CHECKING:
    from torch import Tensor


class Transition(NamedTuple):
    """The Gaussian that x' is drawn from."""

    mean_BNC: Tensor
    """Mean of x', one per latent token and channel."""
    std: float
    """Standard deviation of every dimension."""


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


def cps(
    x_BNC: Tensor, velocity_BNC: Tensor, *, sigma: float, sigma_next: float, noise_level: float, sigma_max: float
) -> Transition:
    """Coefficients-preserving sampling (arXiv 2509.05952): s = σ'·sin(aπ/2), mean = (1−σ')·x̂0 + √(σ'² − s²)·x̂1.

    The log-probability is the true Gaussian's; the published code leaves out 1/(2s²), so clip ranges differ. Where σ'
    is 0 it adds no noise (`check_sde_steps`).
    """
    std = sigma_next * math.sin(noise_level * math.pi / 2)
    clean = x_BNC - sigma * velocity_BNC
    noise = x_BNC + (1 - sigma) * velocity_BNC
    return Transition((1 - sigma_next) * clean + math.sqrt(sigma_next**2 - std**2) * noise, abs(std))


SDE_TYPES: Mapping[str, Callable[..., Transition]] = {"flow_sde": flow_sde, "cps": cps}
"""Value of `sampling.sde_type` → stochastic step."""


def check_sde_steps(sde_type: str, sde_steps: Sequence[int], *, steps: int, noise_level: float) -> None:
    """Check that an SDE adds noise at the steps that a config asks for.

    Raises:
        ValueError: if cps gets the last step, which has no noise, or a level beyond 1; the message names the key.
    """
    if sde_type != "cps":
        return
    if sde_steps[-1] == steps - 1:
        raise ValueError(
            "sampling.sde_steps: cps adds no noise at the last step, so it cannot be trained; leave it out"
        )
    if noise_level > 1:
        raise ValueError(f"sampling.noise_level {noise_level} is beyond 1, where all noise of cps is new; lower it")


def log_prob(next_latents_BNC: Tensor, transition: Transition, panels: Panels | None = None) -> Tensor:
    """Compute the (B,) Gaussian log-density of x', averaged (not summed) over tokens and channels, as in flow_grpo.

    With panels (B, N): at each token the mean over its panel.
    """
    scaled = (next_latents_BNC - transition.mean_BNC) / transition.std
    density = -0.5 * scaled**2 - math.log(transition.std) - 0.5 * math.log(2 * math.pi)
    return sample_mean(density, panels)


def kl(transition: Transition, reference: Transition, panels: Panels | None = None) -> Tensor:
    """Compute the (B,) KL divergence between two steps of equal std, averaged over dimensions; with panels (B, N).

    (μ − μ_ref)² / (2σ_t²·|dt|), with |dt| (the released codes leave it out).
    """
    difference = (transition.mean_BNC - reference.mean_BNC) / transition.std
    return 0.5 * sample_mean(difference**2, panels)


@dataclass(frozen=True, slots=True)
class Past:
    """Velocity and length of the earlier step."""

    velocity_BNC: Tensor
    length: float
    """σ' − σ, below 0."""


def euler(x_BNC: Tensor, velocity_BNC: Tensor, length: float, past: Past | None = None) -> Tensor:
    """x' = x + v·(σ' − σ)."""
    return x_BNC + velocity_BNC * length


def ab2(x_BNC: Tensor, velocity_BNC: Tensor, length: float, past: Past | None = None) -> Tensor:
    """Adams–Bashforth of second order for steps of unequal length; the first step is Euler's.

    x' = x + h·[(1 + r/2)·v − (r/2)·v₋], with r = h/h₋ (Hairer, Nørsett & Wanner, Solving ODEs I, §III.5).
    """
    if past is None:
        return euler(x_BNC, velocity_BNC, length)
    half = length / past.length / 2
    return x_BNC + length * ((1 + half) * velocity_BNC - half * past.velocity_BNC)


SOLVERS: Mapping[str, Callable[..., Tensor]] = {"euler": euler, "ab2": ab2}
"""Value of `sampling.suffix.solver` → function of the latent, its velocity, σ' − σ and the earlier step."""
