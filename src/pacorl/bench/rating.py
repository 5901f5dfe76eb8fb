"""Ratings of edits by a rubric, in words: any vision-language model, over HTTP or in this process.

SC (semantic consistency) and PQ (perceptual quality) are each the lower of two scores; O = √(SC · PQ), as VIEScore
(arXiv 2312.14867) has it and GEdit-Bench uses it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.io.documents import JsonObject, object_within, parse_yaml, read_text
from pacorl.io.files import text_digest
from pacorl.types import Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

RUBRIC = Path(__file__).with_name("rubric.yaml")
INSTRUCTION = "{instruction}"
ATTEMPTS = 3
"""Number of questions before an unusable answer is given up."""


class UnratedError(Exception):
    """No usable answer of the model."""


@dataclass(frozen=True, slots=True)
class Rubric:
    """Wording of a rating."""

    semantics: str
    quality: str
    scale: float
    digest: str


def read_rubric(path: Path = RUBRIC) -> Rubric:
    """Read a YAML of `semantics` (with {instruction}), `quality` and `scale`. Raises ValueError if one is unusable."""
    content = read_text(path)
    document = parse_yaml(content, name=str(path))
    texts: Any = document if isinstance(document, dict) else {}
    for name in ("semantics", "quality"):
        if not isinstance(texts.get(name), str) or not texts[name].strip():
            raise ValueError(f"{path}: {name!r} must be a text; see the rubric that comes with pacorl")
    if INSTRUCTION not in texts["semantics"]:
        raise ValueError(f"{path}: 'semantics' must hold {INSTRUCTION}, or the rater never learns what was asked for")
    scale = texts.get("scale", 10)
    if not isinstance(scale, int | float) or not scale > 0:
        raise ValueError(f"{path}: 'scale' must be a number above 0, got {scale!r}")
    # A digest of the whole file: two wordings of a rubric are two benchmarks.
    digest = text_digest(content)[:16]
    return Rubric(texts["semantics"], texts["quality"], float(scale), digest)


def rate(judge: Judge, rubric: Rubric, before: Image, after: Image, *, instruction: str) -> JsonObject:
    """Ask for both pairs of scores, on VIEScore's scale of 0 to 10, and their reasons.

    Raises:
        UnratedError: with the last fault.
    """
    # Not `format`: a rubric shows the requested JSON, braces and all.
    text = rubric.semantics.replace(INSTRUCTION, instruction)
    semantics, why_semantics = ask_scores(judge, Question((before, after), text), rubric.scale)
    quality, why_quality = ask_scores(judge, Question((after,), rubric.quality), rubric.scale)
    return {"semantics": semantics, "quality": quality, "reasons": [why_semantics, why_quality]}


def figures_of(rating: JsonObject) -> tuple[float, float, float]:
    """SC, PQ and O of a rating."""
    semantic = min(rating["semantics"])
    perceptual = min(rating["quality"])
    return semantic, perceptual, sqrt(semantic * perceptual)


def ask_scores(judge: Judge, question: Question, scale: float) -> tuple[list[float], str]:
    """Ask for two scores, on VIEScore's scale of 0 to 10, and their reason; raises UnratedError with the last fault."""
    text = question.text
    fault = ""
    for _ in range(ATTEMPTS):
        try:
            answer = judge.explain(Question(question.images, text))
        except RuntimeError as error:  # no answer, after retries of its own
            raise UnratedError(str(error)) from None
        try:
            return read_scores(answer, scale=scale)
        except ValueError as error:
            # At temperature 0 the same question would get the same answer, so add the fault.
            fault = str(error)
            text = f"{question.text}\nYour last answer could not be used: {fault}."
    raise UnratedError(f"{ATTEMPTS} answers in a row could not be used; the last: {fault}")


def read_scores(answer: str, *, scale: float) -> tuple[list[float], str]:
    """Read two scores, scaled to 0 … 10, and the reasoning, from the JSON object in an answer.

    Raises:
        ValueError: there is no such object, or a score is off the scale: a wrong score must not become a figure.
    """
    document = object_within(answer)
    scores: Any = document.get("score")
    is_pair = isinstance(scores, list) and len(scores) == 2
    # Compare types: a bool is an int to Python, but no score.
    if not is_pair or any(type(score) not in (int, float) or not 0 <= score <= scale for score in scores):
        raise ValueError(f"'score' must be two numbers from 0 to {scale:g}, it is {json.dumps(scores)[:60]}")
    return [float(score) * 10 / scale for score in scores], str(document.get("reasoning", ""))[:500]
