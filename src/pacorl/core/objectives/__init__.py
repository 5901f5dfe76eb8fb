"""Training objectives of a policy, each in its own file, and their inputs.

An objective is one function from a batch to (loss, metrics), after the equation of its paper. A metric may stay a
tensor of one number: all of an update are read together, so that no batch waits for the card. It sees either the path
that a sample took, one stochastic step at a time (`Step`), or the sample's endpoint alone (`Endpoint`). Losses are
means over the batch; excluded samples have weight 0.

With panel credit (`panels`) log-probabilities, advantages and `used_B` are (B, N): each token has its panel's value.
Losses are then means over tokens too. Distances of latents are averaged by `core.grid.sample_mean`.

To add one, write its options, its function and its `ObjectiveSpec` in a file here, as in `awm`, and one line of
`OBJECTIVES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pacorl.config.base import Section
from pacorl.config.table import Table
from pacorl.config.user_files import blamed_on_code

if TYPE_CHECKING:
    from torch import Tensor

    from pacorl.core.grid import Panels
    from pacorl.core.sde import Transition

    Metric = float | Tensor
    Loss = tuple[Tensor, dict[str, Metric]]

RATIO_DEVIATION = "ratio_deviation"
"""Metric of objectives with a clipped ratio: its largest distance from 1, logged per step."""


class ObjectiveOptions(Section):
    """Settings common to all objectives; a subclass adds its own."""

    name: str
    """Name of the objective, a `Literal` in each subclass."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the divergence from the base, which has a forward of its own only above 0."""

    @property
    def ratio_tolerance(self) -> float:
        """Deviation of the ratio from 1 before the first update, above which the run warns."""
        return math.inf


@dataclass(frozen=True, slots=True)
class Step:
    """One stochastic step of a batch: as the trained policy sees it, and as it was sampled."""

    transition: Transition
    """Transition of the trained policy: `mean_BNC`, with its gradient, and `std`, a number."""
    log_prob_B: Tensor
    """Log-probability of the sampled step under the trained policy, a mean over its N·C dimensions: (B,). With `panels`
    (B, N): each token has the mean over its panel."""
    old_log_prob_B: Tensor
    """Log-probability of the same step under the sampling policy, without a gradient, of equal shape."""
    old_mean_BNC: Tensor | None
    """Mean of the transition that was sampled from; None unless the spec has `keeps_means`."""
    dt: float
    """σ' − σ, below 0: σ falls from 1, noise, to 0."""
    advantage_B: Tensor
    """(B,), or with `panels` (B, N); 0 for excluded samples."""
    panels: Panels | None = None
    """Panels with a ratio and an advantage of their own (`advantages.credit: panel`); None if the set has one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Sampled endpoints that were noised again to `sigma`, x = (1−σ)·x0 + σ·ε, and two policies' velocities there.

    The loss is called once per batch and step of `sampling.sde_steps`, which names the noise levels.
    """

    clean_BNC: Tensor
    """x0."""
    noisy_BNC: Tensor
    """x."""
    sigma: float
    """Noise level, above 0, equal for the batch; of the checkpoint's own training schedule."""
    velocity_BNC: Tensor
    """Velocity of the trained policy, with its gradient; flow matching's target is ε − x0 = (x − x0)/σ."""
    old_velocity_BNC: Tensor
    """Velocity of the sampling policy, without a gradient."""
    advantage_B: Tensor
    """(B,), or with `panels` (B, N)."""
    advantage_clip: float
    """The largest size of an advantage (advantages.clip)."""
    used_B: Tensor
    """False for excluded samples, whose loss must be 0; of the advantage's shape."""
    panels: Panels | None = None
    """Panels as in `Step`."""


@dataclass(frozen=True, slots=True)
class ObjectiveSpec:
    """An objective: its options, its loss and the loss's inputs."""

    options: type[ObjectiveOptions]
    """Class of the options."""
    loss: Callable[[Any, Any], Loss]
    """Function of a `Step` (path) or an `Endpoint`, and the options."""
    needs: Literal["path", "endpoint"]
    """path: the loss gets a `Step`, one per stochastic step, which training replays. endpoint: it gets an `Endpoint`,
    and sampling is by weights of its own, without noise except to branch a tree."""
    keeps_means: bool = False
    """Whether rollouts keep the means of their steps for `Step.old_mean_BNC`, which costs memory."""
    lag: Callable[[int], float] | None = None
    """Optimizer steps so far → share d of old ← d·old + (1−d)·trained, by which the sampling policy of an endpoint
    objective follows after each epoch; None if each epoch is sampled by the trained policy itself."""


OBJECTIVES: Table[ObjectiveSpec] = Table(
    "objective",
    {
        "grpo_clip": "pacorl.core.objectives.grpo_clip:GRPO_CLIP",
        "grpo_guard": "pacorl.core.objectives.grpo_guard:GRPO_GUARD",
        "diffusion_nft": "pacorl.core.objectives.diffusion_nft:DIFFUSION_NFT",
        "awm": "pacorl.core.objectives.awm:AWM",
    },
    key="name",
    is_open=True,
)


def objective_loss(batch: Step | Endpoint, options: ObjectiveOptions) -> Loss:
    """Compute the loss of the options' objective. Raises ValueError in one line for a user's own that fails."""
    spec = OBJECTIVES[options.name]
    if options.name not in OBJECTIVES.users:
        return spec.loss(batch, options)
    with blamed_on_code("objective", options.name):
        loss, metrics = spec.loss(batch, options)
        return loss, metrics
