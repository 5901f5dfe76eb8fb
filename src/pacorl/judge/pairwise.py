"""Questions about image pairs, sent to a judge in one call, with the verdicts keyed by set, pair and criterion.

    answers = ask_pairs(judge, [panels], [{("Style", "Ink"): "Is it one ink?"}])
    answers[0][0, 1]["Style", "Ink"].p_yes     # first set, first two panels, this criterion

A call sends all questions at once and in the order of their keys, so that the judge can share common prefixes. The
order also decides the batches, and so the last bits of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from math import sqrt
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeVar

from pacorl.core import questions as wordings
from pacorl.core.grid import shared_text
from pacorl.judge.judge import Judge
from pacorl.types import Matrix, Prompt, Question, SetCriteria, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

Key = TypeVar("Key", bound=Hashable)
Name = TypeVar("Name", bound=Hashable)

Pair = tuple[int, int]
"""Two indices into the images of a set, the smaller first."""
Criterion = tuple[str, str]
"""Dimension and name of a written criterion."""
Ask = Literal["theme", "criteria"]
"""Questions about each pair: one about the theme, or one per written criterion."""

THEME: Criterion = ("theme", "")


def ask(judge: Judge, questions: Mapping[Key, Question]) -> dict[Key, Verdict]:
    """Ask all questions in one call and return each verdict under its question's key; see `ask_each`."""
    return ask_each(judge, [questions])[0]


def ask_each(judge: Judge, questions_of_items: Sequence[Mapping[Key, Question]]) -> list[dict[Key, Verdict]]:
    """Ask the questions about several items in one call; return each item's verdicts under its questions' keys.

    Raises:
        ValueError: if the judge miscounts.
    """
    in_order: list[Question] = []
    for questions in questions_of_items:
        in_order += questions.values()
    verdicts = judge.verdicts(in_order) if in_order else []

    # A judge may be user code, and one verdict too few would shift every later verdict to another question.
    if len(verdicts) != len(in_order):
        raise ValueError(f"the judge returned {len(verdicts)} verdicts for {len(in_order)} questions")
    following = iter(verdicts)
    return [dict(zip(questions, following, strict=False)) for questions in questions_of_items]


def ask_pairs(
    judge: Judge,
    sets: Sequence[Sequence[Image]],
    texts: Sequence[Mapping[Name, str]],
    *,
    pairs: Sequence[Iterable[Pair]] | None = None,
) -> list[dict[Pair, dict[Name, Verdict]]]:
    """Ask every text about every pair of each set, in one call.

    Args:
        texts: Name → question, per set.
        pairs: The pairs to ask about, per set; all pairs by default.

    Returns:
        Per set, pair → name → verdict; a set of one image has no pairs.
    """
    if pairs is None:
        pairs = [combinations(range(len(images)), 2) for images in sets]
    questions = {}
    for number, (images, text_of, pairs_of_set) in enumerate(zip(sets, texts, pairs, strict=True)):
        for pair in pairs_of_set:
            both = (images[pair[0]], images[pair[1]])
            for name, text in text_of.items():
                questions[number, pair, name] = Question(both, text)

    answers: list[dict[Pair, dict[Name, Verdict]]] = [{} for _ in sets]
    for (number, pair, name), verdict in ask(judge, questions).items():
        answers[number].setdefault(pair, {})[name] = verdict
    return answers


def texts_about(prompt: Prompt, about: Ask) -> dict[Criterion, str]:
    """Build the questions of a reward about a pair of a prompt's panels."""
    if about == "theme":
        return {THEME: wordings.same_theme(shared_text(prompt.text))}
    return by_criterion(prompt.criteria, wordings.meets_criterion)


def by_criterion(criteria: SetCriteria, wording: Callable[[str], str]) -> dict[Criterion, str]:
    """Build one question per written criterion."""
    questions = {}
    for dimension, texts in criteria.items():
        for name, text in texts.items():
            questions[dimension, name] = wording(text)
    return questions


def ask_edits(judge: Judge, edits: Sequence[tuple[Image, Image, str]]) -> list[dict[str, Verdict]]:
    """Ask whether each (source, edit, instruction) `kept` all else, and `followed` the instruction.

    The source is resized to its edit's size, so that resizing alone is no difference.
    """
    from PIL.Image import Resampling

    questions_of_edits = []
    for source, edit, instruction in edits:
        pair = (source.resize(edit.size, Resampling.LANCZOS), edit)
        kept = Question(pair, wordings.edit_kept(instruction))
        followed = Question(pair, wordings.edit_followed(instruction))
        questions_of_edits.append({"kept": kept, "followed": followed})
    return ask_each(judge, questions_of_edits)


def edit_score(p_yes: Mapping[str, float | None]) -> float | None:
    """Return √(kept · followed), EditReward-Bench's overall score; None if one is missing."""
    kept, followed = p_yes["kept"], p_yes["followed"]
    if kept is None or followed is None:
        return None
    return sqrt(kept * followed)


def mean_over_dimensions(answers: Mapping[Criterion, Verdict]) -> Verdict:
    """Average over the criteria of a dimension, then over dimensions (T2IS-Bench); the first missing verdict if any."""
    # A dimension counts once, however many criteria it has.
    dimensions: dict[str, list[float]] = {}
    for (dimension, _), verdict in answers.items():
        if verdict.p_yes is None:
            return verdict
        dimensions.setdefault(dimension, []).append(verdict.p_yes)
    means = [fmean(p_yes) for p_yes in dimensions.values()]
    return Verdict(fmean(means))


def matrix_of(verdicts: Mapping[Pair, Verdict], count: int) -> Matrix:
    """Build the symmetric P(Yes) matrix of `count` images."""
    return symmetric_matrix({pair: verdict.p_yes for pair, verdict in verdicts.items()}, count)


def symmetric_matrix(p_yes: Mapping[Pair, float | None], count: int) -> Matrix:
    """Build a symmetric matrix from values by pair."""
    rows: list[list[float | None]] = [[None] * count for _ in range(count)]
    for (first, second), value in p_yes.items():
        rows[first][second] = value
        rows[second][first] = value
    return tuple(map(tuple, rows))


def errors_of(verdicts: Iterable[Verdict]) -> str:
    """Join the distinct errors of missing verdicts."""
    errors = []
    for verdict in verdicts:
        if verdict.error:
            errors.append(verdict.error)

    return "; ".join(dict.fromkeys(errors))
