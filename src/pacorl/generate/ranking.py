"""Candidates by what a judge says of them: sets by their pairs of panels, edits by what was kept and followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from pacorl.core.grid import split
from pacorl.io.images import open_image
from pacorl.judges.pairwise import Ask, Matrix, ask_edits, ask_pairs, errors_of, matrix_of, texts_about
from pacorl.rewards.consistency import Consistency
from pacorl.rewards.reward import mean_of
from pacorl.types import Prompt, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judges.judge import Judge


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of one image."""

    score: float | None
    """0..1; None if an answer is missing."""
    matrix: Matrix = ()
    """P(Yes) of every two panels of a set, None on the diagonal; empty for an edit."""
    parts: tuple[tuple[str, float | None], ...] = ()
    """What the score is made of, by name."""
    error: str = ""


def judge_sets(judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image], *, ask: Ask = "theme") -> list[Judged]:
    """The consistency reward's own questions about every pair of panels, their mean the score.

    Raises:
        ValueError: for a single image, and if criteria are to be asked for and a prompt has none.
    """
    reward = Consistency(judge, ask=ask)
    reward.check(prompts)
    pairs = reward.pairs(prompts, images)
    return [
        Judged(score, matrix_of(verdicts, prompt.grid.count), error=errors_of(verdicts.values()))
        for score, verdicts, prompt in zip(reward.reduce(pairs), pairs, prompts, strict=True)
    ]


def judge_with_earlier(
    judge: Judge,
    prompts: Sequence[Prompt],
    images: Sequence[Image],
    earlier: Sequence[Image],
    *,
    ask: Ask = "theme",
) -> list[Judged]:
    """As `judge_sets`, with every pair of an earlier page's panel and a panel counted too."""
    alone = judge_sets(judge, prompts, images, ask=ask)
    if not earlier:
        return alone
    before = range(len(earlier))
    answers = ask_pairs(
        judge,
        [[*earlier, *split(image, prompt.grid)] for prompt, image in zip(prompts, images, strict=True)],
        [texts_about(prompt, ask) for prompt in prompts],
        pairs=lambda count: product(before, range(len(earlier), count)),
    )
    return [
        _with_earlier(page, [verdict for verdicts in pairs.values() for verdict in verdicts.values()])
        for page, pairs in zip(alone, answers, strict=True)
    ]


def _with_earlier(alone: Judged, across: Sequence[Verdict]) -> Judged:
    own_pairs = len(alone.matrix) * (len(alone.matrix) - 1) // 2
    own_score, across_score = alone.score, mean_of(across)
    scores = (("this page", own_score), ("with earlier pages", across_score))
    if own_score is None or across_score is None:
        return Judged(None, alone.matrix, scores, alone.error or errors_of(across))
    score = (own_score * own_pairs + across_score * len(across)) / (own_pairs + len(across))
    return Judged(score, alone.matrix, scores)


def judge_edits(judge: Judge, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[Judged]:
    """√(kept · followed) by the judge's two questions about an edit and its first source, as `EditConsistency`."""
    sources = {path: open_image(path) for prompt in prompts for path in prompt.sources[:1]}
    edits = [(sources[prompt.sources[0]], image, prompt.text) for prompt, image in zip(prompts, images, strict=True)]
    return [
        Judged(
            verdicts.score(),
            parts=(("kept", verdicts.kept.p_yes), ("followed", verdicts.followed.p_yes)),
            error=errors_of([verdicts.kept, verdicts.followed]),
        )
        for verdicts in ask_edits(judge, edits)
    ]


def best_first(judged: Sequence[Judged]) -> list[int]:
    """Indices by score, best first; of equal ones the earlier, those without a score last.

    Raises RuntimeError if none has a score: there is nothing to choose by.
    """
    if all(candidate.score is None for candidate in judged):
        raise RuntimeError(f"the judge gave no verdict, so no candidate is the best: {judged[0].error}")
    return sorted(range(len(judged)), key=lambda i: (judged[i].score is None, -(judged[i].score or 0.0), i))
