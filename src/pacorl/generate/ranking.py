"""Candidates by what a judge says of them: sets by their pairs of panels, edits by what was kept and followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import TYPE_CHECKING, Literal

from PIL.Image import Resampling

from pacorl.core import questions
from pacorl.core.grid import shared_text, split
from pacorl.io.images import open_image
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import mean_of
from pacorl.types import Prompt, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

Ask = Literal["theme", "criteria"]
Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of one picture."""

    score: float | None
    """0..1; None where an answer is missing."""
    matrix: Matrix = ()
    """P(Yes) of every two panels of a set, None on the diagonal; empty for an edit."""
    parts: tuple[tuple[str, float | None], ...] = ()
    """What the score is made of, by name."""
    error: str = ""


def judge_sets(judge: Judge, prompts: Sequence[Prompt], sheets: Sequence[Image], *, ask: Ask = "theme") -> list[Judged]:
    """The consistency reward's own questions of every pair of panels, their mean the score.

    Raises ValueError for a single picture, and where criteria are to be asked for and a prompt has none.
    """
    reward = Consistency(judge, ask=ask)
    reward.check(prompts)
    pairs = reward.pairs(prompts, sheets)
    return [
        Judged(score, matrix_of(verdicts, prompt.grid.count), error=_error(verdicts))
        for score, verdicts, prompt in zip(reward.reduce(pairs), pairs, prompts, strict=True)
    ]


def judge_beside(
    judge: Judge,
    prompts: Sequence[Prompt],
    sheets: Sequence[Image],
    earlier: Sequence[Image],
    *,
    ask: Ask = "theme",
) -> list[Judged]:
    """As `judge_sets`, with every pair of a panel and an earlier page's panel counted too."""
    alone = judge_sets(judge, prompts, sheets, ask=ask)
    if not earlier:
        return alone
    asked = [
        [Question((before, panel), text) for before in earlier for panel in split(sheet, prompt.grid) for text in texts]
        for prompt, sheet in zip(prompts, sheets, strict=True)
        for texts in [_texts(prompt, ask)]
    ]
    answers = iter(judge.verdicts([question for several in asked for question in several]))
    return [_beside(one, [next(answers) for _ in several]) for one, several in zip(alone, asked, strict=True)]


def _texts(prompt: Prompt, ask: Ask) -> list[str]:
    if ask == "theme":
        return [questions.same_theme(shared_text(prompt.text))]
    return [questions.meets_criterion(text) for named in prompt.criteria.values() for text in named.values()]


def _beside(alone: Judged, across: Sequence[Verdict]) -> Judged:
    own = [alone.matrix[i][j] for i, j in combinations(range(len(alone.matrix)), 2)]
    own_score, across_score = alone.score, mean_of(across)
    parts = (("this page", own_score), ("with earlier pages", across_score))
    if own_score is None or across_score is None:
        return Judged(None, alone.matrix, parts, alone.error or _error(across))
    score = (own_score * len(own) + across_score * len(across)) / (len(own) + len(across))
    return Judged(score, alone.matrix, parts)


def judge_edits(judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[Judged]:
    """√(kept · followed) by the judge's two questions about an edit and its first source, as `EditConsistency` asks
    them: of the source at the edit's size."""
    sources = {path: open_image(path) for prompt in prompts for path in prompt.sources[:1]}
    asked = []
    for prompt, image in zip(prompts, images, strict=True):
        source = sources[prompt.sources[0]].resize(image.size, Resampling.LANCZOS)
        asked += [Question((source, image), ask(prompt.text)) for ask in (questions.edit_kept, questions.edit_followed)]
    answers = judge.verdicts(asked)
    return [_edit(kept, followed) for kept, followed in zip(answers[::2], answers[1::2], strict=True)]


def _edit(kept: Verdict, followed: Verdict) -> Judged:
    parts = (("kept", kept.p_yes), ("followed", followed.p_yes))
    if kept.p_yes is None or followed.p_yes is None:
        return Judged(None, parts=parts, error=_error([kept, followed]))
    return Judged(sqrt(kept.p_yes * followed.p_yes), parts=parts)


def best_first(judged: Sequence[Judged]) -> list[int]:
    """Indices by score, best first; of equal ones the earlier, those without a score last.

    Raises RuntimeError where none has a score: there is nothing to choose by.
    """
    if all(one.score is None for one in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")
    return sorted(range(len(judged)), key=lambda i: (judged[i].score is None, -(judged[i].score or 0.0), i))


def matrix_of(verdicts: Sequence[Verdict], count: int) -> Matrix:
    """Verdicts in the order of `itertools.combinations` → a symmetric matrix."""
    found = dict(zip(combinations(range(count), 2), (verdict.p_yes for verdict in verdicts), strict=True))
    every = range(count)
    return tuple(tuple(found.get((min(row, col), max(row, col))) for col in every) for row in every)


def _error(verdicts: Sequence[Verdict]) -> str:
    return "; ".join(dict.fromkeys(verdict.error for verdict in verdicts if not verdict.valid))
