"""Ratings of edits by a rubric, in words: any vision-language model, over HTTP or in this process.

SC (semantic consistency) and PQ (perceptual quality) are each the lower of two scores; O = √(SC · PQ), as VIEScore
(arXiv 2312.14867) has it and GEdit-Bench uses it.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field

from pacorl.io.documents import JsonObject, object_within, read_yaml, typed
from pacorl.io.files import text_digest
from pacorl.types import Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

RUBRIC = Path(__file__).with_name("rubric.yaml")
INSTRUCTION = "{instruction}"
BEST = 10
"""Highest score."""
ATTEMPTS = 3
"""Number of questions before an unusable answer is given up."""


class UnratedError(Exception):
    """No usable answer of the model."""


class Rubric(BaseModel):
    """Wording of a rating."""

    semantics: str
    quality: str

    @property
    def digest(self) -> str:
        """Digest of the words: two wordings of a rubric are two benchmarks."""
        return text_digest(self.semantics + self.quality)[:16]


def read_rubric() -> Rubric:
    """Read the rubric."""
    return typed(read_yaml(RUBRIC), Rubric)


def rate(judge: Judge, rubric: Rubric, before: Image, after: Image, *, instruction: str) -> JsonObject:
    """Ask for both pairs of scores, from 0 to 10, and their reasons.

    Raises:
        UnratedError: with the last fault.
    """
    # Not `format`: a rubric shows the requested JSON, braces and all.
    text = rubric.semantics.replace(INSTRUCTION, instruction)
    semantics, why_semantics = ask_scores(judge, Question((before, after), text))
    quality, why_quality = ask_scores(judge, Question((after,), rubric.quality))
    return {"semantics": semantics, "quality": quality, "reasons": [why_semantics, why_quality]}


def figures_of(rating: JsonObject) -> tuple[float, float, float]:
    """SC, PQ and O of a rating."""
    semantic = min(rating["semantics"])
    perceptual = min(rating["quality"])
    return semantic, perceptual, sqrt(semantic * perceptual)


def ask_scores(judge: Judge, question: Question) -> tuple[list[float], str]:
    """Ask for two scores and their reason; raises UnratedError with the last fault."""
    text = question.text
    fault = ""
    for _ in range(ATTEMPTS):
        try:
            answer = judge.explain(Question(question.images, text))
        except RuntimeError as error:  # no answer, after retries of its own
            raise UnratedError(str(error)) from None
        try:
            return read_scores(answer)
        except ValueError as error:
            # At temperature 0 the same question would get the same answer, so add the fault.
            fault = str(error)
            text = f"{question.text}\nYour last answer could not be used: {fault}."
    raise UnratedError(f"{ATTEMPTS} answers in a row could not be used; the last: {fault}")


class Scores(BaseModel):
    """The JSON object in an answer."""

    score: Annotated[list[Annotated[float, Field(ge=0, le=BEST)]], Field(min_length=2, max_length=2)]
    reasoning: Any = ""


def read_scores(answer: str) -> tuple[list[float], str]:
    """Read two scores and the reasoning from the JSON object in an answer.

    Raises:
        ValueError: there is no such object, or a score is off the scale: a wrong score must not become a figure.
    """
    scores = typed(object_within(answer), Scores)
    return scores.score, str(scores.reasoning)[:500]
