"""Who scores for a benchmark: a judge, a reward such as CLIP-I or DreamSim, or a file of scores.

A `PairScorer` says how well candidates fit a reference, a `TextScorer` how well images show texts; `settings` is what
their scores depend on. Any reward may be either, by its name and `key=value` arguments, as a config has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pacorl.bench.items import BadItemError
from pacorl.core import questions as wordings
from pacorl.core.devices import available_device
from pacorl.core.grid import join
from pacorl.io.documents import parse_yaml, read_jsonl
from pacorl.judge.pairwise import THEME, Criterion, ask_pairs, by_criterion, mean_over_dimensions
from pacorl.types import Grid, Prompt, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.paco_reward import PacoReward
    from pacorl.rewards.reward import Reward

Wording = Literal["criteria", "word", "reasons"]
"""ConsistencyRank's three questions: per written criterion, plain, plain with reasons to follow (its default)."""
OpenImage = Callable[[str], "Image"]

PAIR = Grid(1, 2)  # rewards take one image per prompt, so a pair is a grid


@dataclass(frozen=True, slots=True)
class Score:
    """How well something fits, or why nobody can say."""

    value: float | None
    error: str = ""


def load_reward(kind: str, arguments: Sequence[str]) -> tuple[Reward, str]:
    """A loaded reward from its name and `key=value` arguments, and what names both.

    Raises:
        ValueError: if there is no such reward, or it takes other arguments.
    """
    # Rewards bring torch; a command's help, which reads this file, must not.
    from pacorl.config.reward_section import RewardConfig
    from pacorl.rewards import build_rewards, check_rewards
    from pacorl.rewards.reward import Loads

    config = RewardConfig(name=kind, args=dict(_argument(text) for text in arguments))
    check_rewards([config], key="scorer")  # names and types of arguments, before weights are loaded
    (reward,) = build_rewards([config], judge=_NoJudge(), device=available_device()).values()
    if isinstance(reward, Loads):
        reward.load()
    return reward, " ".join([kind, *arguments])


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"argument {text!r} is not of the form name=value")
    return name, parse_yaml(value, name=f"argument {text!r}")


class _NoJudge:
    """A scorer that is named as a reward has no judge; to ask a judge, the scorer is `judge`."""

    def verdicts(self, questions: Any) -> Any:
        raise ValueError("this reward asks a judge; score with --scorer judge instead")

    explain = verdicts


def score_of(value: float | None, name: str) -> Score:
    """A score as `name` gave it: a number that is not finite is none."""
    return Score(value) if value is not None and isfinite(value) else Score(None, f"{name} gave no score")


@dataclass(frozen=True, slots=True)
class Ranked:
    """A reference, its candidates, and the order that people gave them."""

    key: str
    folder: str
    reference: str
    candidates: tuple[str, ...]
    best_first: tuple[str, ...]
    category: str = ""
    prompt: str = ""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgePairs:
    """P(Yes) of (reference, candidate), in this order."""

    judge: PacoReward
    wording: Wording = "reasons"

    def settings(self) -> Mapping[str, Any]:
        return {"judge": self.judge.name, "wording": self.wording}

    def scores(self, items: Sequence[Ranked], open_image: OpenImage) -> list[list[Score]]:
        """All questions in one call."""
        answers = ask_pairs(
            self.judge.judge,
            [[open_image(item.reference), *map(open_image, item.candidates)] for item in items],
            [self._texts(item) for item in items],
            # The reference first, as the released evaluation asks: a judge's answers depend on the order.
            pairs=lambda count: [(0, candidate) for candidate in range(1, count)],
        )

        verdicts = []
        for pairs in answers:
            verdicts.append([mean_over_dimensions(by_text) for by_text in pairs.values()])

        return [[Score(verdict.p_yes, verdict.error) for verdict in of_item] for of_item in verdicts]

    def _texts(self, item: Ranked) -> dict[Criterion, str]:
        if self.wording != "criteria":
            return {THEME: wordings.consistent() if self.wording == "reasons" else wordings.consistent_in_a_word()}
        texts = by_criterion(item.criteria, wordings.meets_criterion_in_a_word)
        if not texts:
            raise BadItemError(f"{item.key}: prompt_data.jsonl has no criteria for it; ask another wording")
        return texts


@dataclass(frozen=True, slots=True)
class RewardPairs:
    """Any reward of pairs, on a grid of reference and candidate: `panel_clip_image` is CLIP-I, `dreamsim` DreamSim."""

    reward: Reward
    name: str

    def settings(self) -> Mapping[str, Any]:
        return {"reward": self.name}

    def scores(self, items: Sequence[Ranked], open_image: OpenImage) -> list[list[Score]]:
        texts = [item.prompt for item in items for _ in item.candidates]
        prompts = [Prompt(id=number, text=text, theme=text, grid=PAIR) for number, text in enumerate(texts)]
        images = []
        for item in items:
            reference = open_image(item.reference)
            for candidate in map(open_image, item.candidates):
                # A grid has panels of one size, and to resize one of the two would be to score another image.
                if reference.size != candidate.size:
                    sizes = f"{reference.size} and {candidate.size}"
                    raise BadItemError(f"{item.key}: reference and candidate are {sizes} pixels")
                images.append(join([reference, candidate], PAIR))
        values = iter(self.reward(prompts, images))
        return [[score_of(next(values), self.name) for _ in item.candidates] for item in items]


class ScoreFile:
    """Scores that somebody has already: a JSONL of {folder, ref_image, comp_images, scores}, one line per item.

    The results of the released evaluation are such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scores: dict[tuple[str, ...], list[float]] = {}
        for number, row in enumerate(read_jsonl(path), 1):
            key, scores = _score_row(row, where=f"{path}, record {number}")
            if key in self._scores:
                raise ValueError(f"{path}, record {number}: {key[0]}/{key[1]} has scores in an earlier record already")
            self._scores[key] = scores

    def settings(self) -> Mapping[str, Any]:
        return {"scores": str(self.path)}

    def scores(self, items: Sequence[Ranked], open_image: OpenImage) -> list[list[Score]]:
        return [self._of(item) for item in items]

    def _of(self, item: Ranked) -> list[Score]:
        # The released results name files without their folder, which is a key of its own.
        scores = self._scores.get((item.folder, *(Path(name).name for name in (item.reference, *item.candidates))))
        if scores is None:
            return [Score(None, f"{self.path} has no scores of it")] * len(item.candidates)
        return [score_of(value, str(self.path)) for value in scores]


def _score_row(row: Mapping[str, Any], *, where: str) -> tuple[tuple[str, ...], list[float]]:
    names = row.get("comp_images", row.get("comparison_images"))
    reference = row.get("ref_image", row.get("ref_img"))
    scores = row.get("scores")
    if not (isinstance(names, list) and isinstance(reference, str) and isinstance(row.get("folder"), str)):
        raise ValueError(f"{where}: needs folder, ref_image and comp_images, it has {', '.join(row)}")
    if not isinstance(scores, list) or not all(isinstance(score, int | float) for score in scores):
        raise ValueError(f"{where}: 'scores' must be a list of numbers, got {json.dumps(scores)[:80]}")
    if len(scores) != len(names):
        raise ValueError(f"{where}: {len(scores)} scores for {len(names)} candidates")
    return (row["folder"], reference, *names), [float(score) for score in scores]


PairScorer = JudgePairs | RewardPairs | ScoreFile
"""Scores every candidate of several items; higher fits better."""


@dataclass(frozen=True, slots=True)
class JudgeTexts:
    """VQA-style: a judge's P(Yes) to VQAScore's question."""

    judge: PacoReward

    def settings(self) -> Mapping[str, Any]:
        return {"alignment": f"judge {self.judge.name}"}

    def scores(self, images: Sequence[Image], texts: Sequence[str]) -> list[Score]:
        questions = []
        for image, text in zip(images, texts, strict=True):
            questions.append(Question((image,), wordings.figure_shows(text)))

        return [Score(verdict.p_yes, verdict.error) for verdict in self.judge.judge.verdicts(questions)]


@dataclass(frozen=True, slots=True)
class RewardTexts:
    """Any reward of (text, image): a service of one's own (`http`), CLIP, or an aesthetics predictor."""

    reward: Reward
    name: str

    def settings(self) -> Mapping[str, Any]:
        return {"alignment": f"reward {self.name}"}

    def scores(self, images: Sequence[Image], texts: Sequence[str]) -> list[Score]:
        # The text as the prompt and as its only panel: some rewards read the one, some the other.
        prompts = [Prompt(id=number, text=text, theme=text, panels=(text,)) for number, text in enumerate(texts)]
        return [score_of(value, self.name) for value in self.reward(prompts, images)]


TextScorer = JudgeTexts | RewardTexts
"""Scores each image and its text: how well it shows it."""
