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


def decision_weighted(log_prob_BL: Tensor, answer_BL: Tensor, *, alpha: float | None) -> Loss:
    """PaCo-Reward's weighted likelihood (arXiv 2512.04784, §3.2), normalised per sample, mean over the batch.

    −[α log p(y₀) + (1−α)/(n−1) Σᵢ log p(yᵢ)] over the n tokens of an answer, the first of which is the decision.
    `alpha=None` weighs all tokens alike (1/n, plain SFT). Where the decision is the whole answer it has all the weight.
    `log_prob_BL` is the log-probability of each token, read only where `answer_BL` is True. Raises ValueError where a
    sample has no answer.
    """
    count_B1 = answer_BL.sum(1, keepdim=True)
    if not count_B1.all():
        raise ValueError(f"sample {int((count_B1 == 0).nonzero()[0, 0])} of the batch has no answer tokens")
    first_BL = answer_BL & (answer_BL.cumsum(1) == 1)
    equal_B1 = 1 / count_B1.to(log_prob_BL.dtype)
    alpha_B1 = equal_B1 if alpha is None else torch.full_like(equal_B1, alpha).masked_fill(count_B1 == 1, 1.0)
    weight_BL = torch.where(first_BL, alpha_B1, (1 - alpha_B1) / (count_B1 - 1).clamp(min=1)) * answer_BL
    nll_BL = -log_prob_BL.masked_fill(~answer_BL, 0.0)
    loss = (weight_BL * nll_BL).sum(1).mean()
    rest_B = (nll_BL * (answer_BL & ~first_BL)).detach().sum(1) / (count_B1[:, 0] - 1).clamp(min=1)
    return loss, {
        "decision_nll": float((nll_BL * first_BL).detach().sum(1).mean()),
        "reasons_nll": float(rest_B.mean()),
    }


OBJECTIVES: dict[str, Callable[..., Loss]] = {"grpo_clip": grpo_clip}
