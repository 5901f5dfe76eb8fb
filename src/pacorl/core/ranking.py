"""Agreement of a ranking with people's: ConsistencyRank's metrics, and bootstrap intervals of any mean.

An *order* lists candidates (by index) best first, as `argsort` gives it. A candidate's *rank* is its position in the
order. The released evaluation correlates two orders as if they were ranks; over the 576 pairs of orders of four
candidates its τ differs from the rank correlation in 296 and its ρ in 328. Both are provided under different
names.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pacorl.core.batches import grouped

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]

DRAWS = 2000
"""Resamples of an interval: its ends then move by about a hundredth of its width from seed to seed."""
TAIL = (1 - 0.95) / 2
"""Probability on each side of an interval of 95 %."""
FEWEST = 30
"""Items below which a mean is called too uncertain for a conclusion."""
FEWEST_FOR_INTERVAL = 8
"""Groups below which a figure has no interval: of two prompts it would be the two values themselves."""


def too_few(pairs: int, groups: int) -> str:
    """Describe how uncertain an accuracy over these pairs is; empty if there are enough for a conclusion."""
    if pairs >= FEWEST and groups >= FEWEST_FOR_INTERVAL:
        return ""
    # The interval of one half over independent pairs; those of one group are not.
    error = 0.98 / max(pairs, 1) ** 0.5
    few = f"An accuracy over {pairs} pairs of {groups} prompts is uncertain by ±{error:.2f} or more"
    missing = f"{FEWEST} pairs" if groups >= FEWEST_FOR_INTERVAL else f"{FEWEST_FOR_INTERVAL} prompts"
    return f"{few}; hold out {missing} at least"


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and its bootstrap interval; the ends are None if too little was measured for one."""

    mean: float
    low: float | None = None
    high: float | None = None
    groups: int | None = None
    """Groups that were resampled, such as prompts; None if unknown."""
    drawn: Floats | None = field(default=None, compare=False, repr=False)
    """The figure of each resample, for `difference`; None without an interval."""

    def text(self, *, signed: bool = False) -> str:
        """Format as `0.549 (0.412 to 0.683)`; the mean alone without an interval."""
        form = "+z.3f" if signed else "z.3f"
        text = f"{self.mean:{form}}"
        if self.low is not None and self.high is not None:
            text += f" ({self.low:{form}} to {self.high:{form}})"
        return text.replace("-", "\N{MINUS SIGN}")

    def document(self) -> dict[str, float | int | None]:
        """Return the figure, its bounds and the number of groups, for JSON."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "groups": self.groups}


def order_of(scores: Sequence[float]) -> tuple[int, ...]:
    """Order candidates by score; of equal scores the later candidate comes first.

    The released code reverses an argsort too, but numpy's default sort is not stable on every machine, and leaves ties
    in another order there.

    Raises ValueError if a score is not finite.
    """
    values = np.asarray(scores, dtype=float)
    if not np.isfinite(values).all():
        raise ValueError(f"scores {list(scores)} cannot be ordered; each must be a finite number")
    return tuple(int(candidate) for candidate in np.argsort(values, kind="stable")[::-1])


def rank_agreement(predicted: Sequence[int], true: Sequence[int]) -> dict[str, float]:
    """Compare two orders of the same candidates, two or more.

    Returns:
        Measures that are 1 for the same order: `accuracy`, the share of places that hold the right candidate;
        `order_tau` and `order_rho`, Kendall's τ and Spearman's ρ of the two lists, as in the released evaluation;
        `rank_tau` and `rank_rho` of the candidates' ranks, the first the share of pairs in the right order minus that
        in the wrong one; and `top1_bottom1`, the mean of: the best candidate is right, the worst one is right.
    """
    right = [guess == truth for guess, truth in zip(predicted, true, strict=True)]
    # A candidate's position in an order is its rank.
    ranks, true_ranks = np.argsort(predicted), np.argsort(true)
    return {
        "accuracy": sum(right) / len(right),
        "order_tau": kendall_tau(predicted, true),
        "order_rho": spearman_rho(predicted, true),
        "rank_tau": kendall_tau(ranks, true_ranks),
        "rank_rho": spearman_rho(ranks, true_ranks),
        "top1_bottom1": (right[0] + right[-1]) / 2,
    }


def kendall_tau(first: Sequence[int] | Indices, second: Sequence[int] | Indices) -> float:
    """Compute (concordant − discordant) / pairs of two sequences without ties (Kendall 1938)."""
    signs = [np.sign(np.subtract.outer(values, values)) for values in (first, second)]
    return float((signs[0] * signs[1]).sum() / (signs[0] != 0).sum())


def spearman_rho(first: Sequence[int] | Indices, second: Sequence[int] | Indices) -> float:
    """Compute the correlation of two permutations of one set of numbers (Spearman 1904)."""
    return float(np.corrcoef(first, second)[0, 1])


def bootstrap(
    groups: Sequence[Hashable], statistic: Callable[[Indices], Floats], *, draws: int = DRAWS
) -> list[Interval]:
    """Compute 95 % percentile intervals of a statistic, drawing whole groups with replacement.

    Efron & Tibshirani 1993, ch. 13.

    groups: the group of each item; items of one group share images or a prompt, and so do not vary by themselves.
    statistic: indices of items (with repetition) → (M,) figures, NaN if undefined. Returns M intervals;
    without ends if there are fewer than `FEWEST_FOR_INTERVAL` groups.
    """
    # Images of one group are not independent, so groups are drawn whole.
    places = grouped((group, index) for index, group in enumerate(groups))
    members = [np.asarray(indices, dtype=np.int64) for indices in places.values()]
    full = statistic(np.arange(len(groups)))
    if len(members) < FEWEST_FOR_INTERVAL:
        return [Interval(float(value), groups=len(members)) for value in full]
    random = np.random.default_rng(0)
    rows_DG = random.integers(len(members), size=(draws, len(members)))
    figures = []
    for row in rows_DG:
        drawn = np.concatenate([members[group] for group in row])
        figures.append(statistic(drawn))
    columns = np.stack(figures).T
    return [_interval(float(value), column, len(members)) for value, column in zip(full, columns, strict=True)]


def _interval(mean: float, drawn: Floats, groups: int) -> Interval:
    finite = drawn[~np.isnan(drawn)]
    if np.isnan(mean) or not len(finite):
        return Interval(mean, groups=groups)
    low, high = np.quantile(finite, [TAIL, 1 - TAIL])
    return Interval(mean, float(low), float(high), groups, drawn)


T_975 = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110)
"""Quantiles 0.975 of Student's t at 2 to 17 degrees of freedom; with more the last one, which is a little too wide."""


def t_interval(values: Sequence[float]) -> Interval:
    """Average independent values, such as one per training seed; 3 or more have a 95 % t-interval (Student 1908)."""
    mean = float(np.mean(values))
    count = len(values)
    if count < 3:
        return Interval(mean, groups=count)
    half = T_975[min(count - 3, len(T_975) - 1)] * float(np.std(values, ddof=1)) / count**0.5
    return Interval(mean, mean - half, mean + half, count)


def difference(before: Interval, after: Interval) -> Interval:
    """Subtract two figures of `bootstrap` on the same items in one order, and as many draws: it is paired."""
    mean = after.mean - before.mean
    if before.drawn is None or after.drawn is None or after.groups is None:
        return Interval(mean, groups=after.groups)
    return _interval(mean, after.drawn - before.drawn, after.groups)
