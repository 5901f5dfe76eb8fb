"""Deterministic solvers of the sampling ODE dx/dσ = v: one step from σ to σ' < σ, by the velocities so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
