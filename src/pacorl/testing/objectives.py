"""The contract of an objective: a step against its gradient favours better samples, and clipping bounds that."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.sde import Transition, log_prob

STD = 0.3
"""Standard deviation of the stochastic step."""
SIGMA = 0.6
"""Noise level of endpoints."""
BETTER = 0
WORSE = 1
NEUTRAL = 2
"""Rows of the batch, whose advantages are 1, −1 and 0."""
ADVANTAGE_B = (1.0, -1.0, 0.0)
CITATION = re.compile(r"\b(19|20)\d\d\b|\b\d{4}\.\d{4,5}\b")
"""A year, as in `Williams (1992)`, or an arXiv number."""


def check_objective(spec: ObjectiveSpec, options: ObjectiveOptions | None = None) -> None:
    """Check an objective's documentation, direction, clipping, selection and precision.

    Args:
        options: the objective's settings; by default the defaults.

    Raises:
        AssertionError: with the fault, if the objective breaks the contract.
    """
    options = options or spec.options.model_validate({})
    docstring = spec.loss.__doc__
    assert docstring, "the loss has no docstring; say what it computes and cite its paper"
    assert CITATION.search(docstring), (
        f"the loss's docstring cites no paper: {docstring.strip()[:80]!r}; add its year or arXiv number, such as "
        "Williams (1992) or arXiv 2509.16117"
    )

    check_direction(spec, options)
    check_clipping(spec, options)
    gradient = _gradient(spec, options, _old_prediction())
    assert not gradient[NEUTRAL].any(), "an unused sample has a gradient"
    check_precision(spec, options)


def check_direction(spec: ObjectiveSpec, options: ObjectiveOptions) -> None:
    """Check that a step against the gradient makes the better sample likelier and the worse one less likely."""
    start = _old_prediction()
    gradient = _gradient(spec, options, start)
    assert gradient.isfinite().all(), "the gradient is not finite"

    # Small, so that the first order decides.
    step = 1e-3 / gradient.abs().max().clamp(min=1e-12)
    gain_B = _fit(spec, start - step * gradient) - _fit(spec, start)
    assert gain_B[BETTER] > 0, "a step against the gradient makes a sample of advantage 1 less likely"
    assert gain_B[WORSE] < 0, "a step against the gradient makes a sample of advantage −1 likelier"


def check_clipping(spec: ObjectiveSpec, options: ObjectiveOptions) -> None:
    """Check that clipping stops samples beyond the range, but none that moved in the wrong direction.

    Options whose names begin with `clip` are the ranges. Without one, the spec must state that the loss is unclipped.
    """
    settings = options.model_dump(exclude_none=True)
    ranges = {name: value for name, value in settings.items() if name.startswith("clip")}
    if not ranges:
        assert spec.unclipped, "no option clip_… bounds the ratio; rename it, or give the ObjectiveSpec unclipped=True"
        return
    # A range of 1 has no lower bound, since a ratio is never below 0.
    options = options.model_copy(update={name: min(float(value), 0.2) for name, value in ranges.items()})
    # Predictions halfway towards the target and away from it.
    target = _target(spec)
    towards = torch.lerp(_old_prediction(), target, 0.5)
    away = torch.lerp(_old_prediction(), target, -0.5)

    # Towards the target: the better sample is stopped, the worse sample is pushed back.
    gradient = _gradient(spec, options, towards)
    assert not gradient[BETTER].any(), "a sample of advantage 1 beyond the clip range is still made likelier"
    assert gradient[WORSE].any(), "a sample of advantage −1 that became likelier is not pushed back"

    # Away from the target, the other way round.
    gradient = _gradient(spec, options, away)
    assert not gradient[WORSE].any(), "a sample of advantage −1 beyond the clip range is still made less likely"
    assert gradient[BETTER].any(), "a sample of advantage 1 that became less likely is not pushed back"


def check_precision(spec: ObjectiveSpec, options: ObjectiveOptions) -> None:
    """Check that the loss is one finite number, equal when computed again, in the precision of its inputs."""
    for dtype in (torch.float32, torch.float64):
        prediction = _old_prediction().to(dtype)
        loss, metrics = spec.loss(_batch(spec, prediction), options)
        again, _ = spec.loss(_batch(spec, prediction), options)
        assert loss.shape == (), f"the loss has the shape {tuple(loss.shape)}, not ()"
        assert loss.isfinite(), "the loss is not finite"
        assert loss.dtype == dtype, f"inputs of {dtype} give a loss of {loss.dtype}"
        assert torch.equal(loss, again), "the loss differs when it is computed again"
        assert all(math.isfinite(value) for value in metrics.values()), f"a metric is not finite: {metrics}"


# --- a batch of three samples ----------------------------------------------------------------------------------


def _noise(seed: int) -> Tensor:
    """Draw (3, N, C)."""
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _old_prediction() -> Tensor:
    """Return the sampling policy's prediction: the mean of a step, or the velocity of noised endpoints."""
    return _noise(3)


def _taken(mean: Tensor) -> Tensor:
    """Return the sampled x' of the stochastic step."""
    return mean + STD * _noise(4).to(mean.dtype)


def _target(spec: ObjectiveSpec) -> Tensor:
    """Return the prediction under which all three samples are likeliest."""
    if spec.needs == "endpoint":
        clean = _noise(1)
        noisy = _noise(2)
        return (noisy - clean) / SIGMA
    return _taken(_old_prediction())


def _fit(spec: ObjectiveSpec, prediction: Tensor) -> Tensor:
    """Return (3,), a monotonic measure of each sample's likelihood under a prediction."""
    return -((prediction - _target(spec)) ** 2).flatten(1).mean(1)


def _gradient(spec: ObjectiveSpec, options: ObjectiveOptions, prediction: Tensor) -> Tensor:
    prediction = prediction.detach().clone().requires_grad_()
    loss, _ = spec.loss(_batch(spec, prediction), options)
    (gradient,) = torch.autograd.grad(loss, prediction)
    return gradient


def _batch(spec: ObjectiveSpec, prediction: Tensor) -> Step | Endpoint:
    """Build the batch of the loss, for a trained policy with this mean or velocity."""
    # The old policy, and the advantages.
    dtype = prediction.dtype
    old = _old_prediction().to(dtype)
    advantage_B = torch.tensor(ADVANTAGE_B, dtype=dtype)
    if spec.needs == "endpoint":
        return Endpoint(
            _noise(1).to(dtype),
            _noise(2).to(dtype),
            sigma=SIGMA,
            velocity_BNC=prediction,
            old_velocity_BNC=old,
            advantage_B=advantage_B,
            advantage_clip=5.0,
            used_B=torch.tensor([True, True, False]),
        )

    # A stochastic step.
    sampled = _taken(old)
    transition = Transition(prediction, STD)
    return Step(
        transition,
        log_prob_B=log_prob(sampled, transition),
        old_log_prob_B=log_prob(sampled, Transition(old, STD)),
        old_mean_BNC=old if spec.keeps_means else None,
        dt=-0.1,
        advantage_B=advantage_B,
    )
