"""Sums, means and standard deviations over the samples of one prompt, in fp64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from pacorl.config.base import Section

if TYPE_CHECKING:
    from torch import Tensor

ZERO_STD = 1e-4
"""A group with a smaller standard deviation is logged as one of equal rewards."""

ROUNDING = 1e-6
"""Scores whose standard deviation is a smaller share of their size are equal: a judge that answers in fp32 differs by
1e-7 over one image, from batch to batch."""

MEAN_FLOOR = 1e-12
"""Least mean that a standard deviation is divided by."""

FLOOR_VALUES = {"none": 0.0, "max": 1e-6, "add": 1e-4}
"""Form of the floor → its value unless one is given."""


class Floor(Section):
    """What keeps the division by a standard deviation from magnifying differences that mean nothing."""

    form: Literal["none", "max", "add"] = "none"
    """none: (r̂ − mean)/std, the paper's Eq. 2, and 0 for a group of equal rewards. max: …/max(std, value), as the
    released code. add: …/(std + value), as flow_grpo; nearly equal rewards then teach nearly nothing."""
    value: float = Field(0.0, ge=0)
    """max: 1e-6 unless it is given; add: 1e-4."""

    @model_validator(mode="before")
    @classmethod
    def _value_of_the_form(cls, section: Any) -> Any:
        if isinstance(section, dict) and section.get("form") in FLOOR_VALUES:
            return {"value": FLOOR_VALUES[section["form"]], **section}
        return section

    @model_validator(mode="after")
    def _none_has_no_value(self) -> Floor:
        if (self.form == "none") != (self.value == 0):
            fix = "leave value out, or take form max or add" if self.value else "set value above 0, or take form none"
            raise ValueError(f"form {self.form} with value {self.value:g} is no floor; {fix}")
        return self


NO_FLOOR = Floor()
"""The paper's: Eq. 2 divides by the standard deviation alone."""


def no_floor(std_B: Tensor, size_B: Tensor, value: float) -> Tensor:
    """The std itself (arXiv 2512.04784, Eq. 2), or infinity if it is rounding, so that equal rewards teach nothing.

    Args:
        std_B: the standard deviation that each sample is divided by.
        size_B: the root mean square of the scores that it was taken over.
        value: not used.
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
    count_B = group_sum(weight_B, group_B).clamp(min=1)
    centred_B = (score_B - group_sum(score_B * weight_B, group_B) / count_B) * weight_B
    if std == "group":
        std_B = (group_sum(centred_B**2, group_B) / count_B).sqrt()
        size_B = (group_sum(score_B**2 * weight_B, group_B) / count_B).sqrt()
    else:
        std_B = (
            score_B[valid_B].std(correction=0).expand_as(score_B) if valid_B.any() else score_B.new_zeros(len(score_B))
        )
        size_B = ((score_B**2 * weight_B).sum() / weight_B.sum().clamp(min=1)).sqrt().expand_as(score_B)
    return centred_B / FLOORS[floor.form](std_B, size_B, floor.value)


def coefficient_of_variation(score_RB: Tensor) -> Tensor:
    """(R,) std/|mean| per reward; 0 if there are no scores, and large, never infinite, if their mean is 0."""
    if score_RB.shape[1] == 0:
        return score_RB.new_zeros(len(score_RB))
    return score_RB.std(1, correction=0) / score_RB.mean(1).abs().clamp(min=MEAN_FLOOR)


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Each row's sum over its group."""
    _, index_B = group_B.unique(return_inverse=True)
    sums = value_B.new_zeros(int(index_B.max()) + 1 if len(index_B) else 0)
    return sums.index_add(0, index_B, value_B)[index_B]


def group_std(score_B: Tensor, group_B: Tensor) -> Tensor:
    """Each row's standard deviation over its group."""
    count_B = group_sum(score_B.new_ones(len(score_B)), group_B)
    centred_B = score_B - group_sum(score_B, group_B) / count_B
    return (group_sum(centred_B**2, group_B) / count_B).sqrt()


def zero_std_share(score_B: Tensor, group_B: Tensor) -> float:
    """The share of samples whose group's scores are all but equal."""
    return float((group_std(score_B, group_B) < ZERO_STD).double().mean())
