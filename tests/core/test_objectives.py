"""The clipped objective against numbers worked by hand."""

import math

import pytest
import torch

from pacorl.core.objectives import grpo_clip


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    old = torch.tensor([-1.0, -2.0])
    new = old.clone().requires_grad_()
    loss, metrics = grpo_clip(new, old, torch.tensor([1.0, -3.0]), clip_range=1e-4)
    loss.backward()
    assert loss.item() == pytest.approx(1.0)  # −mean(1, −3)
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.5, 1.5])
    assert metrics == {"ratio_deviation": 0.0, "clip_fraction": 0.0}


@pytest.mark.parametrize(
    ("change", "advantage", "expected", "learns"),
    [
        (0.5, 1.0, -1.1, False),  # already likelier than the clip range allows
        (0.5, -1.0, math.exp(0.5), True),  # a bad sample that grew likelier is still pushed down
        (-0.5, 1.0, -math.exp(-0.5), True),
        (-0.5, -1.0, 0.9, False),
    ],
)
def test_clipping(change: float, advantage: float, expected: float, learns: bool) -> None:
    new = torch.tensor([change], requires_grad=True)
    loss, metrics = grpo_clip(new, torch.zeros(1), torch.tensor([advantage]), clip_range=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert new.grad is not None
    assert bool(new.grad.abs().item() > 0) == learns
    assert metrics["clip_fraction"] == 1.0
