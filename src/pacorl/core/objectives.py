"""What is minimised: each objective is one function that returns (loss, metrics).

A policy's objectives need either the path that a sample took, one stochastic step at a time (`Step`), or its endpoint
alone (`Endpoint`). Losses are means over the batch; samples that must not be trained on weigh nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pacorl.core.sde import Transition, kl

Loss = tuple[Tensor, dict[str, float]]

WEIGHT_FLOOR = 1e-5
"""Least distance by which DiffusionNFT divides."""


@dataclass(frozen=True, slots=True)
class Step:
    """One stochastic step of a batch: as the trained policy sees it, and as it was sampled."""

    transition: Transition
    """The trained policy's."""
    log_prob_B: Tensor
    """Of the step that was taken, under the trained policy."""
    old_log_prob_B: Tensor
    """The rollout's own."""
    old_mean_BNC: Tensor | None
    """The rollout's own mean, for objectives that keep it."""
    dt: float
    """σ' − σ, below 0."""
    advantage_B: Tensor
    """0 where a sample must not be trained on."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Sampled endpoints that were noised again to `sigma`, x = (1−σ)·x0 + σ·ε, and two policies' velocities there."""

    clean_BNC: Tensor
    noisy_BNC: Tensor
    sigma: float
    velocity_BNC: Tensor
    """The trained policy's."""
    old_velocity_BNC: Tensor
    """The policy's that sampled."""
    advantage_B: Tensor
    used_B: Tensor
    """False where a sample must not be trained on."""


def grpo_clip(step: Step, *, clip_range: float) -> Loss:
    """Flow-GRPO's clipped objective (arXiv 2505.05470; 2512.04784, Eq. 1).

    −min(ρA, clip(ρ, 1−ε, 1+ε)A), mean over the batch, with ρ = exp(log p − log p_old). Log-probabilities are means
    over dimensions, so the clip range is small (1e-4 in the paper).
    """
    ratio_B = torch.exp(step.log_prob_B - step.old_log_prob_B)
    return _clipped(ratio_B, step.advantage_B, clip_range=clip_range)


def grpo_guard(step: Step, *, clip_range: float) -> Loss:
    """GRPO-Guard (arXiv 2510.22319): the clipped objective with a ratio that is centred and alike at every step.

    ρ = exp((log p − log p_old + m)·s) and the loss divided by |dt|, with s = σ_t√|dt| the step's std and
    m = ‖μ − μ_old‖²/(2s²) per sample, the mean over dimensions. m takes away the bias of the log-ratio below 0, so
    that good samples are clipped as bad ones are; s and |dt| take away what differs between early and late steps.
    """
    assert step.old_mean_BNC is not None, "grpo_guard needs rollouts that keep their means"
    centre_B = kl(step.transition, Transition(step.old_mean_BNC, step.transition.std))
    ratio_B = torch.exp((step.log_prob_B - step.old_log_prob_B + centre_B) * step.transition.std)
    loss, metrics = _clipped(ratio_B, step.advantage_B, clip_range=clip_range)
    return loss / abs(step.dt), metrics


def _clipped(ratio_B: Tensor, advantage_B: Tensor, *, clip_range: float) -> Loss:
    clipped_B = ratio_B.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratio_B * advantage_B, clipped_B * advantage_B).mean()
    deviation_B = (ratio_B.detach() - 1).abs()
    return loss, {
        "ratio_deviation": float(deviation_B.max()),
        "clip_fraction": float((deviation_B > clip_range).double().mean()),
    }


def diffusion_nft(end: Endpoint, *, beta: float, advantage_clip: float) -> Loss:
    """DiffusionNFT (arXiv 2509.16117), as released: towards good endpoints and away from bad ones, by flow matching.

    With r = ½ + ½·clip(A, ±A_max)/A_max, the implicit good and bad policies v⁺ = βv + (1−β)v_old and
    v⁻ = (1+β)v_old − βv, and their guesses of the endpoint x̂0± = x − σv±, the loss is
    A_max·[r·‖x̂0⁺ − x0‖²/w⁺ + (1−r)·‖x̂0⁻ − x0‖²/w⁻]/β, where w± is the mean |x̂0± − x0| of the sample, detached.
    Norms are means over dimensions.
    """
    good_B = 0.5 + 0.5 * end.advantage_B.clamp(-advantage_clip, advantage_clip) / advantage_clip
    towards = beta * end.velocity_BNC + (1 - beta) * end.old_velocity_BNC
    away = (1 + beta) * end.old_velocity_BNC - beta * end.velocity_BNC
    towards_B, away_B = (_distance(end.noisy_BNC - end.sigma * v, end.clean_BNC) for v in (towards, away))
    loss_B = advantage_clip * (good_B * towards_B + (1 - good_B) * away_B) / beta * end.used_B
    moved = (end.velocity_BNC - end.old_velocity_BNC).detach()
    return loss_B.mean(), {"velocity_change": float((moved**2).mean())}


def _distance(guess_BNC: Tensor, clean_BNC: Tensor) -> Tensor:
    """(B,) squared distance over the distance, detached: near and far samples pull alike."""
    gap_BD = (guess_BNC - clean_BNC).flatten(1)
    return (gap_BD**2).mean(1) / gap_BD.detach().abs().mean(1).clamp(min=WEIGHT_FLOOR)


def decision_weighted(log_prob_BL: Tensor, answer_BL: Tensor, *, alpha: float | None) -> Loss:
    """PaCo-Reward's weighted likelihood (arXiv 2512.04784, §3.2), normalised per sample, mean over the batch.

    −[α log p(y₀) + (1−α)/(n−1) Σᵢ log p(yᵢ)] over the n tokens of an answer, the first of which is the decision.
    `alpha=None` weighs all tokens alike (1/n, plain SFT). Where the decision is the whole answer it has all the weight.
    `log_prob_BL` is the log-probability of each token, read only where `answer_BL` is True. Raises ValueError where a
    sample has no answer.
    """
    count_B1 = answer_BL.sum(1, keepdim=True)
    if not count_B1.all():
        raise ValueError(f"sample {int((count_B1 == 0).nonzero()[0, 0])} of the batch has no answer tokens")
    first_BL = answer_BL & (answer_BL.cumsum(1) == 1)
    equal_B1 = 1 / count_B1.to(log_prob_BL.dtype)
    alpha_B1 = equal_B1 if alpha is None else torch.full_like(equal_B1, alpha).masked_fill(count_B1 == 1, 1.0)
    weight_BL = torch.where(first_BL, alpha_B1, (1 - alpha_B1) / (count_B1 - 1).clamp(min=1)) * answer_BL
    nll_BL = -log_prob_BL.masked_fill(~answer_BL, 0.0)
    loss = (weight_BL * nll_BL).sum(1).mean()
    rest_B = (nll_BL * (answer_BL & ~first_BL)).detach().sum(1) / (count_B1[:, 0] - 1).clamp(min=1)
    return loss, {
        "decision_nll": float((nll_BL * first_BL).detach().sum(1).mean()),
        "reasons_nll": float(rest_B.mean()),
    }


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective by what it needs; `loss` takes a `Step` (path) or an `Endpoint`, and its settings by name."""

    loss: Callable[..., Loss]
    needs: Literal["path", "endpoint"]
    """path: training replays the stochastic steps. endpoint: sampling is without noise, by weights of its own."""
    settings: tuple[str, ...]
    means: bool = False
    """Whether rollouts keep the means of their steps."""


OBJECTIVES = {
    "grpo_clip": Objective(grpo_clip, needs="path", settings=("clip_range",)),
    "grpo_guard": Objective(grpo_guard, needs="path", settings=("clip_range",), means=True),
    "diffusion_nft": Objective(diffusion_nft, needs="endpoint", settings=("beta", "advantage_clip")),
}
