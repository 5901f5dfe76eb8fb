"""Rewards → advantages: how each sample compares with the others of its prompt (arXiv 2512.04784, §3.3).

Legend: B samples, R rewards. Everything is computed in fp64 on the whole epoch's table, on every rank alike.

An aggregate makes one score of a sample's rewards; the score is then normalised in its group. To add one, write its
options, its function and its `AggregateSpec` in a file here, and one line of `AGGREGATES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from pacorl.config.base import Section, Share
from pacorl.core.advantages.groups import (
    NO_FLOOR,
    Floor,
    coefficient_of_variation,
    group_std,
    group_sum,
    normalize_groups,
    zero_std_share,
)
from pacorl.core.table import Table
from pacorl.types import Advantages, RewardTable

if TYPE_CHECKING:
    from torch import Tensor

MIN_VALID = 2
"""A group with fewer judged samples is dropped: one sample is its own mean."""


class AggregateOptions(Section):
    """The settings that every aggregate has; an aggregate adds its own."""

    aggregate: str
    floor: Floor = NO_FLOOR
    clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ±clip."""
    max_missing: Share = 0.2
    """The failure budget: the run saves and stops if a larger share of an epoch's scores is missing."""

    @property
    def std_over(self) -> Literal["group", "global"]:
        """What the standard deviation of Eq. 2 is taken over: the sample's group, or the whole epoch."""
        return "group"


class GroupedOptions(AggregateOptions):
    """The settings of an aggregate that leaves the choice of the standard deviation to the user."""

    std: Literal["group", "global"] = "group"
    """What the standard deviation of Eq. 2 is taken over."""

    @property
    def std_over(self) -> Literal["group", "global"]:
        return self.std


@dataclass(frozen=True, slots=True)
class Scores:
    """What an aggregate sees: scores in which missing ones are 0, and which samples to read."""

    score_RB: Tensor
    valid_B: Tensor
    """False for samples that lack a reward, or whose group is too small."""
    group_B: Tensor
    weight_R: Tensor


def no_stats(scores: Scores, names: Sequence[str], options: Any) -> dict[str, float]:
    """Log nothing of its own."""
    return {}


@dataclass(frozen=True, slots=True)
class AggregateSpec:
    """An aggregate: the value of `advantages.aggregate`."""

    options: type[AggregateOptions]
    combine: Callable[[Scores, Any], Tensor]
    """From all scores and its own options to one score per sample, (B,)."""
    stats: Callable[[Scores, Sequence[str], Any], dict[str, float]] = no_stats
    """What it logs, from the scores, the rewards' names and its own options; called if any sample is valid."""


AGGREGATES: Table[AggregateSpec] = Table(
    "aggregate",
    {
        "log_tamed": "pacorl.core.advantages.log_tamed:LOG_TAMED",
        "weighted_sum": "pacorl.core.advantages.weighted_sum:WEIGHTED_SUM",
        "gdpo": "pacorl.core.advantages.gdpo:GDPO",
        "ranked": "pacorl.core.advantages.ranked:RANKED",
    },
)


def advantages(table: RewardTable, options: AggregateOptions, *, weights: Sequence[float]) -> Advantages:
    """Aggregate the rewards of each sample and normalise them in their groups.

    Args:
        table: every reward of every sample of an epoch.
        options: of one of `AGGREGATES`.
        weights: one per reward, in the table's order.

    Returns:
        One advantage per sample. A sample with a missing reward is not used, nor is a group with fewer than
        `MIN_VALID` judged samples.
    """
    spec = AGGREGATES[options.aggregate]
    valid_B = table.valid_RB.all(0)
    valid_B = valid_B & (group_sum(valid_B.double(), table.group_B) >= MIN_VALID)
    score_RB = table.score_RB.double().nan_to_num()
    scores = Scores(score_RB, valid_B, table.group_B, weight_R=score_RB.new_tensor(weights))
    combined_B = spec.combine(scores, options)
    value_B = normalize_groups(combined_B, valid_B, table.group_B, std=options.std_over, floor=options.floor)
    stats = _stats(table, valid_B, combined_B) | (spec.stats(scores, table.names, options) if valid_B.any() else {})
    return Advantages(value_B.clamp(-options.clip, options.clip), valid_B, stats)


def _stats(table: RewardTable, valid_B: Tensor, combined_B: Tensor) -> dict[str, float]:
    stats = {
        "samples/used": float(valid_B.double().mean()),
        "samples/missing": float((~table.valid_RB).double().mean()),
        "groups/dropped": float(len(table.group_B.unique()) - len(table.group_B[valid_B].unique())),
    }
    if not valid_B.any():
        return stats
    scores, group_B = table.score_RB[:, valid_B], table.group_B[valid_B]
    for name, score_B, spread in zip(table.names, scores, coefficient_of_variation(scores), strict=True):
        stats |= {
            f"reward/{name}/mean": float(score_B.mean()),
            f"reward/{name}/std": float(score_B.std(correction=0)),
            f"reward/{name}/cv": float(spread),
            f"reward/{name}/zero_std_groups": zero_std_share(score_B, group_B),
        }
    stats["advantage/zero_std_groups"] = zero_std_share(combined_B[valid_B], group_B)
    stats["advantage/group_std"] = float(group_std(combined_B[valid_B], group_B).mean())
    return stats | _ratios(table.names, scores)


def _ratios(names: Sequence[str], score_RB: Tensor) -> dict[str, float]:
    """The first reward's mean over each other's; by the first of them as `reward/ratio` too, the paper's plot.

    A mean of 0 has no ratio.
    """
    first, *others = score_RB.mean(1).tolist()
    ratios = {
        f"reward/{names[0]}_to_{name}": first / mean for name, mean in zip(names[1:], others, strict=True) if mean
    }
    return ({"reward/ratio": next(iter(ratios.values()))} if ratios else {}) | ratios
