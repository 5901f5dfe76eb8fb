"""Tables of rewards: of given scores, and as an epoch makes it from its rewards' scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from PIL.Image import Image

from pacorl.grpo.rows import Row
from pacorl.grpo.scoring import reward_table
from pacorl.rewards.reward import PanelScores, RewardFunction, scores_of
from pacorl.types import Prompt, RewardTable


def table(scores: list[list[float]], groups: list[int]) -> RewardTable:
    """The scores of each reward; NaN is missing."""
    score_RB = torch.tensor(scores, dtype=torch.float64)
    names = tuple(f"reward{number}" for number in range(len(scores)))
    return RewardTable(names, score_RB, score_RB.isfinite(), torch.tensor(groups))


def score(rewards: Mapping[str, RewardFunction], prompts: Sequence[Prompt], images: Sequence[Image]) -> RewardTable:
    """Score every image by every reward."""
    columns = [scores_of(name, reward, prompts, images) for name, reward in rewards.items()]
    scores = {
        number: [PanelScores(score, None) for score in row] for number, row in enumerate(zip(*columns, strict=True))
    }
    rows = [Row(prompt, number) for number, prompt in enumerate(prompts)]
    return reward_table(scores, rows, names=tuple(rewards))
