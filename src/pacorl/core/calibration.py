"""Calibration of a judge: a temperature and a bias on the logit, and the expected calibration error.

Platt scaling (Platt 1999) maps P(Yes) to σ(logit/T + b). The expected calibration error (ECE; Guo et al. 2017, arXiv
1706.04599) is the mean distance between confidence and share of Yes over bins of P(Yes), weighted by their counts.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

Floats = NDArray[np.float64]

BINS = 10
"""Equally wide bins of P(Yes)."""
CLIP = 1e-7
"""Distance of P(Yes) from 0 and 1 at least: a sure judge's logit is infinite in fp32."""
STEPS = 100
"""Steps of L-BFGS at most; about ten are needed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Map from a judge's P(Yes) to a calibrated one: σ(logit/temperature + bias)."""

    temperature: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """Divisor of the logit."""
    bias: FiniteFloat = 0.0
    """Summand of the divided logit."""

    def __call__(self, p_yes: float) -> float:
        """Calibrate one probability."""
        return float(self.of(np.array([p_yes]))[0])

    def of(self, p_N: Floats) -> Floats:
        """Calibrate probabilities."""
        logit_N = logits(p_N) / self.temperature + self.bias
        return np.exp(-np.logaddexp(0, -logit_N))


def logits(p_N: Floats) -> Floats:
    """Compute the logits of probabilities, clipped."""
    clipped = p_N.clip(CLIP, 1 - CLIP)
    odds: Floats = np.log(clipped) - np.log1p(-clipped)
    return odds


def fit_curve(p_N: Floats, yes_N: NDArray[np.bool_]) -> Curve:
    """Fit temperature and bias by the likelihood.

    The targets are Platt's: (n₊ + 1)/(n₊ + 2) for Yes and 1/(n₋ + 2) for No, so that a judge without an error gets a
    finite temperature.

    Raises:
        ValueError: if a label is missing, or if the judge's answers do not rise with the labels.
    """
    # Here, since a judge over HTTP applies curves and needs no torch.
    import torch
    from torch.nn import functional as F

    # Labels and their logits.
    positives = int(yes_N.sum())
    negatives = len(yes_N) - positives
    if not (positives and negatives):
        raise ValueError(f"a calibration needs pairs of both labels, there are {positives} Yes and {negatives} No")
    target_N = torch.from_numpy(np.where(yes_N, (positives + 1) / (positives + 2), 1 / (negatives + 2)))
    logit_N = torch.from_numpy(logits(p_N))

    # Fit in fp64, since L-BFGS would stop early on rounding errors.
    weight_2 = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)  # the judge's own probabilities
    optimizer = torch.optim.LBFGS([weight_2], max_iter=STEPS, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    # LBFGS evaluates the loss several times per step.
    def loss() -> float:
        optimizer.zero_grad()
        value = F.binary_cross_entropy_with_logits(weight_2[0] * logit_N + weight_2[1], target_N)
        value.backward()
        return float(value.detach())

    # One call runs all iterations.
    optimizer.step(loss)
    slope, bias = weight_2.tolist()
    if not slope > 0:
        raise ValueError(
            "the judge's P(Yes) is no higher for pairs labelled Yes than for pairs labelled No; check the labels, or "
            "train the judge on such pairs"
        )
    return Curve(1 / slope, bias)


def calibration_error(p_N: Floats, yes_N: NDArray[np.bool_]) -> float:
    """Compute the expected calibration error; NaN without answers."""
    if not len(p_N):
        return math.nan
    bin_N = np.minimum((p_N * BINS).astype(int), BINS - 1)
    total = 0.0
    for number in np.unique(bin_N):
        inside_N = bin_N == number
        total += inside_N.sum() * abs(float(p_N[inside_N].mean()) - float(yes_N[inside_N].mean()))
    return float(total / len(p_N))
