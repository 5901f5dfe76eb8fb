"""Rewards → advantages: how each sample compares with the others of its prompt (arXiv 2512.04784, §3.3).

Legend: B samples, R rewards. Everything is computed in fp64 on the whole epoch's table, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pacorl.types import Advantages, RewardTable

ZERO_STD = 1e-4
"""A group with a smaller standard deviation is logged as one of equal rewards."""

ROUNDING = 1e-6
"""Scores whose standard deviation is a smaller share of their size are equal: a judge that answers in fp32 differs by
1e-7 over one image, from batch to batch."""

MEAN_FLOOR = 1e-12
"""Least mean that a standard deviation is divided by."""

Threshold = float | Literal["mean", "median"]


@dataclass(frozen=True, slots=True)
class Floor:
    """What keeps the division by a standard deviation from magnifying differences that mean nothing."""

    form: Literal["none", "max", "add"] = "none"
    """A key of `FLOORS`."""
    value: float = 0.0


NO_FLOOR = Floor()
"""The paper's: Eq. 2 divides by the standard deviation alone."""


def advantages(
    table: RewardTable,
    *,
    weights: Sequence[float],
    aggregate: str = "log_tamed",
    threshold: Threshold = 0.2,
    std: Literal["group", "global"] = "group",
    floor: Floor = NO_FLOOR,
    clip: float = 5.0,
    min_valid: int = 2,
) -> Advantages:
    """Aggregates the rewards of each sample and normalises them in their groups.

    A sample with a missing reward is not used, nor is a group with fewer than `min_valid` judged samples.
    """
    valid_B = table.valid_RB.all(0)
    valid_B = valid_B & (_group_sum(valid_B.double(), table.group_B) >= min_valid)
    tamed = table.score_RB.double().nan_to_num()
    combined_B = AGGREGATES[aggregate](tamed, valid_B, table.group_B, weights=weights, threshold=threshold, floor=floor)
    scale: Literal["group", "global"] = "global" if aggregate == "gdpo" else std
    value_B = normalize_groups(combined_B, valid_B, table.group_B, std=scale, floor=floor).clamp(-clip, clip)
    stats = _stats(table, valid_B, combined_B)
    if aggregate == "log_tamed" and valid_B.any():
        tamed_R = is_tamed(table.score_RB[:, valid_B], threshold)
        stats |= {f"reward/{name}/tamed": float(tamed) for name, tamed in zip(table.names, tamed_R, strict=True)}
    return Advantages(value_B, valid_B, stats)


def weighted_sum(
    score_RB: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    weights: Sequence[float],
    threshold: Threshold,
    floor: Floor = NO_FLOOR,
) -> Tensor:
    """r̂ = Σ_k w_k·R^k (Eq. 2, left)."""
    return torch.tensor(weights, dtype=score_RB.dtype) @ score_RB


def log_tamed(
    score_RB: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    weights: Sequence[float],
    threshold: Threshold,
    floor: Floor = NO_FLOOR,
) -> Tensor:
    """R̄^k = log(1 + R^k) where h^k > δ, else R^k; then the weighted sum (Eq. 3 and 4).

    h^k = std/|mean| of reward k over all judged samples of the epoch. Rewards that may be negative use
    sign(R)·log(1+|R|), which is the same on the paper's domain and keeps the order off it.
    """
    tamed_R = is_tamed(score_RB[:, valid_B], threshold)
    tamed_RB = torch.where(tamed_R[:, None], score_RB.sign() * score_RB.abs().log1p(), score_RB)
    return weighted_sum(tamed_RB, valid_B, group_B, weights=weights, threshold=threshold)


def is_tamed(score_RB: Tensor, threshold: Threshold) -> Tensor:
    """(R,) whether a reward varies by more than δ: a number, or the mean or median of all h."""
    spread_R = coefficient_of_variation(score_RB)
    if isinstance(threshold, str):
        return spread_R > {"mean": spread_R.mean(), "median": spread_R.quantile(0.5)}[threshold]
    return spread_R > threshold


def ranked(
    score_RB: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    weights: Sequence[float],
    threshold: Threshold,
    floor: Floor = NO_FLOOR,
) -> Tensor:
    """Each reward's rank in its group, from −1 (worst) to 1 (best), then the weighted sum.

    Only the order counts: no outlier, scale or monotone change of a reward moves anything. Equals share the mean of
    their ranks, (#worse − #better)/(n − 1); a group of one has rank 0.
    """
    together_BB = (group_B[:, None] == group_B) & valid_B[:, None] & valid_B
    count_B = (together_BB.sum(1) - 1).clamp(min=1)
    order_RBB = (score_RB[:, :, None] - score_RB[:, None, :]).sign() * together_BB
    return weighted_sum(order_RBB.sum(2) / count_B, valid_B, group_B, weights=weights, threshold=threshold)


def gdpo(
    score_RB: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    weights: Sequence[float],
    threshold: Threshold,
    floor: Floor = NO_FLOOR,
) -> Tensor:
    """Each reward normalised in its group before the sum, so that no reward's scale decides (GDPO).

    The sum is then divided by its std over the whole batch, whatever `std` says.
    """
    normal_RB = torch.stack([normalize_groups(score_B, valid_B, group_B, floor=floor) for score_B in score_RB])
    return weighted_sum(normal_RB, valid_B, group_B, weights=weights, threshold=threshold)


AGGREGATES: dict[str, Callable[..., Tensor]] = {
    "weighted_sum": weighted_sum,
    "log_tamed": log_tamed,
    "gdpo": gdpo,
    "ranked": ranked,
}


def no_floor(std_B: Tensor, size_B: Tensor, value: float) -> Tensor:
    """The std itself (arXiv 2512.04784, Eq. 2), or infinity if it is rounding, so that equal rewards teach nothing.

    Args:
        std_B: The standard deviation that each sample is divided by.
        size_B: The root mean square of the scores that it was taken over.
        value: Not used.
    """
    return std_B.masked_fill(std_B <= ROUNDING * size_B.clamp(min=ROUNDING), math.inf)


def least_std(std_B: Tensor, size_B: Tensor, value: float) -> Tensor:
    """max(std, value): the released code, with 1e-6."""
    return std_B.clamp(min=value)


def added_std(std_B: Tensor, size_B: Tensor, value: float) -> Tensor:
    """std + value: flow_grpo, with 1e-4. Nearly equal rewards teach nearly nothing."""
    return std_B + value


FLOORS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "none": no_floor,
    "max": least_std,
    "add": added_std,
}


def normalize_groups(
    score_B: Tensor,
    valid_B: Tensor,
    group_B: Tensor,
    *,
    std: Literal["group", "global"] = "group",
    floor: Floor = NO_FLOOR,
) -> Tensor:
    """(r̂ − mean of its group) / std under its floor, over judged samples; 0 for the others (Eq. 2, right)."""
    weight_B = valid_B.double()
    count_B = _group_sum(weight_B, group_B).clamp(min=1)
    centred_B = (score_B - _group_sum(score_B * weight_B, group_B) / count_B) * weight_B
    if std == "group":
        std_B = (_group_sum(centred_B**2, group_B) / count_B).sqrt()
        size_B = (_group_sum(score_B**2 * weight_B, group_B) / count_B).sqrt()
    else:
        std_B = score_B[valid_B].std(correction=0).expand_as(score_B) if valid_B.any() else torch.zeros_like(score_B)
        size_B = ((score_B**2 * weight_B).sum() / weight_B.sum().clamp(min=1)).sqrt().expand_as(score_B)
    return centred_B / FLOORS[floor.form](std_B, size_B, floor.value)


def coefficient_of_variation(score_RB: Tensor) -> Tensor:
    """(R,) std/|mean| per reward; 0 where there are no scores, and large, never infinite, where their mean is 0."""
    if score_RB.shape[1] == 0:
        return torch.zeros(len(score_RB), dtype=score_RB.dtype)
    return score_RB.std(1, correction=0) / score_RB.mean(1).abs().clamp(min=MEAN_FLOOR)


def _group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Each row's sum over its group."""
    _, place_B = torch.unique(group_B, return_inverse=True)
    sums = torch.zeros(int(place_B.max()) + 1 if len(place_B) else 0, dtype=value_B.dtype)
    return sums.index_add(0, place_B, value_B)[place_B]


def _stats(table: RewardTable, valid_B: Tensor, combined_B: Tensor) -> dict[str, float]:
    stats = {
        "samples/used": float(valid_B.double().mean()),
        "samples/missing": float((~table.valid_RB).double().mean()),
        "groups/dropped": float(len(table.group_B.unique()) - len(table.group_B[valid_B].unique())),
    }
    if not valid_B.any():
        return stats
    scores = table.score_RB[:, valid_B]
    for name, score_B, spread in zip(table.names, scores, coefficient_of_variation(scores), strict=True):
        stats |= {
            f"reward/{name}/mean": float(score_B.mean()),
            f"reward/{name}/std": float(score_B.std(correction=0)),
            f"reward/{name}/cv": float(spread),
            f"reward/{name}/zero_std_groups": _zero_std_groups(score_B, table.group_B[valid_B]),
        }
    group_std_B = _group_std(combined_B[valid_B], table.group_B[valid_B])
    stats["advantage/zero_std_groups"] = _zero_std_groups(combined_B[valid_B], table.group_B[valid_B])
    stats["advantage/group_std"] = float(group_std_B.mean())
    return stats | _ratios(table.names, scores)


def _ratios(names: Sequence[str], score_RB: Tensor) -> dict[str, float]:
    """The first reward's mean over each other's; by the first of them as `reward/ratio` too, the paper's plot.

    Left out where a mean is 0.
    """
    first, *others = score_RB.mean(1).tolist()
    ratios = {
        f"reward/{names[0]}_to_{name}": first / mean for name, mean in zip(names[1:], others, strict=True) if mean
    }
    return ({"reward/ratio": next(iter(ratios.values()))} if ratios else {}) | ratios


def _zero_std_groups(score_B: Tensor, group_B: Tensor) -> float:
    """The share of samples whose group's scores are all but equal."""
    return float((_group_std(score_B, group_B) < ZERO_STD).double().mean())


def _group_std(score_B: Tensor, group_B: Tensor) -> Tensor:
    """Each row's standard deviation over its group."""
    count_B = _group_sum(torch.ones_like(score_B), group_B)
    centred_B = score_B - _group_sum(score_B, group_B) / count_B
    return (_group_sum(centred_B**2, group_B) / count_B).sqrt()
