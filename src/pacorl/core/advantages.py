"""Advantages from rewards: each sample compared within its group (arXiv 2512.04784, §3.3).

Legend: B samples, R rewards, P panels. Everything is computed in fp64 on the whole epoch's table, on every rank alike.
The rewards of a sample make one score, which is then normalised in its group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from pacorl.config.base import Section
from pacorl.types import Advantages, RewardTable

if TYPE_CHECKING:
    from torch import Tensor

# One sample equals its mean: a comparison needs two.
MIN_VALID = 2
# A group with a smaller standard deviation is logged as one of equal rewards.
ZERO_STD = 1e-4
# Share of their size below which scores differ by rounding alone: an fp32 judge differs by 1e-7 over
# one image, from batch to batch.
ROUNDING = 1e-6
THRESHOLD = 0.2
"""Default of `AdvantageOptions.threshold`."""
# Least mean that a standard deviation is divided by.
MEAN_FLOOR = 1e-12
FLOORS = {"max": 1e-6, "add": 1e-4}
"""Values of `Floor`."""
Floor = Literal["none", "max", "add"]
"""Lower bound of the standard deviation in the normalisation, against magnified noise."""


class AdvantageOptions(Section):
    """Settings of advantages."""

    aggregate: Literal["log_tamed", "weighted_sum"] = "log_tamed"
    """The sum of a sample's rewards. log_tamed: rewards of large variation enter by log(1+R), the paper's Eq. 3 and 4.
    weighted_sum: all enter as they are."""
    threshold: float = THRESHOLD
    """δ of Eq. 4: log_tamed takes the logarithm of rewards whose std/mean over the epoch exceeds it."""
    credit: Literal["set", "panel"] | None = None
    """Scores from which a panel's tokens learn. set: those of the whole set. panel: the parts of them that contain the
    panel, such as its pairs and its text. Left out: panel if every reward has such parts and no prompt is an edit,
    else set, which is the paper's."""
    std: Literal["group", "global"] = "group"
    """Scope of the standard deviation in Eq. 2."""
    floor: Floor = "none"
    """Lower bound of the standard deviation. none: (r̂ − mean)/std, the paper's Eq. 2, and 0 for a group of equal
    rewards. max: …/max(std, 1e-6), as the released code. add: …/(std + 1e-4), as flow_grpo; nearly equal rewards then
    have little effect."""
    clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ±clip."""

    @model_validator(mode="after")
    def _threshold_has_an_effect(self) -> AdvantageOptions:
        if self.aggregate == "weighted_sum" and self.threshold != THRESHOLD:
            raise ValueError(
                f"threshold {self.threshold} is of aggregate log_tamed, and aggregate is weighted_sum; drop one of them"
            )
        return self


def advantages(table: RewardTable, options: AdvantageOptions, *, weights: Sequence[float]) -> Advantages:
    """Aggregate the rewards of each sample and normalise them in their groups.

    Args:
        weights: one per reward, in the table's order.

    Returns:
        One advantage per sample, and with panel credit one per panel. A sample with a missing reward is not used, nor
        is a group with fewer than `MIN_VALID` judged samples.
    """
    import torch  # here, since a config reads this file

    valid_B = table.valid_RB.all(0)
    valid_B = valid_B & (group_sum(valid_B.double(), table.group_B) >= MIN_VALID)
    # fp64 throughout: differences within a group may be below fp32's resolution. A missing score is 0 from here on.
    score_RB = table.score_RB.double().nan_to_num()
    weight_R = score_RB.new_tensor(weights)

    # r̂ = Σ_k w_k·R̄^k (Eq. 2, left), where R̄^k is log(1 + R^k) if it is tamed, and else R^k.
    threshold = options.threshold if options.aggregate == "log_tamed" else math.inf
    tamed_R = is_tamed(score_RB[:, valid_B], threshold)
    combined_B = weight_R @ log_tamed(score_RB).where(tamed_R[:, None], score_RB)

    divisor_B = group_divisor(combined_B, valid_B, table.group_B, std=options.std, floor=options.floor)
    value_B = group_centred(combined_B, valid_B, table.group_B) / divisor_B
    value_BP = None
    if options.credit == "panel" and table.part_RBP is not None:
        # The slope of a tamed reward is taken at its group's mean score.
        mean_RB = torch.stack([group_mean(score_B, valid_B, table.group_B) for score_B in score_RB])
        slope_RB = (1 / (1 + mean_RB.abs())).where(tamed_R[:, None], 1.0)
        value_BP = panel_advantages(
            table,
            options,
            combined_B=combined_B,
            weight_RB=weight_R[:, None] * slope_RB,
            valid_B=valid_B,
            set_divisor_B=divisor_B,
        )
    stats = _stats(table, valid_B, tamed_R)
    return Advantages(value_B.clamp(-options.clip, options.clip), valid_B, stats, value_BP)


def is_tamed(score_RB: Tensor, threshold: float) -> Tensor:
    """(R,) whether h, a reward's std/|mean| over the epoch's judged samples, exceeds δ (arXiv 2512.04784, Eq. 4)."""
    return coefficient_of_variation(score_RB) > threshold


def log_tamed(score_RB: Tensor) -> Tensor:
    """log(1 + R) of each reward (arXiv 2512.04784, Eq. 3)."""
    # The paper's rewards are never negative; the sign keeps the order of negative rewards.
    return score_RB.sign() * score_RB.abs().log1p()


def panel_advantages(
    table: RewardTable,
    options: AdvantageOptions,
    *,
    combined_B: Tensor,
    weight_RB: Tensor,
    valid_B: Tensor,
    set_divisor_B: Tensor,
) -> Tensor:
    """Compute the advantage of each panel from the parts of the scores that contain it.

    A set's score R^k is a sum of parts, such as a sixth of each pair's P(Yes). Its part R_p^k is the sum over those
    with panel p; the rest does not depend on the panel's tokens, so that it is a baseline: leaving it out changes no
    expectation, only variance. An aggregate r̂ = f(R^1, R^2, …) is taken to first order around the group's mean, so
    that panel p has r̂_p = Σ_k ∂f/∂R^k·R_p^k, with the slope 1/(1 + |mean R^k|) of a log-tamed reward. It is
    compared like r̂, and divided by the standard deviation of r̂, whose scale all panels share, or by its own if that is
    larger: sets may be nearly tied while their panels differ.

    Args:
        combined_B: r̂ of each set.
        weight_RB: w_k·∂f/∂R^k, equal within a group.
        valid_B: samples that are used.
        set_divisor_B: standard deviation of r̂, with its floor.

    Returns:
        (B, P) advantages.
    """
    # 1. Score of each panel.
    assert table.part_RBP is not None
    score_BP = (weight_RB[:, :, None] * table.part_RBP.nan_to_num()).sum(0)
    valid_BP = valid_B[:, None] & table.part_RBP.isfinite().all(0)

    # 2. Comparison in the group.
    set_mean_B = group_mean(combined_B, valid_B, table.group_B)
    value_BP = score_BP.new_empty(score_BP.shape)
    for panel, (score_B, judged_B) in enumerate(zip(score_BP.T, valid_BP.T, strict=True)):
        centred_B = group_centred(score_B, judged_B, table.group_B)
        # Around the sets' means: a standard deviation of the epoch contains the groups' differences.
        around_B = set_mean_B + centred_B
        own_divisor_B = group_divisor(around_B, judged_B, table.group_B, std=options.std, floor=options.floor)
        value_BP[:, panel] = centred_B / own_divisor_B.maximum(set_divisor_B)
    return value_BP.clamp(-options.clip, options.clip)


def _stats(table: RewardTable, valid_B: Tensor, tamed_R: Tensor) -> dict[str, float]:
    # Shares over the whole table, so that they exist even if no sample is used.
    stats = {
        "samples/used": float(valid_B.double().mean()),
        "samples/missing": float((~table.valid_RB).double().mean()),
    }
    if not valid_B.any():
        return stats

    # Of each reward.
    scores = table.score_RB[:, valid_B]
    spread_R = coefficient_of_variation(scores)
    for name, score_B, spread, tamed in zip(table.names, scores, spread_R, tamed_R, strict=True):
        std_B = group_std(score_B, valid_B[valid_B], table.group_B[valid_B])
        stats |= {
            f"reward/{name}/mean": float(score_B.mean()),
            f"reward/{name}/std": float(score_B.std(correction=0)),
            f"reward/{name}/cv": float(spread),
            f"reward/{name}/tamed": float(tamed),
            f"reward/{name}/zero_std_groups": float((std_B < ZERO_STD).double().mean()),
        }
    return stats


def group_centred(score_B: Tensor, valid_B: Tensor, group_B: Tensor) -> Tensor:
    """Subtract the group's mean over valid samples; 0 for invalid samples."""
    return (score_B - group_mean(score_B, valid_B, group_B)) * valid_B.double()


def group_divisor(
    score_B: Tensor, valid_B: Tensor, group_B: Tensor, *, std: Literal["group", "global"], floor: Floor
) -> Tensor:
    """Compute the standard deviation of valid samples, with its floor."""
    weight_B = valid_B.double()
    if std == "group":
        std_B = group_std(score_B, valid_B, group_B)
        size_B = group_mean(score_B**2, valid_B, group_B).sqrt()
    else:
        std_B = score_B.new_zeros(1) if not valid_B.any() else score_B[valid_B].std(correction=0)
        size_B = ((score_B**2 * weight_B).sum() / weight_B.sum().clamp(min=1)).sqrt()

    if floor == "max":
        return std_B.clamp(min=FLOORS["max"])
    if floor == "add":
        return std_B + FLOORS["add"]
    # Infinity if the std is rounding error: Eq. 2 would scale it to advantages of ±1.
    return std_B.masked_fill(std_B <= ROUNDING * size_B.clamp(min=ROUNDING), math.inf)


def coefficient_of_variation(score_RB: Tensor) -> Tensor:
    """Compute (R,) std/|mean| per reward; 0 if there are no scores, and large, never infinite, if their mean is 0."""
    if score_RB.shape[1] == 0:
        return score_RB.new_zeros(len(score_RB))
    return score_RB.std(1, correction=0) / score_RB.mean(1).abs().clamp(min=MEAN_FLOOR)


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Sum over each sample's group."""
    # Prompt ids are sparse, sums need indices from 0.
    _, index_B = group_B.unique(return_inverse=True)
    sums = value_B.new_zeros(int(index_B.max()) + 1 if len(index_B) else 0)
    return sums.index_add(0, index_B, value_B)[index_B]


def group_mean(score_B: Tensor, valid_B: Tensor, group_B: Tensor) -> Tensor:
    """Average over the valid samples of each sample's group; 0 for a group without any."""
    weight_B = valid_B.double()
    return group_sum(score_B * weight_B, group_B) / group_sum(weight_B, group_B).clamp(min=1)


def group_std(score_B: Tensor, valid_B: Tensor, group_B: Tensor) -> Tensor:
    """Compute the standard deviation over the valid samples of each sample's group."""
    return group_mean(group_centred(score_B, valid_B, group_B) ** 2, valid_B, group_B).sqrt()
