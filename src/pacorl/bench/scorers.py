"""Scorers of a benchmark: a judge, or a reward such as CLIP-I or DreamSim.

A `PairScorer` scores candidates against a reference, a `TextScorer` images against texts; `settings` lists the inputs
of their scores. Any reward may be either, by its name and `key=value` arguments, as in a config.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from pacorl.bench.items import BadItemError
from pacorl.core import questions as wordings
from pacorl.core.devices import available_device
from pacorl.core.grid import join
from pacorl.io.documents import JsonObject, parse_yaml
from pacorl.judge.pairwise import THEME, Criterion, ask_pairs, by_criterion, mean_over_dimensions
from pacorl.records.consistency_rank import Ranked
from pacorl.types import Grid, Prompt, Question

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
    """Score of a pair or of an image, or the reason why there is none."""

    value: float | None
    error: str = ""


def load_reward(kind: str, arguments: Sequence[str]) -> tuple[Reward, str]:
    """Load a reward by its name and `key=value` arguments; return it and a name for both.

    Raises:
        ValueError: there is no such reward, or it has no such arguments.
    """
    # Rewards import torch; a command's help, which reads this file, must not.
    from pacorl.config.reward_section import RewardConfig
    from pacorl.rewards import build_rewards, check_rewards
    from pacorl.rewards.reward import Loads

    # Arguments as a config would have them.
    args = {}
    for text in arguments:
        name, equals, argument = text.partition("=")
        if not (name and equals):
            raise ValueError(f"argument {text!r} is not of the form name=value")
        args[name] = parse_yaml(argument, name=f"argument {text!r}")
    config = RewardConfig(name=kind, args=args)
    check_rewards([config], key="scorer")  # names and types of arguments, before weights are loaded
    (reward,) = build_rewards([config], judge=_NoJudge(), device=available_device()).values()
    if isinstance(reward, Loads):
        reward.load()
    return reward, " ".join([kind, *arguments])


class _NoJudge:
    """Judge of a reward scorer, which has none; to ask a judge, the scorer is `judge`."""

    def verdicts(self, questions: Any) -> Any:
        raise ValueError("this reward asks a judge; score with --scorer judge instead")

    explain = verdicts


def score_of(value: float | None, name: str) -> Score:
    """Score of `name`; infinities and NaN are no score."""
    if value is None or not isfinite(value):
        return Score(None, f"{name} gave no score")
    return Score(value)


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
            pairs=lambda count: [(0, candidate) for candidate in range(1, count)],
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
    """Scorer by any reward of pairs, on a grid of reference and candidate: `panel_clip_image`, `dreamsim`."""

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
            scores.append([score_of(next(values), self.name) for _ in item.candidates])
        return scores


PairScorer = JudgePairs | RewardPairs
"""Scorer of every candidate of several items; higher fits better."""


@dataclass(frozen=True, slots=True)
class JudgeTexts:
    """Scorer of images and texts in VQA style: a judge's P(Yes) to VQAScore's question."""

    judge: PacoReward

    def settings(self) -> JsonObject:
        return {"alignment": f"judge {self.judge.name}"}

    def scores(self, images: Sequence[Image], texts: Sequence[str]) -> list[Score]:
        questions = []
        for image, text in zip(images, texts, strict=True):
            questions.append(Question((image,), wordings.figure_shows(text)))

        return [Score(verdict.p_yes, verdict.error) for verdict in self.judge.judge.verdicts(questions)]


@dataclass(frozen=True, slots=True)
class RewardTexts:
    """Scorer by any reward of (text, image): your own service (`http`), CLIP, or an aesthetics predictor."""

    reward: Reward
    name: str

    def settings(self) -> JsonObject:
        return {"alignment": f"reward {self.name}"}

    def scores(self, images: Sequence[Image], texts: Sequence[str]) -> list[Score]:
        # The text as the prompt and as its only panel, because rewards differ in the field they read.
        prompts = []
        for number, text in enumerate(texts):
            prompts.append(Prompt(id=number, text=text, theme=text, panels=(text,)))
        return [score_of(value, self.name) for value in self.reward(prompts, images)]


TextScorer = JudgeTexts | RewardTexts
"""Scorer of images with one text each."""
