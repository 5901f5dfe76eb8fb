"""The seam of a reward: prompts and images in, a score per image out; and the table of them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from pacorl.types import Prompt, RewardTable, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


class Reward(Protocol):
    """Scores images. A score that could not be had is None, never 0."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError, naming the record, where prompts lack what this reward needs."""

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        """One score per image, in order."""


def score(rewards: Mapping[str, Reward], prompts: Sequence[Prompt], images: Sequence[Image]) -> RewardTable:
    """Every reward of every image. Raises ValueError where a reward returns the wrong number of scores."""
    rows = []
    for name, reward in rewards.items():
        scores = reward(prompts, images)
        if len(scores) != len(images):
            raise ValueError(f"reward {name!r} returned {len(scores)} scores for {len(images)} images")
        rows.append([float("nan") if value is None else value for value in scores])
    score_RB = torch.tensor(rows, dtype=torch.float64)
    return RewardTable(
        names=tuple(rewards),
        score_RB=score_RB,
        valid_RB=score_RB.isfinite(),
        group_B=torch.tensor([prompt.id for prompt in prompts], dtype=torch.int64),
    )


def mean_of(verdicts: Sequence[Verdict], *, temperature: float = 1.0) -> float | None:
    """The mean of P(Yes)^(1/temperature), renormalised; None where any verdict is missing or there are none."""
    known = [tempered(verdict.p_yes, temperature) for verdict in verdicts if verdict.p_yes is not None]
    return sum(known) / len(known) if known and len(known) == len(verdicts) else None


def tempered(probability: float, temperature: float) -> float:
    """σ(logit(p) / temperature)."""
    if temperature == 1:
        return probability
    yes, no = probability ** (1 / temperature), (1 - probability) ** (1 / temperature)
    return float(yes / (yes + no))
