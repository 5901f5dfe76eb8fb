"""Deterministic solvers of the sampling ODE dx/dσ = v: one step from σ to σ' < σ, by the velocities so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacorl.config.table import Table

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Past:
    """Velocity and length of the earlier step."""

    velocity_BNC: Tensor
    length: float
    """σ' − σ, below 0."""


@dataclass(frozen=True, slots=True)
class SolverSpec:
    """A solver: the value of `sampling.suffix.solver`."""

    name: str
    step: Callable[[Tensor, Tensor, float, Past | None], Tensor]
    """Function of the latent, its velocity, σ' − σ and the earlier step (None at first) to the next latent."""
    least_steps: int = 1

    def check(self, steps: int) -> None:
        """
        Raises:
            ValueError: if so few steps make it another solver.
        """
        if steps < self.least_steps:
            raise ValueError(
                f"sampling.suffix.solver {self.name} looks back one step, and the suffix has {steps}; give it "
                f"{self.least_steps} steps, or take solver euler"
            )


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


EULER = SolverSpec("euler", euler)
AB2 = SolverSpec("ab2", ab2, least_steps=2)

SOLVERS: Table[SolverSpec] = Table(
    "solver",
    {"euler": "pacorl.core.solvers:EULER", "ab2": "pacorl.core.solvers:AB2"},
    group="pacorl.solvers",
    key="name",
)
