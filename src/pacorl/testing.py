"""Contracts of rewards, objectives and policies, as checks for entries from outside the package.

    from pacorl.testing import check_objective

    def test_my_objective():
        check_objective(MINE)

Each check raises AssertionError with the fault. They need no test framework, no weights and no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pacorl.core.objectives import Endpoint, ObjectiveOptions, ObjectiveSpec, Step
from pacorl.core.sde import Transition, log_prob
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import denoise
from pacorl.grpo.rows import forward_batches
from pacorl.rewards.reward import Reward, RewardFunction, scores_of
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy

STD, SIGMA = 0.3, 0.6
"""Standard deviation of the stochastic step; noise level of endpoints."""
BETTER, WORSE, UNUSED = range(3)
"""Rows of an objective's batch, whose advantages are 1, −1 and none."""
STEPS = 3
"""Denoising steps of a policy."""


def check_reward(reward: Reward | RewardFunction, prompts: Sequence[Prompt], images: Sequence[Image]) -> None:
    """Check that scores differ, and are the same for every image alone: a score depends on no neighbour in its batch.

    Args:
        prompts: one per image.
        images: two or more, which the reward should score differently.

    Raises:
        AssertionError: with the fault, if the reward breaks the contract.
        RewardError: if the reward does not return one number per image.
    """
    scores = scores_of("tested", reward, prompts, images)
    assert len(set(scores)) > 1, f"all images have the score {scores[0]}; give images that should differ, or mend it"
    for prompt, image, score in zip(prompts, images, scores, strict=True):
        (alone,) = scores_of("tested", reward, [prompt], [image])
        same = alone is score
        if alone is not None and score is not None:
            same = math.isclose(alone, score, rel_tol=1e-4, abs_tol=1e-5)
        assert same, f"an image has the score {score}, and {alone} in a batch of one"


def check_objective(spec: ObjectiveSpec, options: ObjectiveOptions | None = None) -> None:
    """Check an objective's direction and selection, on a batch of three samples.

    `options` are the objective's settings; None for its defaults.

    Raises:
        AssertionError: with the fault, if the objective breaks the contract.
        RuntimeError: if the loss is no scalar.
    """
    start = _noise(3).requires_grad_()
    loss, _ = spec.loss(_batch(spec, start), options or spec.options.model_validate({}))
    (gradient,) = torch.autograd.grad(loss, start)
    assert loss.isfinite(), "the loss is not finite"
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


Pipeline = Callable[[Prompt, int], Tensor]
"""A diffusers pipeline with the policy's weights, called with a prompt and a seed, which does `STEPS` denoising steps:
its packed latents (1, N, C)."""


def check_policy(
    policy: PipelinePolicy,
    prompts: Sequence[Prompt | str],
    size: Size | tuple[int, int],
    *,
    pipeline: Pipeline | None = None,
) -> None:
    """Check that each image of a generator is the same alone and in a batch, and equals its pipeline's.

    Args:
        policy: in float32, usually with random weights that depend on every input.
        prompts: prompts or texts of one image size. A longer text is added to texts of one length, which need no
            padding.
        size: size of the images, or the area of edits; a tuple is height and width.
        pipeline: the pipeline of the same weights, without the policy's changes; without one, a batch alone is checked.

    Raises:
        AssertionError: with the fault, if the generator breaks the contract.
    """
    if isinstance(size, tuple):
        size = Size(*size)
    batch = [Prompt(row, prompt) if isinstance(prompt, str) else prompt for row, prompt in enumerate(prompts)]
    if len({len(prompt.text.split()) for prompt in batch}) == 1:
        batch.append(replace(batch[0], text=f"{batch[0].text} {batch[0].text}"))
    together = endpoints(policy, batch, size)
    assert together.std() > 0.1, "the latents are nearly constant, so that the comparison is void"
    for row, prompt in enumerate(batch):
        alone = endpoints(policy, [prompt], size, seed=row)
        expected = pipeline(prompt, row) if pipeline else alone
        _assert_equal(alone, expected, "an image differs from its pipeline's")
        fault = "an image depends on its neighbour in the batch: mask the padding"
        _assert_equal(together[row : row + 1], expected, fault)


def _assert_equal(ours: Tensor, expected: Tensor, fault: str) -> None:
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5, msg=lambda details: f"{fault}\n{details}")


@torch.no_grad()
def endpoints(policy: PipelinePolicy, prompts: Sequence[Prompt], size: Size, *, seed: int = 0) -> Tensor:
    """(B, N, C) endpoints of the engine's loop without noise; the seeds of the prompts count up from `seed`."""
    image_size = policy.size_of(prompts[0], size)
    cache = ConditioningCache(policy)
    latents_of_row: dict[int, Tensor] = {}
    for rows in forward_batches(policy, prompts, size=size, batch=len(prompts)):
        latents = denoise(
            policy,
            [seed + row for row in rows],
            conditioning=cache.batch([prompts[row] for row in rows], image_size),
            sigmas=policy.sigmas(STEPS, image_size),
            size=image_size,
        )
        latents_of_row |= dict(zip(rows, latents, strict=True))
    return torch.stack([latents_of_row[row] for row in range(len(prompts))])
