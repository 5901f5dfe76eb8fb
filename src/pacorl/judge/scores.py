"""Scores of pairs of images and what follows for a set, as values, as lines of a terminal and as a page.

A pair's score is the judge's P(Yes), mean over the questions that were asked (and over both orders, if wanted). A pair
of which any question stayed unanswered has no score, and its reason is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.set_scores import LowestPanel, lowest_panel, panel_medians
from pacorl.io.files import write_atomic
from pacorl.judge.pairwise import Matrix, Pair, symmetric_matrix
from pacorl.report.figures import ShownImage, data_url, pair_matrix_svg, show
from pacorl.report.page import notebook_frame, render

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class QuestionSpec:
    """A question to be put to every pair."""

    label: str
    """What a table calls it."""
    text: str
    """What the judge is asked."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """What the judge says of two images of a set (indices into it)."""

    first: int
    """Index of one image."""
    second: int
    """Index of the other."""
    by_question: tuple[float | None, ...]
    """P(Yes) of each question, mean of both orders if both were asked."""
    order_gap: float | None = None
    """How far P(Yes) of the two orders lies apart, mean over the questions; None if one order was asked."""
    error: str = ""
    """Why it has no score."""
    reasons: str = ""
    """The judge's answer in words, if it was asked for."""
    declined: bool = False
    """Whether the judge declined it, because an image is outside of what it knows."""

    @property
    def p_yes(self) -> float | None:
        """The pair's score; None if a question stayed unanswered."""
        return mean_of_present(self.by_question) if None not in self.by_question else None


@dataclass(frozen=True, slots=True)
class OddOneOut:
    """The image that fits the others least."""

    image: int
    """Its index."""
    with_others: float
    """Median score of its pairs."""
    among_others: float | None
    """Mean score of the pairs without it; None if none was scored."""


@dataclass(frozen=True, slots=True, repr=False)
class Scores:
    """The scored pairs of some images."""

    names: tuple[str, ...]
    """What a table calls the images."""
    images: tuple[Image, ...]
    """As the judge saw them."""
    questions: tuple[QuestionSpec, ...]
    """What was asked of every pair."""
    pairs: tuple[PairScore, ...]
    """One for each two images, or with the first image alone."""
    ranking: bool = False
    """Whether the pairs are the first image with each of the others, and not all."""

    @property
    def mean(self) -> float | None:
        """Mean over the pairs that have a score."""
        return mean_of_present([pair.p_yes for pair in self.pairs])

    @property
    def missing(self) -> tuple[PairScore, ...]:
        """The pairs without a score."""
        return tuple(pair for pair in self.pairs if pair.p_yes is None)

    @property
    def matrix(self) -> Matrix:
        """Every image against every other; None on the diagonal and if there is no score."""
        return symmetric_matrix(self._score_of_pair, len(self.names))

    @property
    def medians(self) -> dict[int, float]:
        """Median score of each image's pairs; images without a score are left out."""
        return panel_medians(self._score_of_pair)

    @property
    def lowest_panel(self) -> LowestPanel | None:
        """The image with the lowest median, of a ranking the lowest candidate; None if no pair has a score."""
        return lowest_panel(self._score_of_pair, among=range(int(self.ranking), len(self.names)))

    @property
    def odd_one_out(self) -> OddOneOut | None:
        """Of three images or more, the lowest one; None if all have the same median."""
        lowest = self.lowest_panel
        if lowest is None or len(self.names) < 3 or len(set(self.medians.values())) < 2:
            return None
        among_others = [pair.p_yes for pair in self.pairs if lowest.panel not in (pair.first, pair.second)]
        return OddOneOut(lowest.panel, lowest.median, mean_of_present(among_others))

    @property
    def ranked(self) -> tuple[PairScore, ...]:
        """The pairs, best first; those without a score last."""
        # 0 is a score, and None is none: they must not meet in the order.
        return tuple(sorted(self.pairs, key=lambda pair: (pair.p_yes is None, -(pair.p_yes or 0.0))))

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints; names stand for images."""
        odd, lowest = self.odd_one_out, self.lowest_panel
        return {
            "images": list(self.names),
            "questions": {question.label: question.text for question in self.questions},
            "mean": self.mean,
            "lowest_panel": lowest and {"image": self.names[lowest.panel], "median": lowest.median},
            "missing": len(self.missing),
            "odd_one_out": odd
            and {"image": self.names[odd.image], "with_others": odd.with_others, "among_others": odd.among_others},
            "pairs": [self._pair_dict(pair) for pair in self.pairs],
            "matrix": [list(row) for row in self.matrix],
        }

    def __repr__(self) -> str:
        mean, odd = self.mean, self.odd_one_out
        facts = [f"{len(self.names)} images", f"mean {mean:.4f}" if mean is not None else "no mean"]
        facts += [f"{self.names[odd.image]!r} fits least"] if odd else []
        facts += [f"{len(self.missing)} of {len(self.pairs)} pairs without a score"] if self.missing else []
        return f"Scores({', '.join(facts)})"

    def __str__(self) -> str:
        """What `pacorl score` prints."""
        return table(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `pacorl score --report`."""
        return notebook_frame(page_of(self))

    @property
    def _score_of_pair(self) -> dict[Pair, float | None]:
        return {(pair.first, pair.second): pair.p_yes for pair in self.pairs}

    def _pair_dict(self, pair: PairScore) -> dict[str, Any]:
        optional = {"order_gap": pair.order_gap, "error": pair.error, "reasons": pair.reasons}
        if pair.declined:  # only a judge with a domain can decline
            optional["declined"] = True
        return {
            "images": [self.names[pair.first], self.names[pair.second]],
            "p_yes": pair.p_yes,
            "by_question": dict(zip((question.label for question in self.questions), pair.by_question, strict=True)),
        } | {key: value for key, value in optional.items() if value not in (None, "")}


def mean_of_present(values: Sequence[float | None]) -> float | None:
    """Mean of the values that are there; None if all are missing."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


# --- what is handed in -------------------------------------------------------------------------------------------


# --- for people ------------------------------------------------------------------------------------------------

THUMBNAIL = 192
"""Longer side of a thumbnail in pixels: twice what the page shows, for dense screens."""


@dataclass(frozen=True, slots=True)
class Card:
    """One image on the page."""

    number: int
    """Position among the images, from 1."""
    name: str
    """File name or number."""
    role: str
    """Median score with the other images, in words."""
    image: ShownImage
    """Data URL and size."""
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
