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

from pacorl.core.objectives.contract import check_objective
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import denoise
from pacorl.grpo.rows import forward_batches
from pacorl.rewards.reward import Reward, RewardFunction, scores_of
from pacorl.types import Prompt, Size

__all__ = ["check_objective", "check_policy", "check_reward"]

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.models.policies.pipeline import PipelinePolicy

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
