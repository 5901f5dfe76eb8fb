"""Which of an epoch's samples are trained on: like advantages, a function of the whole epoch, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from pacorl.config.base import Positive, Section
from pacorl.core.advantages import group_mean, group_sum
from pacorl.core.sampling import Suffix, Tree
from pacorl.types import Advantages, RewardTable

if TYPE_CHECKING:
    from torch import Tensor


class Scouts(Section):
    """Samples that are finished cheaply and judged, so that only the best and the worst are drawn as they should be."""

    per_prompt: Positive
    """How many; `group_size` of them are kept, the best half and the worst. `sampling.tree` is then that of so many."""
    suffix: Suffix
    """How they are finished, in the keys of `sampling.suffix`; `check_every` says nothing here, since each epoch logs
    `scouts/correlation`."""

    def check(self, tree: Tree, *, group_size: int, full: Suffix) -> None:
        """
        Args:
            tree: of the scouts of a prompt.
            group_size: how many of them are kept.
            full: the suffix of the samples that are trained on.

        Raises:
            ValueError: if they cannot be scouts of such a run; the message names the key and the fix.
        """
        if self.per_prompt <= group_size:
            raise ValueError(
                f"selection.scouts.per_prompt {self.per_prompt} leaves nothing to choose for group_size {group_size}; "
                "raise it, or leave the scouts out"
            )
        if group_size % 2:
            raise ValueError(
                f"selection.scouts keeps as many of the best as of the worst, and group_size {group_size} is odd; "
                "make it even"
            )
        if self.suffix.says == full.says:
            raise ValueError(
                "selection.scouts.suffix is that of the samples themselves, which would be drawn twice; give it fewer "
                "steps, another solver or a cache"
            )
        if tree.seeds not in (1, tree.group_size) or tree.leaves(1) > 1:
            raise ValueError(
                f"selection.scouts keeps single samples, which leaves subtrees of {tree.seeds} seeds and branches "
                f"{list(tree.branches)} of unequal size; set sampling.tree.seeds to 1 and branch at the first SDE step "
                f"alone, or to {tree.group_size}, for samples with their own noise"
            )


class Selection(Section):
    """Which samples are trained on; by default all that were judged."""

    scouts: Scouts | None = None
    """Sol-RL's two stages (arXiv 2604.06916): many samples are scouted, few are trained on."""

    min_std: float = Field(0.0, ge=0)
    """Groups in which the std of Σ w_k·R^k is below it are dropped: what their samples differ by is the judge's noise,
    which dividing by the std would make as loud as any other group (Edit-R1, arXiv 2510.16888). 0 keeps all."""
    above_mean: float | None = None
    """Only groups whose mean is above it are dropped; any, unless it is given."""

    @model_validator(mode="after")
    def _drops_something(self) -> Selection:
        if self.above_mean is not None and not self.min_std:
            raise ValueError(
                f"above_mean {self.above_mean:g} says nothing without min_std; set min_std, or leave it out"
            )
        return self


def drop_alike_groups(
    values: Advantages, table: RewardTable, selection: Selection, *, weights: Sequence[float]
) -> Advantages:
    """Leave out groups whose scores are nearly alike.

    Args:
        values: the epoch's advantages.
        table: the rewards that they are of.
        selection: says which groups are alike.
        weights: one per reward, in the table's order.

    Returns:
        The advantages, with `kept_B` if any group was dropped, and `groups/alike`, how many.
    """
    if not selection.min_std:
        return values
    used_B, group_B = values.used_B, table.group_B
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


def best_and_worst(values: Advantages, *, drawn: int, keep: int) -> list[int]:
    """The rows of each group's best half and worst half, in order; of equals the earlier rows are the worse.

    Args:
        values: the scouts' advantages, by global row.
        drawn: scouts per group.
        keep: how many stay, an even number. A group with fewer judged ones is filled with such as were not judged.
    """
    rows: list[int] = []
    for first in range(0, len(values.value_B), drawn):
        group = range(first, first + drawn)
        judged = sorted((row for row in group if values.used_B[row]), key=lambda row: float(values.value_B[row]))
        extremes = judged if len(judged) <= keep else [*judged[: keep // 2], *judged[-keep // 2 :]]
        spare = [row for row in group if not values.used_B[row]][: keep - len(extremes)]
        rows += sorted([*extremes, *spare])
    return rows


def by_row(values: Advantages, rows: Sequence[int]) -> Advantages:
    """Advantages in the order of some global rows → by global row; rows that are not among them are not used."""

    def spread(value_XB: Tensor) -> Tensor:
        spread_XB = value_XB.new_zeros(*value_XB.shape[:-1], rows[-1] + 1)
        spread_XB[..., list(rows)] = value_XB
        return spread_XB

    return Advantages(
        spread(values.value_B),
        spread(values.used_B),
        values.stats,
        value_LB=None if values.value_LB is None else spread(values.value_LB),
        kept_B=None if values.kept_B is None else spread(values.kept_B),
    )
