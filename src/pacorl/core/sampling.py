"""How samples are drawn: the one declaration of the settings that a config, the rollout and the update share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from pacorl.config.base import Positive, Section
from pacorl.core.sde import SDE_TYPES
from pacorl.types import Size

SdeType = Annotated[str, AfterValidator(lambda name: SDE_TYPES.named(name).name)]
"""A key of `SDE_TYPES`."""


class SamplingSteps(Section):
    """The steps from noise to image, and which of them are stochastic."""

    steps: Positive
    sde_type: SdeType = "flow_sde"
    """The stochastic step: one of `core.sde.SDE_TYPES`."""
    noise_level: float = Field(0.7, gt=0)
    """a in σ_t = a·√(t/(1−t))."""
    sde_steps: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Indices of the sampling steps that are stochastic, and trained; for an objective of the endpoint, whose sampling
    is without noise, those whose sigmas endpoints are noised to."""
    shared_noise: bool = False
    """Whether all samples of a group start from one noise, so that they differ by the stochastic steps alone."""


class Sampler(SamplingSteps):
    """How the samples of one epoch, or images without noise, are drawn.

    Example:
        Sampler(size=Size(1024, 1024), steps=20)
    """

    size: Size
    """As the config says it; `Policy.size_of` makes it a prompt's."""
    stochastic: bool = True
    """Whether the trained steps add noise (paths), or sampling is the plain ODE (endpoints)."""
    keeps_means: bool = False
    """Whether the means of the stochastic steps are kept."""
    shift_size: Size | None = None
    """The size that the sigmas are shifted for, if it is not the sampled one."""
