"""The contract of an objective, which tests and every run with an objective from a file check on three samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.sde import Transition, log_prob

STD, SIGMA = 0.3, 0.6
"""Standard deviation of the stochastic step; noise level of endpoints."""
BETTER, WORSE, UNUSED = range(3)
"""Rows of an objective's batch, whose advantages are 1, −1 and none."""


def check_objective(spec: ObjectiveSpec, options: ObjectiveOptions | None = None) -> None:
    """Check an objective's direction and selection, on a batch of three samples.

    `options` are the objective's settings; None for its defaults.

    Raises:
        AssertionError: with the fault, if the objective breaks the contract.
        RuntimeError: if the loss is no scalar.
    """
    start = _noise(3).requires_grad_()
    returned: Any = spec.loss(_batch(spec, start), options or spec.options.model_validate({}))
    if not isinstance(returned, tuple) or len(returned) != 2:
        line = getattr(getattr(spec.loss, "__code__", None), "co_firstlineno", "of the loss")
        raise AssertionError(f"line {line}: the loss returned {type(returned).__name__}, not (loss, {{name: metric}})")
    (gradient,) = torch.autograd.grad(returned[0], start)
    assert returned[0].isfinite(), "the loss is not finite"
    assert gradient.isfinite().all(), "the gradient is not finite"
    assert not gradient[UNUSED].any(), "an unused sample has a gradient"

    # A small step against the gradient makes the better sample likelier, and the worse one less likely. The target is
    # the prediction under which all three samples are likeliest.
    target = (_noise(2) - _noise(1)) / SIGMA if spec.needs == "endpoint" else _noise(3) + STD * _noise(4)
    gain_B = ((target - start) * -gradient).flatten(1).sum(1)
    assert gain_B[BETTER] > 0, "a step against the gradient makes a sample of advantage 1 less likely"
    assert gain_B[WORSE] < 0, "a step against the gradient makes a sample of advantage −1 likelier"


def _noise(seed: int) -> Tensor:
    """Draw (3, N, C)."""
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _batch(spec: ObjectiveSpec, prediction: Tensor) -> Step | Endpoint:
    """Build the batch of the loss, for a trained policy with this mean of a step, or velocity of noised endpoints."""
    clean, noisy, old, noise = map(_noise, (1, 2, 3, 4))
    advantage_B = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    if spec.needs == "endpoint":
        # `used_B` alone excludes a sample here: one whose advantage is 0 would not show that it is read.
        advantage_B[UNUSED] = 0.5
        return Endpoint(
            clean,
            noisy,
            sigma=SIGMA,
            velocity_BNC=prediction,
            old_velocity_BNC=old,
            advantage_B=advantage_B,
            advantage_clip=5.0,
            used_B=torch.tensor([True, True, False]),
        )
    transition = Transition(prediction, STD)
    sampled = old + STD * noise
    return Step(
        transition,
        log_prob_B=log_prob(sampled, transition),
        old_log_prob_B=log_prob(sampled, Transition(old, STD)),
        old_mean_BNC=old if spec.keeps_means else None,
        dt=-0.1,
        advantage_B=advantage_B,
    )
