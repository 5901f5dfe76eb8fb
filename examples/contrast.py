"""An objective of endpoints from outside the package; docs/python.md explains it."""

from typing import Literal

from pacorl.core.grid import sample_mean
from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec


class Contrast(ObjectiveOptions):
    """Flow matching towards good endpoints and away from bad endpoints."""

    name: Literal["contrast"] = "contrast"
    beta: float = 0.1


def contrast(end: Endpoint, options: Contrast):
    """DiffusionNFT (arXiv 2509.16117) on velocities, without its weights."""
    gap = end.old_velocity_BNC - (end.noisy_BNC - end.clean_BNC) / end.sigma  # v_old − (ε − x0)
    move = options.beta * (end.velocity_BNC - end.old_velocity_BNC)
    towards_B = sample_mean((gap + move) ** 2, end.panels)
    away_B = sample_mean((gap - move) ** 2, end.panels)

    good_B = 0.5 + 0.5 * (end.advantage_B / end.advantage_clip).clamp(-1, 1)
    loss_B = (good_B * towards_B + (1 - good_B) * away_B) / options.beta
    return (loss_B * end.used_B).mean(), {}


CONTRAST = ObjectiveSpec(Contrast, contrast, needs="endpoint")
