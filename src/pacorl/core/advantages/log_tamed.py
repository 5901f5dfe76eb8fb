"""PaCo-GRPO's log-tamed sum, which limits rewards of large variation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from pacorl.core.advantages import AggregateSpec, Combined, GroupedOptions, Scores, coefficient_of_variation, group_mean

if TYPE_CHECKING:
    from torch import Tensor


class LogTamed(GroupedOptions):
    """Options of log_tamed."""

    aggregate: Literal["log_tamed"] = "log_tamed"
    threshold: float = 0.2
    """δ of Eq. 4: rewards whose std/mean exceeds it are passed through log(1+R)."""


def log_tamed(scores: Scores, options: LogTamed) -> Combined:
    """R̄^k = log(1 + R^k) if h^k > δ, else R^k; then the weighted sum (arXiv 2512.04784, Eq. 3 and 4).

    The slope of a tamed R̄^k is taken at the group's mean score: 1/(1 + |mean R^k|).
    """
    tamed_R = is_tamed(scores.score_RB[:, scores.valid_B], options.threshold)
    # The paper's rewards are never negative; the sign keeps the order of negative rewards.
    log_RB = scores.score_RB.sign() * scores.score_RB.abs().log1p()
    mean_RB = torch.stack([group_mean(score_B, scores.valid_B, scores.group_B) for score_B in scores.score_RB])
    return Combined(
        scores.weight_R @ log_RB.where(tamed_R[:, None], scores.score_RB),
        slope_RB=(1 / (1 + mean_RB.abs())).where(tamed_R[:, None], 1.0),
        metrics_R={"tamed": tamed_R},
    )


def is_tamed(score_RB: Tensor, threshold: float) -> Tensor:
    """(R,) whether h, a reward's std/|mean| over the epoch's judged samples, exceeds δ."""
    return coefficient_of_variation(score_RB) > threshold


LOG_TAMED = AggregateSpec(LogTamed, log_tamed)
