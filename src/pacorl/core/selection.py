"""Selection of an epoch's training samples: like advantages, a function of the whole epoch, equal on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field, model_validator

from pacorl.config.base import Section
from pacorl.core.advantages import group_mean, group_sum
from pacorl.types import Advantages, RewardTable


class Selection(Section):
    """Selection of training samples; by default all valid samples."""

    min_std: float = Field(0.0, ge=0)
    """Groups in which the std of Σ w_k·R^k is below it are dropped: what their samples differ by is the judge's noise,
    which dividing by the std would make as loud as any other group (Edit-R1, arXiv 2510.16888). 0 keeps all."""
    above_mean: float | None = None
    """Only groups whose mean is above it are dropped; any, unless it is given."""

    @model_validator(mode="after")
    def _drops_something(self) -> Selection:
        if self.above_mean is not None and not self.min_std:
            raise ValueError(
                f"above_mean {self.above_mean:g} has no effect without min_std; set min_std, or leave it out"
            )
        return self


def drop_alike_groups(
    values: Advantages, table: RewardTable, selection: Selection, *, weights: Sequence[float]
) -> Advantages:
    """Leave out groups whose scores are nearly alike.

    Args:
        values: the epoch's advantages.
        table: the rewards that they are of.
        selection: thresholds of alike groups.
        weights: one per reward, in the table's order.

    Returns:
        The advantages, with `kept_B` if any group was dropped, and `groups/alike`, how many.
    """
    if not selection.min_std:
        return values
    # The weighted sum of raw scores: an aggregate may have scaled the spread away.
    used_B = values.used_B
    group_B = table.group_B
    score_B = table.score_RB.new_tensor(weights) @ table.score_RB.nan_to_num()
    mean_B = group_mean(score_B, used_B, group_B)
    variance_B = group_mean((score_B - mean_B) ** 2, used_B, group_B)
    alike_B = (variance_B < selection.min_std**2) & (group_sum(used_B.double(), group_B) > 0)
    if selection.above_mean is not None:
        alike_B = alike_B & (mean_B > selection.above_mean)
    kept_used_B = used_B & ~alike_B
    stats = {
        "groups/alike": float(len(group_B[alike_B].unique())),
        "samples/used": float(kept_used_B.double().mean()),
    }
    kept_B = ~alike_B if alike_B.any() else None
    return replace(values, used_B=kept_used_B, kept_B=kept_B, stats={**values.stats, **stats})
