"""The policy's objectives against numbers worked by hand and against float64 closed forms."""

import math

import pytest
import torch
from torch import Tensor

from pacorl.core.objectives import OBJECTIVES, Endpoint, Step
from pacorl.core.objectives.awm import Awm, awm
from pacorl.core.objectives.diffusion_nft import DiffusionNft, diffusion_nft
from pacorl.core.objectives.grpo_clip import GrpoClip, grpo_clip
from pacorl.core.objectives.grpo_guard import GrpoGuard, grpo_guard
from pacorl.core.sde import Transition, log_prob

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


def guarded(mean: Tensor, taken: Tensor, advantage: Tensor, *, clip_range: float) -> Tensor:
    transition, old = Transition(mean, 0.3), Transition(OLD, 0.3)
    loss, _ = grpo_guard(
        Step(transition, log_prob(taken, transition), log_prob(taken, old), OLD, dt=-0.1, advantage_B=advantage),
        GrpoGuard(clip_range=clip_range),
    )
    return loss


def test_guard_centres_and_scales_the_ratio() -> None:
    """exp((lp − lp_old + (μ−μ_old)²/(2s²))·s) is exp(mean((μ−μ_old)·ε)): the quadratic part is gone."""
    noise, change = V.double(), 0.01 * X.double()
    advantage = torch.tensor([1.0, -2.0, 0.5])
    found = guarded((OLD + 0.01 * X).float(), OLD + 0.3 * V, advantage, clip_range=10.0)
    ratio = torch.exp((change * noise).mean((1, 2)))
    assert found.item() == pytest.approx(float(-(ratio * advantage).mean() / 0.1), rel=1e-4)


def test_guard_is_centred_where_the_plain_ratio_is_not() -> None:
    """Over fresh noise the guarded log-ratio is 0 on the mean, the plain one below."""
    generator = torch.Generator().manual_seed(5)
    old = torch.zeros(4000, 4, 4)
    taken = old + 0.3 * torch.randn(old.shape, generator=generator)
    new = Transition(old + 0.2, 0.3)
    plain = (log_prob(taken, new) - log_prob(taken, Transition(old, 0.3))).mean()
    assert plain < -0.15
    loss, _ = grpo_guard(
        Step(
            new,
            log_prob(taken, new),
            log_prob(taken, Transition(old, 0.3)),
            old,
            dt=-1.0,
            advantage_B=-torch.ones(4000),
        ),
        GrpoGuard(clip_range=10.0),
    )
    assert loss.item() == pytest.approx(1.0, abs=0.01)


def end(velocity: Tensor, old: Tensor, advantage: Tensor, used: Tensor = EVERY) -> Endpoint:
    return Endpoint(CLEAN, X, 0.6, velocity, old, advantage, 5.0, used)


def test_nft_is_the_papers_equation() -> None:
    """Against a loop over samples in float64."""
    advantage, beta, limit = torch.tensor([2.0, -9.0, 0.0]), 0.3, 5.0
    found, _ = diffusion_nft(end(V, OLD, advantage), DiffusionNft(beta=beta))
    losses = []
    for x0, x, v, old, a in zip(CLEAN.double(), X.double(), V.double(), OLD.double(), advantage.tolist(), strict=True):
        r = 0.5 + 0.5 * max(-limit, min(limit, a)) / limit
        good = x - 0.6 * (beta * v + (1 - beta) * old) - x0
        bad = x - 0.6 * ((1 + beta) * old - beta * v) - x0
        parts = [(g**2).mean() / g.abs().mean() for g in (good, bad)]
        losses.append(limit * (r * parts[0] + (1 - r) * parts[1]) / beta)
    assert found.item() == pytest.approx(float(sum(losses) / 3), rel=1e-5)


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


def matching(velocity: Tensor, *, sigma: float) -> Tensor:
    """(B,) flow matching's loss, with the noise that made x = (1−σ)x0 + σε worked out anew in float64."""
    noise = (X.double() - (1 - sigma) * CLEAN.double()) / sigma
    return torch.stack([((v - (e - x0)) ** 2).mean() for v, e, x0 in zip(velocity, noise, CLEAN.double(), strict=True)])


def test_awm_is_flow_matching_weighted_by_the_advantage() -> None:
    """At the policy that sampled its gradient is that of Σ A·D, by autograd of the plain loss in float64."""
    advantage = torch.tensor([2.0, -1.0, 0.0], dtype=torch.float64)
    velocity, plain = OLD.double().requires_grad_(), OLD.double().requires_grad_()
    given = Endpoint(CLEAN.double(), X.double(), 0.6, velocity, OLD.double(), advantage, 5.0, EVERY)
    loss, metrics = awm(given, Awm())
    loss.backward()
    (advantage * matching(plain, sigma=0.6)).mean().backward()
    assert velocity.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(velocity.grad, plain.grad, rtol=1e-8, atol=1e-12)
    assert loss.item() == pytest.approx(-1 / 3), "the mean of −A"
    assert metrics == {"ratio_deviation": 0.0, "clip_fraction": 0.0, "velocity_change": 0.0}


@pytest.mark.parametrize("clip_range", [1.0, 0.05])
def test_awms_ratio_is_that_of_the_lower_bounds_and_clipped(clip_range: float) -> None:
    advantage = torch.tensor([2.0, -1.0, 0.5])
    velocity = OLD + 0.2 * V
    loss, metrics = awm(end(velocity, OLD, advantage), Awm(clip_range=clip_range))
    ratios = (matching(OLD.double(), sigma=0.6) - matching(velocity.double(), sigma=0.6)).exp().tolist()
    expected = [
        -min(ratio * a, max(1 - clip_range, min(1 + clip_range, ratio)) * a)
        for ratio, a in zip(ratios, advantage.tolist(), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-5)
    assert metrics["ratio_deviation"] == pytest.approx(max(abs(ratio - 1) for ratio in ratios), rel=1e-4)
    assert metrics["clip_fraction"] == sum(abs(ratio - 1) > clip_range for ratio in ratios) / 3
