"""What every objective of the table promises; a new entry is tested on the day it is added."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES, Endpoint, ObjectiveSpec, Step
from pacorl.core.sde import Transition, log_prob

B = 3
SPECS = pytest.mark.parametrize("spec", [OBJECTIVES[name] for name in OBJECTIVES], ids=list(OBJECTIVES))


def noise(seed: int) -> Tensor:
    return torch.randn(B, 5, 4, generator=torch.Generator().manual_seed(seed))


def batch(spec: ObjectiveSpec, prediction: Tensor, advantage_B: Tensor, *, used_B: Tensor) -> Step | Endpoint:
    """What training hands to the loss, if the trained policy predicts a mean (or velocity)."""
    if spec.needs == "endpoint":
        return Endpoint(noise(1), noise(2), 0.6, prediction, noise(3), advantage_B, 5.0, used_B)
    transition, old = Transition(prediction, 0.3), Transition(noise(3), 0.3)
    sampled = noise(3) + 0.3 * noise(4)
    return Step(
        transition,
        log_prob_B=log_prob(sampled, transition),
        old_log_prob_B=log_prob(sampled, old),
        old_mean_BNC=noise(3) if spec.keeps_means else None,
        dt=-0.1,
        noise_weight=1.5,
        advantage_B=advantage_B,
    )


@SPECS
def test_every_setting_says_what_it_is(spec: ObjectiveSpec) -> None:
    assert spec.loss.__doc__
    assert "\n" in spec.loss.__doc__, "cite the paper and the equation"


@SPECS
def test_the_loss_is_finite_and_pushes_towards_better_samples(spec: ObjectiveSpec) -> None:
    """A step along the gradient changes the loss, and a batch that must not be trained on moves nothing."""
    prediction = (noise(3) + 1e-5 * noise(5)).requires_grad_()
    used = torch.ones(B, dtype=torch.bool)
    loss, metrics = spec.loss(batch(spec, prediction, torch.tensor([1.0, -2.0, 0.5]), used_B=used), spec.options())
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    assert all(math.isfinite(value) for value in metrics.values())  # numbers, or tensors of one
    assert prediction.grad is not None
    assert prediction.grad.isfinite().all()
    assert prediction.grad.abs().sum() > 0


@SPECS
def test_samples_that_must_not_be_trained_on_weigh_nothing(spec: ObjectiveSpec) -> None:
    prediction = (noise(3) + 1e-5 * noise(5)).requires_grad_()
    used = torch.tensor([True, False, True])
    loss, _ = spec.loss(batch(spec, prediction, torch.tensor([1.0, 0.0, -1.0]), used_B=used), spec.options())
    loss.backward()
    assert prediction.grad is not None
    assert not prediction.grad[1].any()
    assert prediction.grad[0].any()


@SPECS
def test_it_computes_in_the_precision_that_it_is_given(spec: ObjectiveSpec) -> None:
    given = batch(spec, noise(3), torch.ones(B), used_B=torch.ones(B, dtype=torch.bool))
    loss, _ = spec.loss(given, spec.options())
    again, _ = spec.loss(dataclasses.replace(given), spec.options())
    assert loss.dtype == torch.float32
    assert torch.equal(loss, again)
