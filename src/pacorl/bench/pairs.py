"""Who says how well a candidate fits a reference: a judge, a reward such as CLIP-I or DreamSim, or a file of scores."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pacorl.bench.suite import BadItemError
from pacorl.core import questions as wordings
from pacorl.core.grid import join
from pacorl.io.documents import read_jsonl
from pacorl.judges.pairwise import THEME, Criterion, Pair, ask_pairs, by_criterion, mean_over_dimensions
from pacorl.types import Grid, Prompt, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge
    from pacorl.rewards.reward import Reward

Wording = Literal["criteria", "word", "reasons"]
"""ConsistencyRank's three questions: per written criterion, plain, plain with reasons to follow (its default)."""
Opener = Callable[[str], "Image"]
Criteria = Mapping[str, Mapping[str, str]]

PAIR = Grid(1, 2)


@dataclass(frozen=True, slots=True)
class Ranked:
    """A reference, its candidates, and the order that people gave them."""

    key: str
    folder: str
    reference: str
    candidates: tuple[str, ...]
    best_first: tuple[str, ...]
    category: str = ""
    task: str = ""
    prompt: str = ""
    criteria: Criteria = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """How well a candidate fits, or why nobody can say."""

    value: float | None
    error: str = ""


class PairScorer(Protocol):
    """Scores every candidate of several items; higher fits better."""

    def settings(self) -> Mapping[str, Any]:
        """What the scores depend on."""

    def scores(self, items: Sequence[Ranked], open_picture: Opener) -> list[list[Score]]:
        """One list per item, one score per candidate."""


class JudgePairs:
    """P(Yes) of (reference, candidate), in this order."""

    def __init__(self, judge: Judge, *, name: str, wording: Wording = "reasons") -> None:
        self.judge, self.name, self.wording = judge, name, wording

    def settings(self) -> Mapping[str, Any]:
        return {"judge": self.name, "wording": self.wording}

    def scores(self, items: Sequence[Ranked], open_picture: Opener) -> list[list[Score]]:
        """All questions in one call."""
        sets = [[open_picture(item.reference), *map(open_picture, item.candidates)] for item in items]
        answers = ask_pairs(self.judge, sets, [self._texts(item) for item in items], pairs=_with_reference)
        return [[_score(mean_over_dimensions(named)) for named in pairs.values()] for pairs in answers]

    def _texts(self, item: Ranked) -> dict[Criterion, str]:
        if self.wording == "word":
            return {THEME: wordings.consistent_in_a_word()}
        if self.wording == "reasons":
            return {THEME: wordings.consistent()}
        texts = by_criterion(item.criteria, wordings.meets_criterion_in_a_word)
        if not texts:
            raise BadItemError(f"{item.key}: prompt_data.jsonl has no criteria for it; ask another wording")
        return texts


def _with_reference(count: int) -> list[Pair]:
    """The first of so many images with each of the others."""
    return [(0, candidate) for candidate in range(1, count)]


def _score(verdict: Verdict) -> Score:
    return Score(verdict.p_yes, verdict.error)


class RewardPairs:
    """Any reward of pairs, on a sheet of reference and candidate: `panel_clip_image` is CLIP-I, `dreamsim` DreamSim."""

    def __init__(self, reward: Reward, *, name: str) -> None:
        self.reward, self.name = reward, name

    def settings(self) -> Mapping[str, Any]:
        return {"reward": self.name}

    def scores(self, items: Sequence[Ranked], open_picture: Opener) -> list[list[Score]]:
        pairs = [(item, candidate) for item in items for candidate in item.candidates]
        sheets = [_sheet(open_picture(item.reference), open_picture(name), item.key) for item, name in pairs]
        prompts = [
            Prompt(id=number, text=item.prompt, theme=item.prompt, grid=PAIR) for number, (item, _) in enumerate(pairs)
        ]
        values = iter(self.reward(prompts, sheets))
        return [[_scored(next(values), self.name) for _ in item.candidates] for item in items]


def _sheet(reference: Image, candidate: Image, key: str) -> Image:
    if reference.size != candidate.size:
        raise BadItemError(f"{key}: reference and candidate are {reference.size} and {candidate.size} pixels")
    return join([reference, candidate], PAIR)


def _scored(value: float | None, name: str) -> Score:
    known = value is not None and isfinite(value)
    return Score(value) if known else Score(None, f"{name} gave no score")


class ScoreFile:
    """Scores that somebody has already: a JSONL of {folder, ref_image, comp_images, scores}, one line per item.

    The results of the released evaluation are such a file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held: dict[tuple[Any, ...], list[float]] = {}
        for number, row in enumerate(read_jsonl(path), 1):
            key, scores = _score_row(row, where=f"{path}, record {number}")
            if key in self._held:
                raise ValueError(f"{path}, record {number}: {key[0]}/{key[1]} has scores in an earlier record already")
            self._held[key] = scores

    def settings(self) -> Mapping[str, Any]:
        return {"scores": str(self.path)}

    def scores(self, items: Sequence[Ranked], open_picture: Opener) -> list[list[Score]]:
        return [self._of(item) for item in items]

    def _of(self, item: Ranked) -> list[Score]:
        held = self._held.get((item.folder, Path(item.reference).name, *(Path(one).name for one in item.candidates)))
        if held is None:
            return [Score(None, f"{self.path} has no scores of it")] * len(item.candidates)
        return [_scored(value, str(self.path)) for value in held]


def _score_row(row: Mapping[str, Any], *, where: str) -> tuple[tuple[Any, ...], list[float]]:
    names = row.get("comp_images", row.get("comparison_images"))
    reference, scores = row.get("ref_image", row.get("ref_img")), row.get("scores")
    if not (isinstance(names, list) and isinstance(reference, str) and isinstance(row.get("folder"), str)):
        raise ValueError(f"{where}: needs folder, ref_image and comp_images, it has {', '.join(row)}")
    if not isinstance(scores, list) or not all(isinstance(one, int | float) for one in scores):
        raise ValueError(f"{where}: 'scores' must be a list of numbers, got {json.dumps(scores)[:80]}")
    if len(scores) != len(names):
        raise ValueError(f"{where}: {len(scores)} scores for {len(names)} candidates")
    return (row["folder"], reference, *names), [float(one) for one in scores]
