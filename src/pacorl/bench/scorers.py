"""Scorers of candidates against a reference: a judge, or a reward of pairs such as CLIP-I."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from pacorl.bench.items import BadItemError
from pacorl.core import questions as wordings
from pacorl.core.devices import available_device
from pacorl.core.grid import join
from pacorl.io.documents import JsonObject
from pacorl.judge.pairwise import THEME, Criterion, ask_pairs, by_criterion, mean_over_dimensions
from pacorl.records.consistency_rank import Ranked
from pacorl.types import Grid, Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.gate.paco_reward import PacoReward
    from pacorl.rewards.reward import Reward

Wording = Literal["criteria", "word", "reasons"]
"""ConsistencyRank's three questions: per written criterion, plain, plain with reasons to follow (its default)."""
OpenImage = Callable[[str], "Image"]

PAIR = Grid(1, 2)  # rewards take one image per prompt, so a pair is a grid


@dataclass(frozen=True, slots=True)
class Score:
    """Score of a pair, or the reason why there is none."""

    value: float | None
    error: str = ""


def load_reward(name: str) -> Reward:
    """Load a reward of the table or of a file. Raises ValueError if there is no such reward."""
    # Rewards import torch; a command's help, which reads this file, must not.
    from pacorl.config.reward_section import RewardConfig
    from pacorl.rewards import build_rewards, check_rewards
    from pacorl.rewards.reward import Loads

    config = RewardConfig(name=name)
    check_rewards([config], key="scorer")
    (reward,) = build_rewards([config], judge=_NoJudge(), device=available_device()).values()
    if isinstance(reward, Loads):
        reward.load()
    return reward


class _NoJudge:
    """Judge of a reward scorer, which has none; to ask a judge, the scorer is `judge`."""

    def verdicts(self, questions: Any) -> Any:
        raise ValueError("this reward asks a judge; score with --scorer judge instead")

    explain = verdicts


@dataclass(frozen=True, slots=True)
class JudgePairs:
    """Scorer of (reference, candidate) by P(Yes), in this order."""

    judge: PacoReward
    wording: Wording = "reasons"

    def settings(self) -> JsonObject:
        return {"judge": self.judge.name, "wording": self.wording}

    def scores(self, items: Sequence[Ranked], open_image: OpenImage) -> list[list[Score]]:
        """Score all items in one call."""
        images = []
        for item in items:
            images.append([open_image(f"{item.folder}/{name}") for name in (item.reference, *item.candidates)])
        answers = ask_pairs(
            self.judge.judge,
            images,
            [self._texts(item) for item in items],
            # The reference first, as in the released evaluation: a judge's answers depend on the order.
            pairs=[[(0, candidate) for candidate in range(1, len(shown))] for shown in images],
        )

        scores = []
        for pairs in answers:
            verdicts = [mean_over_dimensions(by_text) for by_text in pairs.values()]
            scores.append([Score(verdict.p_yes, verdict.error) for verdict in verdicts])
        return scores

    def _texts(self, item: Ranked) -> dict[Criterion, str]:
        if self.wording == "reasons":
            return {THEME: wordings.consistent()}
        if self.wording == "word":
            return {THEME: wordings.consistent_in_a_word()}
        texts = by_criterion(item.criteria, wordings.meets_criterion_in_a_word)
        if not texts:
            raise BadItemError(f"{item.key}: prompt_data.jsonl has no criteria for it; ask another wording")
        return texts


@dataclass(frozen=True, slots=True)
class RewardPairs:
    """Scorer by any reward of pairs, on a grid of reference and candidate: such as `panel_clip_image`."""

    reward: Reward
    name: str

    def settings(self) -> JsonObject:
        return {"reward": self.name}

    def scores(self, items: Sequence[Ranked], open_image: OpenImage) -> list[list[Score]]:
        prompts: list[Prompt] = []
        images: list[Image] = []
        for item in items:
            reference = open_image(f"{item.folder}/{item.reference}")
            for name in item.candidates:
                candidate = open_image(f"{item.folder}/{name}")
                # A grid has panels of one size, and resizing would score another image.
                if reference.size != candidate.size:
                    sizes = f"{reference.size} and {candidate.size}"
                    raise BadItemError(f"{item.key}: reference and candidate are {sizes} pixels")
                prompts.append(Prompt(id=len(prompts), text=item.prompt, theme=item.prompt, grid=PAIR))
                images.append(join([reference, candidate], PAIR))

        values = iter(self.reward(prompts, images))
        scores = []
        for item in items:
            scores.append([self._score(next(values)) for _ in item.candidates])
        return scores

    def _score(self, value: float | None) -> Score:
        """Infinities and NaN are no score."""
        return Score(value) if value is not None and isfinite(value) else Score(None, f"{self.name} gave no score")


PairScorer = JudgePairs | RewardPairs
"""Scorer of every candidate of several items; higher fits better."""
