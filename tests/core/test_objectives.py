"""The policy's objectives against numbers worked by hand and against float64 closed forms."""

import math

import pytest
import torch
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES, Endpoint, Step
from pacorl.core.objectives.diffusion_nft import DiffusionNft, diffusion_nft
from pacorl.core.objectives.grpo_clip import GrpoClip, grpo_clip
from pacorl.core.sde import Transition

X = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
V = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
OLD = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
CLEAN = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(3))
EVERY = torch.ones(3, dtype=torch.bool)


def step(new: Tensor, old: Tensor, advantage: Tensor) -> Step:
    return Step(Transition(X, 0.3), new, old, None, dt=-0.1, advantage_B=advantage)


def test_at_the_old_policy_the_gradient_is_the_advantage() -> None:
    old = torch.tensor([-1.0, -2.0])
    new = old.clone().requires_grad_()
    loss, metrics = grpo_clip(step(new, old, torch.tensor([1.0, -3.0])), GrpoClip(clip_range=1e-4))
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
    loss, metrics = grpo_clip(step(new, torch.zeros(1), torch.tensor([advantage])), GrpoClip(clip_range=0.1))
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert new.grad is not None
    assert bool(new.grad.abs().item() > 0) == learns
    assert metrics["clip_fraction"] == 1.0


def end(velocity: Tensor, old: Tensor, advantage: Tensor, used: Tensor = EVERY) -> Endpoint:
    return Endpoint(CLEAN, X, 0.6, velocity, old, advantage, 5.0, used)


def test_nfts_weight_has_no_gradient() -> None:
    """Of one number the loss is A_max·|gap|/β, and its gradient that of gap²/|gap| whose divisor is held: twice."""
    velocity = torch.zeros(1, 1, 1, requires_grad=True)
    x0, x, old, best = torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, 1), torch.tensor([5.0])
    loss, _ = diffusion_nft(Endpoint(x0, x, 0.6, velocity, old, best, 5.0, EVERY[:1]), DiffusionNft(beta=0.1))
    loss.backward()
    assert velocity.grad is not None
    assert velocity.grad.item() == pytest.approx(-2 * 5 * 0.6)


def test_nfts_sampling_policy_lags_up_to_a_half() -> None:
    lag = OBJECTIVES["diffusion_nft"].lag
    assert lag is not None
    assert [lag(0), lag(100), lag(500), lag(9000)] == [0.0, 0.1, 0.5, 0.5]


def test_nft_leaves_out_what_was_not_judged() -> None:
    velocity = V.clone().requires_grad_()
    used = torch.tensor([True, False, True])
    loss, _ = diffusion_nft(end(velocity, OLD, torch.zeros(3), used), DiffusionNft(beta=0.1))
    loss.backward()
    assert velocity.grad is not None
    assert velocity.grad[1].abs().max() == 0
    assert velocity.grad[0].abs().max() > 0
