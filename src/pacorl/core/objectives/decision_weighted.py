"""PaCo-Reward's weighted likelihood, the objective of the judge, in its three published forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal["mean", "sum", "released"]


def decision_weighted(log_prob_BL: Tensor, answer_BL: Tensor, *, alpha: float | None, form: Form = "mean") -> Tensor:
    """PaCo-Reward's weighted likelihood (arXiv 2512.04784, §3.2).

    Over the n tokens of an answer, the first of which is the decision:

        mean      −[α log p(y₀) + (1−α)/(n−1) Σᵢ log p(yᵢ)], the paper's second version; mean over the batch
        sum       −[α log p(y₀) + (1−α) Σᵢ log p(yᵢ)], the article's; mean over the batch
        released  −[α log p(y₀) + (1−α) n/(n−1) Σᵢ log p(yᵢ)], summed and divided by the batch's tokens

    If the decision is the whole answer it has all the weight.

    Args:
        log_prob_BL: the log-probability of each token, read only at the answer's.
        answer_BL: whether a token belongs to the answer.
        alpha: the decision's weight; None weighs all tokens alike (plain SFT: 1/n each, 1 in the other forms).

    Raises:
        ValueError: if a sample has no answer.
    """
    count_B1 = answer_BL.sum(1, keepdim=True)
    if not count_B1.all():
        raise ValueError(f"sample {int((count_B1 == 0).nonzero()[0, 0])} of the batch has no answer tokens")
    # The decision is the first token of the answer: Yes or No.
    first_BL = answer_BL & (answer_BL.cumsum(1) == 1)
    n_B1 = count_B1.to(log_prob_BL.dtype)
    others_B1 = (n_B1 - 1).clamp(min=1)

    # Weights of the decision and of each further token.
    if alpha is None and form != "mean":
        decision_B1 = further_B1 = torch.ones_like(n_B1)
    else:
        equal_B1 = 1 / n_B1
        decision_B1 = equal_B1 if alpha is None else torch.full_like(n_B1, alpha).masked_fill(count_B1 == 1, 1.0)
        further_B1 = 1 - decision_B1
        if form != "sum":
            further_B1 = further_B1 / others_B1
        if form == "released":
            further_B1 = further_B1 * n_B1
    weight_BL = torch.where(first_BL, decision_B1, further_B1) * answer_BL

    nll_BL = -log_prob_BL.masked_fill(~answer_BL, 0.0)
    return (weight_BL * nll_BL).sum(1).sum() / items_of(answer_BL, form=form)


def items_of(answer_BL: Tensor, *, form: Form) -> int:
    """Return the divisor of a form's loss: the answers' tokens if `released`, else the samples."""
    return int(answer_BL.sum()) if form == "released" else len(answer_BL)
