"""One stochastic step of a flow-matching sampler and its log-probability: the types of SDE, each in its own file.

The same functions serve sampling and training, in fp32. Time runs from σ = 1 (noise) to σ = 0 (image);
x is the latent at σ, x' at the next σ' < σ, v the velocity, a the noise level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pacorl.config.table import Table
from pacorl.core.panels import Panels, sample_mean

if TYPE_CHECKING:
    from torch import Tensor


class Transition(NamedTuple):
    """The Gaussian that x' is drawn from."""

    mean_BNC: Tensor
    """Mean of x', one per latent token and channel."""
    std: float
    """Standard deviation of every dimension."""


class TransitionOf(Protocol):
    """The stochastic step of one type of SDE."""

    def __call__(
        self,
        x_BNC: Tensor,
        velocity_BNC: Tensor,
        *,
        sigma: float,
        sigma_next: float,
        noise_level: float,
        sigma_max: float,
    ) -> Transition:
        """
        Args:
            x_BNC: the latent at `sigma`.
            velocity_BNC: the policy's velocity there.
            sigma: σ, at most 1.
            sigma_next: σ' < σ.
            noise_level: a.
            sigma_max: the sampler's second sigma, for an SDE whose noise is infinite at σ = 1.
        """


class CheckSteps(Protocol):
    """Whether an SDE can take the steps that a config asks for."""

    def __call__(self, sde_steps: Sequence[int], *, steps: int, noise_level: float) -> None:
        """
        Raises:
            ValueError: if it cannot; the message names the key of `sampling` and the fix.
        """


def any_steps(sde_steps: Sequence[int], *, steps: int, noise_level: float) -> None:
    """Accept every step and level."""


@dataclass(frozen=True, slots=True)
class SdeSpec:
    """A type of SDE: the value of `sampling.sde_type`."""

    name: str
    transition: TransitionOf
    check: CheckSteps = any_steps


SDE_TYPES: Table[SdeSpec] = Table(
    "sde_type",
    {"flow_sde": "pacorl.core.sde.flow_sde:FLOW_SDE", "cps": "pacorl.core.sde.cps:CPS"},
    group="pacorl.sde_types",
    key="name",
)


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
