"""Scores for people: a few lines for a terminal, and a self-contained page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.io.files import write_atomic
from pacorl.judge.scores import PairScore, Scores
from pacorl.report.figures import ShownImage, data_url, pair_matrix_svg, show
from pacorl.report.page import render

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL = 192  # pixels of the longer side: twice what the page shows, for dense screens


@dataclass(frozen=True, slots=True)
class Card:
    """One image on the page."""

    number: int
    name: str
    role: str
    image: ShownImage
    thumbnail: str
    """A small data URL: it is repeated in every pair."""


def summary(scores: Scores) -> list[str]:
    """What the scores say, in sentences."""
    missing = [
        f"No score: {scores.names[pair.first]} and {scores.names[pair.second]} ({pair.error})."
        for pair in scores.missing
    ]
    scored = len(scores.pairs) - len(missing)
    if not scored:
        return missing
    if scores.ranking:
        best = scores.ranked[0]
        return [f"Closest to {scores.names[0]}: {scores.names[best.second]}, {_number(best.p_yes)}.", *missing]
    if len(scores.pairs) == 1:
        lines = [f"P(Yes), the two images belong together: {_number(scores.mean)}."]
    else:
        count = f"{scored} of {len(scores.pairs)}" if missing else f"{scored}"
        lines = [f"Mean consistency of {count} pairs: {_number(scores.mean)}."]
    odd = scores.odd_one_out
    if odd is not None:
        among = "" if odd.among_others is None else f"; the others among themselves reach {_number(odd.among_others)}"
        lines.append(
            f"Fits least: {scores.names[odd.image]}, median {_number(odd.with_others)} with the others{among}."
        )
    return lines + missing


def table(scores: Scores) -> str:
    """The scores for a terminal: one line for a pair, a matrix for a set, a list for a ranking."""
    rows = []
    if scores.ranking:
        rows = [f"{_number(pair.p_yes):>7}  {scores.names[pair.second]}" for pair in scores.ranked]
    elif len(scores.pairs) > 1:
        rows = _matrix_lines(scores)
    words = [_words(scores, pair) for pair in scores.pairs if pair.reasons or len(scores.questions) > 1]
    return "\n".join([*rows, *summary(scores), *words])


def _matrix_lines(scores: Scores) -> list[str]:
    numbers = range(1, len(scores.names) + 1)
    lines = ["     " + "".join(f"{number:>7}" for number in numbers)]
    for number, row, name in zip(numbers, scores.matrix, scores.names, strict=True):
        cells = ["·" if number == other else _number(p_yes) for other, p_yes in zip(numbers, row, strict=True)]
        lines.append(f"{number:>5}{''.join(f'{cell:>7}' for cell in cells)}   {name}")
    return lines


def _words(scores: Scores, pair: PairScore) -> str:
    lines = [f"\n{scores.names[pair.first]} and {scores.names[pair.second]}: {_number(pair.p_yes)}"]
    if len(scores.questions) > 1:
        answers = zip(scores.questions, pair.by_question, strict=True)
        lines += [f"  {_number(p_yes):>7}  {question.label}" for question, p_yes in answers]
    if pair.reasons:
        lines.append("  " + pair.reasons.replace("\n", "\n  "))
    return "\n".join(lines)


def write_page(path: Path, scores: Scores, *, judge: str, **options: Any) -> Path:
    """Writes `page_of` into a file."""
    write_atomic(path, page_of(scores, name=path.stem, judge=judge, **options))
    return path


def page_of(
    scores: Scores,
    *,
    name: str = "scores",
    judge: str = "",
    note: str = "",
    theme: str = "",
    refused: Mapping[str, str] | None = None,
) -> str:
    """The page: thumbnails, heat map, pairs with reasons, questions. Nothing in it is asked from anywhere."""
    cards = [
        Card(number + 1, title, _role(scores, number), show(image), _thumbnail(image))
        for number, (title, image) in enumerate(zip(scores.names, scores.images, strict=True))
    ]
    facts = [(_number(scores.mean), "mean P(Yes)"), (len(scores.pairs), "pairs")]
    if len(cards) > 2 and (lowest := scores.lowest_panel):
        facts.insert(1, (_number(lowest.median), f"lowest panel: {lowest.panel + 1}"))
    return render(
        "score.html",
        title=theme or ("Which fits best" if scores.ranking else "Do they belong together?"),
        name=name,
        verdict=[*filter(None, [note]), *summary(scores)],
        facts=[*facts, (judge, "judge")] if judge else facts,
        cards=cards,
        # One pair, or a column of them, says more as a number.
        matrix=pair_matrix_svg(scores.matrix) if not scores.ranking and len(cards) > 2 else "",
        scores=scores,
        has_gap=any(pair.order_gap is not None for pair in scores.pairs),
        has_words=any(pair.reasons or pair.error for pair in scores.pairs),
        refused=list((refused or {}).values()),
    )


def _role(scores: Scores, image: int) -> str:
    median = _number(scores.medians.get(image))
    if scores.ranking:
        return "the reference" if image == 0 else f"{median} with the reference"
    odd = scores.odd_one_out
    least = ", the least" if odd is not None and odd.image == image else ""
    return f"{median} with the others{least}"


def _thumbnail(image: Image) -> str:
    small = image.copy()  # `thumbnail` works in place, and the caller's image is not ours
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return data_url(small)


def _number(p_yes: float | None) -> str:
    return "–" if p_yes is None else f"{p_yes:.4f}"
