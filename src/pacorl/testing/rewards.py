"""The contract of a reward: one score per image, which depends only on that image and its prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pacorl.rewards.reward import Reward, RewardFunction, scores_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.types import Prompt

TOLERANCE = 1e-4
"""Largest difference of one image's score between two batches, as a share of all scores' range."""


def check_reward(reward: Reward | RewardFunction, prompts: Sequence[Prompt], images: Sequence[Image]) -> None:
    """Check that scores are numbers, follow their images through a permuted batch and a batch of one, and differ.

    Args:
        prompts: one per image.
        images: at least three, which the reward should score differently.

    Raises:
        AssertionError: with the fault, if the reward breaks the contract.
        RewardError: if the reward does not return one number per image.
    """
    assert len(images) >= 3, f"{len(images)} images show too little; give at least three"
    scores = scores_of("tested", reward, prompts, images)
    present = [score for score in scores if score is not None]
    assert present, "every score is missing"

    spread = max(present) - min(present)
    assert spread > 0, f"all images have the score {present[0]}; give images that should differ, or mend the reward"

    # A score may depend on its image alone, and not on its neighbours in a batch.
    backwards = scores_of("tested", reward, prompts[::-1], images[::-1])[::-1]
    _assert_alike(scores, backwards, spread, "in a batch of the opposite order")

    alone = []
    for prompt, image in zip(prompts, images, strict=True):
        alone += scores_of("tested", reward, [prompt], [image])
    _assert_alike(scores, alone, spread, "in a batch of one")


def _assert_alike(scores: Sequence[float | None], again: Sequence[float | None], spread: float, where: str) -> None:
    for number, (score, other) in enumerate(zip(scores, again, strict=True)):
        if score is None or other is None:
            same = other is score
        else:
            same = math.isclose(score, other, rel_tol=0, abs_tol=TOLERANCE * spread)
        assert same, f"image {number} has the score {score}, and {other} {where}"
