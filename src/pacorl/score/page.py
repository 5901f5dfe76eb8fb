"""Scores for people: a few lines for a terminal, and a self-contained page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.files import write_atomic
from pacorl.report import pair_matrix_svg, render
from pacorl.report.figures import ShownImage, data_url, show
from pacorl.score.scores import PairScore, Scores

if TYPE_CHECKING:
    from PIL.Image import Image

THUMBNAIL = 192  # pixels of the longer side: twice what the page shows, for dense screens


@dataclass(frozen=True, slots=True)
class Card:
    """One image on the page."""

    number: int
    name: str
    role: str
    picture: ShownImage
    thumbnail: str
    """A small data URL: it is repeated in every pair."""


@dataclass(frozen=True, slots=True)
class Row:
    """One pair on the page."""

    pair: PairScore
    cards: tuple[Card, ...]


def summary(scores: Scores, *, ranking: bool = False) -> list[str]:
    """What the scores say, in sentences."""
    if ranking:
        return _ranking_summary(scores)
    scored = len(scores.pairs) - len(scores.missing)
    if not scored:
        return _missing_lines(scores)
    count = f"{scored} of {len(scores.pairs)}" if scores.missing else f"{scored}"
    lines = [f"Mean consistency of {count} pairs: {_number(scores.mean)}."]
    if len(scores.pairs) == 1:
        lines = [f"P(Yes), the two images belong together: {_number(scores.mean)}."]
    odd = scores.odd_one_out
    if odd is not None:
        beside = "" if odd.among_others is None else f"; the others among themselves reach {_number(odd.among_others)}"
        lines.append(f"Fits least: {scores.names[odd.image]}, {_number(odd.with_others)} with the others{beside}.")
    return lines + _missing_lines(scores)


def table(scores: Scores, *, ranking: bool = False) -> str:
    """The scores for a terminal: one line for a pair, a matrix for a set, a list for a ranking."""
    if ranking:
        rows = [f"{_number(pair.p_yes):>7}  {scores.names[pair.second]}" for pair in scores.ranked]
    elif len(scores.pairs) == 1:
        rows = []
    else:
        rows = _matrix_lines(scores)
    words = [_words(scores, pair) for pair in scores.pairs if pair.reasons or len(scores.questions) > 1]
    return "\n".join([*rows, *summary(scores, ranking=ranking), *words])


def write_page(
    path: Path,
    scores: Scores,
    *,
    judge: str,
    note: str = "",
    theme: str = "",
    ranking: bool = False,
    refused: Mapping[str, str] | None = None,
) -> Path:
    """Writes the page: thumbnails, heat map, pairs with reasons, questions. Nothing in it is asked from anywhere."""
    cards = _cards(scores, ranking=ranking)
    page = render(
        "score.html",
        title=theme or ("Which fits best" if ranking else "Do they belong together?"),
        name=path.stem,
        verdict=[*filter(None, [note]), *summary(scores, ranking=ranking)],
        facts=[(_number(scores.mean), "mean P(Yes)"), (len(scores.pairs), "pairs"), (judge, "judge")],
        cards=cards,
        matrix=pair_matrix_svg(scores.matrix) if not ranking and len(cards) > 2 else "",
        reference=ranking,
        rows=[Row(pair, tuple(cards[i] for i in _shown(pair, ranking))) for pair in scores.ranked],
        labels=[question.label for question in scores.questions],
        has_gap=any(pair.order_gap is not None for pair in scores.pairs),
        has_words=any(pair.reasons or pair.error for pair in scores.pairs),
        questions=[(question.label, question.text) for question in scores.questions],
        refused=list((refused or {}).values()),
    )
    write_atomic(path, page)
    return path


def _cards(scores: Scores, *, ranking: bool) -> list[Card]:
    odd = None if ranking else scores.odd_one_out
    return [
        Card(
            number + 1,
            name,
            _role(scores, number, ranking=ranking, odd=odd is not None and odd.image == number),
            show(image),
            data_url(_small(image)),
        )
        for number, (name, image) in enumerate(zip(scores.names, scores.images, strict=True))
    ]


def _small(image: Image) -> Image:
    small = image.copy()
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    return small


def _role(scores: Scores, image: int, *, ranking: bool, odd: bool) -> str:
    if ranking and image == 0:
        return "the reference"
    mean = _number(scores.mean_of(image))
    return f"{mean} with the others, the least" if odd else f"{mean} with the {'reference' if ranking else 'others'}"


def _shown(pair: PairScore, ranking: bool) -> Sequence[int]:
    return (pair.second,) if ranking else (pair.first, pair.second)


def _ranking_summary(scores: Scores) -> list[str]:
    best = scores.ranked[0]
    lines = [f"Closest to {scores.names[0]}: {scores.names[best.second]}, {_number(best.p_yes)}."]
    return (lines if best.p_yes is not None else []) + _missing_lines(scores)


def _missing_lines(scores: Scores) -> list[str]:
    return [
        f"No score: {scores.names[pair.first]} and {scores.names[pair.second]} ({pair.error})."
        for pair in scores.missing
    ]


def _matrix_lines(scores: Scores) -> list[str]:
    heads = [str(number + 1) for number in range(len(scores.names))]
    lines = ["     " + "".join(f"{head:>7}" for head in heads)]
    for head, row, name in zip(heads, scores.matrix, scores.names, strict=True):
        cells = "".join(
            f"{'·' if head == other else _number(value):>7}" for other, value in zip(heads, row, strict=True)
        )
        lines.append(f"{head:>5}{cells}   {name}")
    return lines


def _words(scores: Scores, pair: PairScore) -> str:
    lines = [f"\n{scores.names[pair.first]} and {scores.names[pair.second]}: {_number(pair.p_yes)}"]
    if len(scores.questions) > 1:
        lines += [
            f"  {_number(p):>7}  {question.label}"
            for question, p in zip(scores.questions, pair.by_question, strict=True)
        ]
    if pair.reasons:
        lines.append("  " + pair.reasons.replace("\n", "\n  "))
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
