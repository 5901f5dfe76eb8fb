"""Supervised flow matching: noise levels as in a checkpoint's training, and the squared error of the velocity."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pacorl.types import Conditioning, Size

if TYPE_CHECKING:
    from pacorl.models.policies.policy import Policy

LEVELS = 1000
"""Noise levels of the training schedule, as in diffusers' scripts."""


def draw_time(seed: int, density: Literal["uniform", "logit_normal"]) -> float:
    """Draw a position in 0..1 of the training schedule, from noise to image."""
    rng = random.Random(seed)
    if density == "uniform":
        return rng.random()
    return float(torch.tensor(rng.gauss(0.0, 1.0)).sigmoid())


def flow_matching_loss(
    policy: Policy, clean_BNC: Tensor, noise_BNC: Tensor, sigma_B: Tensor, conditioning: Conditioning, *, size: Size
) -> Tensor:
    """Compute (B,) ‖v(x_σ) − (ε − x0)‖² at x_σ = (1−σ)·x0 + σ·ε, as a mean over dimensions."""
    sigma_B11 = sigma_B[:, None, None]
    noisy_BNC = (1 - sigma_B11) * clean_BNC + sigma_B11 * noise_BNC
    velocity_BNC = policy.velocity(noisy_BNC, sigma_B, conditioning, size)
    return ((velocity_BNC - (noise_BNC - clean_BNC)) ** 2).mean((1, 2))
