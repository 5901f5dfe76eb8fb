"""Variance components of nested scores: the balanced random-effects analysis.

A score is y = μ + prompt + start + step noise + … + reading, each effect nested in the effect before. The mean square
of a level estimates the variance that it and all lower levels add, so that the level's own variance is the difference
of two mean squares, divided by the number of scores below one unit (Searle, Casella & McCulloch, Variance Components,
1992, §§ 3 and 4). These estimates are unbiased for any number of draws. Negative ones are taken as 0.

Intervals are generalised confidence intervals (Weerahandi 1993): a mean square with f degrees of freedom is distributed
as its expectation times χ²(f)/f. So its expectation is drawn as mean square · f/χ²(f), and each figure is computed from
every draw.

Legend: L levels (the prompt first), D draws.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DRAWS = 4000
"""Draws per interval: its ends then move by about a hundredth of its width from seed to seed."""
PROMPT = "prompt"
START = "start"
JUDGE = "judge"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Variances:
    """Variance of a score by level."""

    names: tuple[str, ...]
    """Prompt, start, one name per stochastic step, and the judge if it read each image more than once."""
    freedom_L: Floats
    """Degrees of freedom of each mean square."""
    unbiased_L: Floats
    """Estimates that may be negative; NaN for the prompt if there is only one."""
    unbiased_DL: Floats
    """Estimates of each draw."""

    @property
    def within(self) -> tuple[str, ...]:
        """Levels at which the samples of one group differ."""
        return self.names[1:]

    @property
    def steps(self) -> tuple[str, ...]:
        """Levels that training moves."""
        return tuple(name for name in self.names[2:] if name != JUDGE)

    @property
    def clamped(self) -> tuple[str, ...]:
        """Levels within a prompt whose estimate is below 0, and taken as 0."""
        return tuple(name for name, variance in zip(self.within, self.unbiased_L[1:], strict=True) if variance < 0)

    def rows(self) -> Floats:
        """Stack the estimate and all draws: (1 + D, L) variances of at least 0."""
        return np.vstack([self.unbiased_L, self.unbiased_DL]).clip(min=0)

    def variance(self, name: str) -> Estimate:
        """Return the variance of one level."""
        return estimate(self.rows()[:, self.names.index(name)])

    def share(self, *names: str) -> Estimate:
        """Return the share of these levels in the within-prompt variance, with one start per sample."""
        rows = self.rows()
        sums = rows[:, [self.names.index(name) for name in names]].sum(1)
        return estimate(ratio(sums, rows[:, 1:].sum(1)))

    def signal(self, counts: Mapping[str, int]) -> Estimate:
        """Return the share S/V of the stochastic steps in a group's variance, the part that training can move.

        Args:
            counts: distinct draws n_ℓ of each level within the group, which shows a share 1 − 1/n_ℓ of σ²_ℓ.
        """
        weight_L = np.array([1 - 1 / counts[name] for name in self.within])
        # The estimate and every draw, so that the interval is of the share itself.
        rows_XL = self.rows()[:, 1:] * weight_L
        steps_L = np.isin(self.within, self.steps)
        return estimate(ratio(rows_XL[:, steps_L].sum(1), rows_XL.sum(1)))


def nested_variances(
    score_PSMJ: Floats, *, steps: Sequence[str], rng: np.random.Generator, draws: int = DRAWS
) -> Variances:
    """Split the variance of nested scores.

    Args:
        score_PSMJ: prompts × starts × one axis of children per stochastic step × readings of the judge.
        steps: names of the stochastic steps, one per axis.
        rng: generator of the intervals' draws.
        draws: number of draws per interval.

    Raises:
        ValueError: if a level has a single unit, so that its variance is undefined.
    """
    read_often = score_PSMJ.shape[-1] > 1
    names = (PROMPT, START, *steps, *([JUDGE] if read_often else []))
    y = score_PSMJ[..., 0]
    if read_often:
        # Subtract the shift that a reading adds to all scores of a prompt, which cancels in a group's advantages.
        shift = score_PSMJ.mean(axis=tuple(range(1, score_PSMJ.ndim - 1)), keepdims=True)
        y = np.asarray(score_PSMJ - shift + shift.mean(axis=-1, keepdims=True))
    if len(names) != y.ndim or min(y.shape[1:]) < 2:
        raise ValueError(f"{names} of {y.shape} draws: each level below the prompt needs two draws")

    square_L, freedom_L = mean_squares(y)
    if read_often:  # the estimated shift of each reading takes its degrees of freedom
        lost = y.shape[0] * (y.shape[-1] - 1)
        square_L[-1] *= freedom_L[-1] / (freedom_L[-1] - lost)
        freedom_L[-1] -= lost

    # A single prompt has no freedom, and its mean square of NaN stays NaN in all draws.
    freedom = np.maximum(freedom_L, 1)
    drawn_DL = square_L * freedom / rng.chisquare(freedom, (draws, len(names)))
    return Variances(names, freedom_L, _differences(square_L, y.shape), _differences(drawn_DL, y.shape))


def mean_squares(y: Floats) -> tuple[Floats, Floats]:
    """Compute the (L,) mean squares of a balanced nested array, one axis per level, and their degrees of freedom."""
    squares = []
    freedoms = []
    # From the grand mean down: each level's means against the level above.
    above = y.mean(keepdims=True)
    for level, count in enumerate(y.shape):
        mean = y.mean(axis=tuple(range(level + 1, y.ndim)), keepdims=True)
        freedom = math.prod(y.shape[:level]) * (count - 1)
        total = float(((mean - above) ** 2).sum()) * math.prod(y.shape[level + 1 :])
        squares.append(total / freedom if freedom else math.nan)
        freedoms.append(freedom)
        above = mean
    return np.array(squares), np.array(freedoms, dtype=np.float64)


def _differences(square_XL: Floats, shape: Sequence[int]) -> Floats:
    """Convert mean squares to variances: E[MS_ℓ] = Σ_{j≥ℓ} σ²_j · (scores below a unit of level j)."""
    below_L = [math.prod(shape[level + 1 :]) for level in range(len(shape))]
    following = np.concatenate([square_XL[..., 1:], np.zeros_like(square_XL[..., :1])], axis=-1)
    return np.asarray((square_XL - following) / below_L)


def ratio(numerator: Floats, whole: Floats) -> Floats:
    """Divide; 0 where the whole is 0."""
    return np.asarray(np.divide(numerator, whole, out=np.zeros_like(whole), where=whole > 0))


def estimate(rows: Floats) -> Estimate:
    """Return the first row, with the 95 % interval of the other rows."""
    low, high = np.quantile(rows[1:], [0.025, 0.975])
    return Estimate(float(rows[0]), float(low), float(high))
