"""Ratings of edits by a rubric, in words: any vision-language model, over HTTP or in this process.

SC (semantic consistency) and PQ (perceptual quality) are each the lower of two scores; O = √(SC · PQ), as VIEScore
(arXiv 2312.14867) has it and GEdit-Bench uses it.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.io.documents import JsonObject, blamed_on, object_within, parse_yaml, read_text
from pacorl.io.files import text_digest
from pacorl.types import Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

RUBRIC = Path(__file__).with_name("rubric.yaml")
INSTRUCTION = "{instruction}"
EDITSCORE_TEXTS = (
    "_context_no_delimit_reasoning_first",
    "_prompts_0shot_two_image_edit_rule",
    "_prompts_0shot_tie_rule_SC",
    "_prompts_0shot_rule_PQ",
)
"""Constants of EditScore's `vie_prompts.py`: the answer's form, the task, then both criteria."""
EDITSCORE_SCALE = 25
UNIFIED_POINTS = ("edit_pointwise_instruction_following.py", "edit_pointwise_quality.py")
"""UnifiedReward-Edit's scripts of point scores: semantics, then quality."""
UNIFIED_SCALE = 25
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
    """Read `semantics` (with {instruction}), `quality` and `scale`, or a published wording.

    Args:
        path: a YAML, EditScore's `vie_prompts.py`, or the folder UnifiedReward-Edit of its repository.

    Raises:
        ValueError: one is not usable.
    """
    # A YAML, EditScore's module, or UnifiedReward-Edit's scripts, in one form.
    document: Any
    if path.is_dir():
        semantics, quality = (unified_text(path / name) for name in UNIFIED_POINTS)
        document = {"semantics": semantics, "quality": quality, "scale": UNIFIED_SCALE}
        content = f"{semantics}\n{quality}"
    else:
        content = read_text(path)
        document = _of_editscore(content, path) if path.suffix == ".py" else parse_yaml(content, name=str(path))
    texts = document if isinstance(document, dict) else {}
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


def _of_editscore(content: str, path: Path) -> JsonObject:
    """Join the texts of EditScore's module as its package does, on the scale that its judges were trained on.

    The module is parsed and never run.
    """
    texts: dict[str, str] = {}
    with blamed_on(path):
        for node in _parsed(content).body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                    texts[name] = text
        missing = [name for name in EDITSCORE_TEXTS if name not in texts]
        if missing:
            raise ValueError(f"no text {missing[0]}; give vie_prompts.py of the package editscore")
    context, rule, semantics, quality = [texts[name] for name in EDITSCORE_TEXTS]
    # The published texts ask for scores up to 10, and the released judges were trained on a larger scale.
    scale = str(EDITSCORE_SCALE)
    return {
        "semantics": "\n".join([context, rule, semantics.replace("10", scale)]).replace("<instruction>", INSTRUCTION),
        "quality": "\n".join([context, quality.replace("10", scale)]),
        "scale": EDITSCORE_SCALE,
    }


def unified_text(path: Path) -> str:
    """Read the text of one of UnifiedReward-Edit's scripts, its `problem`; empty for another module.

    The module is parsed and never run. Raises ValueError if the text is made of anything but the instruction.
    """
    with blamed_on(path):
        for node in _parsed(read_text(path)).body:
            match node:
                case ast.Assign(targets=[ast.Name(id="problem")], value=value):
                    return _joined(value)
    return ""


def _joined(node: ast.expr) -> str:
    """Join the constants of a string expression, with INSTRUCTION in place of the variable."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=ast.Name(id="instruction")):
            return INSTRUCTION
        case ast.JoinedStr(values=values):
            return "".join(map(_joined, values))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _joined(left) + _joined(right)
    raise ValueError(f"line {node.lineno}: 'problem' must be a text with the instruction alone in it")


def _parsed(content: str) -> ast.Module:
    try:
        return ast.parse(content)
    except SyntaxError as error:
        raise ValueError(f"not a Python module ({error.msg}, line {error.lineno})") from None


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
