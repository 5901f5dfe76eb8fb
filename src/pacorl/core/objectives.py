"""What a policy minimises. Each objective takes log-probabilities of one trained step and returns (loss, metrics)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Loss = tuple[Tensor, dict[str, float]]


def grpo_clip(log_prob_B: Tensor, old_log_prob_B: Tensor, advantage_B: Tensor, *, clip_range: float) -> Loss:
    """Flow-GRPO's clipped objective (arXiv 2505.05470; 2512.04784, Eq. 1).

    −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over the batch, with ρ = exp(log p − log p_old). Log-probabilities are means
    over dimensions, so the clip range is small (1e-4 in the paper).
    """
    ratio_B = torch.exp(log_prob_B - old_log_prob_B)
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()
    deviation_B = (ratio_B.detach() - 1).abs()
    return loss, {
        "ratio_deviation": float(deviation_B.max()),
        "clip_fraction": float((deviation_B > clip_range).double().mean()),
    }


OBJECTIVES: dict[str, Callable[..., Loss]] = {"grpo_clip": grpo_clip}
