"""PaCo-GRPO's log-tamed sum: a reward that varies too much must not outvote the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pacorl.core.advantages import AggregateSpec, GroupedOptions, Scores
from pacorl.core.advantages.groups import coefficient_of_variation

if TYPE_CHECKING:
    from torch import Tensor

Threshold = float | Literal["mean", "median"]


class LogTamed(GroupedOptions):
    """Options of log_tamed."""

    aggregate: Literal["log_tamed"] = "log_tamed"
    threshold: Threshold = 0.2
    """δ of Eq. 4: rewards whose std/mean exceeds it are passed through log(1+R)."""


def log_tamed(scores: Scores, options: LogTamed) -> Tensor:
    """R̄^k = log(1 + R^k) if h^k > δ, else R^k; then the weighted sum (arXiv 2512.04784, Eq. 3 and 4).

    h^k = std/|mean| of reward k over all judged samples of the epoch. Rewards that may be negative use
    sign(R)·log(1+|R|), which is the same on the paper's domain and keeps the order off it.
    """
    tamed_R = is_tamed(scores.score_RB[:, scores.valid_B], options.threshold)
    log_RB = scores.score_RB.sign() * scores.score_RB.abs().log1p()
    return scores.weight_R @ log_RB.where(tamed_R[:, None], scores.score_RB)


def is_tamed(score_RB: Tensor, threshold: Threshold) -> Tensor:
    """(R,) whether a reward varies by more than δ: a number, or the mean or median of all h."""
    spread_R = coefficient_of_variation(score_RB)
    if isinstance(threshold, str):
        return spread_R > {"mean": spread_R.mean(), "median": spread_R.quantile(0.5)}[threshold]
    return spread_R > threshold


def stats(scores: Scores, names: Sequence[str], options: LogTamed) -> dict[str, float]:
    """Which rewards were tamed."""
    tamed_R = is_tamed(scores.score_RB[:, scores.valid_B], options.threshold)
    return {f"reward/{name}/tamed": float(tamed) for name, tamed in zip(names, tamed_R, strict=True)}


LOG_TAMED = AggregateSpec(LogTamed, log_tamed, stats)
