"""PaCo-Reward's weighted likelihood, the objective of the judge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def decision_weighted(
    log_prob_BL: Tensor, answer_BL: Tensor, *, alpha: float | None
) -> tuple[Tensor, dict[str, float]]:
    """PaCo-Reward's weighted likelihood (arXiv 2512.04784, §3.2), normalised per sample, mean over the batch.

    −[α log p(y₀) + (1−α)/(n−1) Σᵢ log p(yᵢ)] over the n tokens of an answer, the first of which is the decision. If
    the decision is the whole answer it has all the weight.

    Args:
        log_prob_BL: the log-probability of each token, read only at the answer's.
        answer_BL: whether a token belongs to the answer.
        alpha: the decision's weight; None weighs all tokens alike (1/n, plain SFT).

    Raises:
        ValueError: if a sample has no answer.
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
    reasons_B = (nll_BL * (answer_BL & ~first_BL)).detach().sum(1) / (count_B1[:, 0] - 1).clamp(min=1)
    return loss, {
        "decision_nll": float((nll_BL * first_BL).detach().sum(1).mean()),
        "reasons_nll": float(reasons_B.mean()),
    }
