"""Scores of image pairs and of whole sets, as values and as text.

A pair's score is the judge's P(Yes), averaged over the questions (and over both orders, if requested). A pair with an
unanswered question has no score, but an error message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pacorl.core.set_scores import LowestPanel, lowest_panel, panel_medians
from pacorl.judge.pairwise import Matrix, Pair, symmetric_matrix

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class QuestionSpec:
    """A question to be put to every pair."""

    label: str
    """Short name in tables."""
    text: str
    """Wording sent to the judge."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """The judge's verdict about two images of a set."""

    first: int
    """Index of the first image."""
    second: int
    """Index of the second image."""
    by_question: tuple[float | None, ...]
    """P(Yes) of each question, mean of both orders if both were asked."""
    order_gap: float | None = None
    """|P(Yes | a, b) − P(Yes | b, a)|, mean over the questions; None if one order was asked."""
    error: str = ""
    """Reason for a missing score."""
    reasons: str = ""
    """The judge's answer in words, if requested."""

    @property
    def p_yes(self) -> float | None:
        """The pair's score; None if a question stayed unanswered."""
        return None if None in self.by_question else mean_of_present(self.by_question)


@dataclass(frozen=True, slots=True)
class OddOneOut:
    """The image that fits the set least."""

    image: int
    """Index into the set."""
    with_others: float
    """Median score of its pairs."""
    among_others: float | None
    """Mean score of the pairs without it; None if none was scored."""


@dataclass(frozen=True, slots=True, repr=False)
class Scores:
    """The scored pairs of some images."""

    names: tuple[str, ...]
    """Names of the images in tables."""
    images: tuple[Image, ...]
    """RGB images, exactly the judge's input."""
    questions: tuple[QuestionSpec, ...]
    """Questions about every pair."""
    pairs: tuple[PairScore, ...]
    """Scores of all pairs, or of the pairs with the first image if `ranking`."""
    ranking: bool = False
    """Whether only the first image is compared with each candidate."""
    calibrated: bool = False
    """Whether a calibration file maps the judge's P(Yes)."""

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
        """Symmetric score matrix; None on the diagonal and for missing scores."""
        return symmetric_matrix(self._score_of_pair, len(self.names))

    @property
    def medians(self) -> dict[int, float]:
        """Median score of each image's pairs; images without a score are left out."""
        return panel_medians(self._score_of_pair)

    @property
    def lowest_panel(self) -> LowestPanel | None:
        """The image with the lowest median (in a ranking, the lowest candidate); None if no pair has a score."""
        return lowest_panel(self._score_of_pair, among=range(int(self.ranking), len(self.names)))

    @property
    def odd_one_out(self) -> OddOneOut | None:
        """The lowest of three or more images; None if all have the same median."""
        lowest = self.lowest_panel
        if lowest is None or len(self.names) < 3 or len(set(self.medians.values())) < 2:
            return None
        # If the others agree among themselves, the image is the fault.
        among_others = []
        for pair in self.pairs:
            if lowest.panel not in (pair.first, pair.second):
                among_others.append(pair.p_yes)

        return OddOneOut(lowest.panel, lowest.median, mean_of_present(among_others))

    @property
    def ranked(self) -> tuple[PairScore, ...]:
        """The pairs by descending score; missing scores last."""
        # A score of 0 must sort before a missing score.
        return tuple(sorted(self.pairs, key=lambda pair: (pair.p_yes is None, -(pair.p_yes or 0.0))))

    @property
    def calibration(self) -> str:
        """Describe the calibration in words."""
        return "calibrated" if self.calibrated else "uncalibrated"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `--json`, with names in place of images."""
        odd = self.odd_one_out

        # The pairs; what a pair does not have is left out.
        labels = [question.label for question in self.questions]
        pairs = []
        for pair in self.pairs:
            document: dict[str, Any] = {
                "images": [self.names[pair.first], self.names[pair.second]],
                "p_yes": pair.p_yes,
                "by_question": dict(zip(labels, pair.by_question, strict=True)),
            }
            if pair.order_gap is not None:
                document["order_gap"] = pair.order_gap
            for key in ("error", "reasons"):
                if getattr(pair, key):
                    document[key] = getattr(pair, key)
            pairs.append(document)

        # The document; a set without an odd one out has null there.
        return {
            "images": list(self.names),
            "questions": {question.label: question.text for question in self.questions},
            "calibrated": self.calibrated,
            "mean": self.mean,
            "missing": len(self.missing),
            "odd_one_out": odd
            and {"image": self.names[odd.image], "with_others": odd.with_others, "among_others": odd.among_others},
            "pairs": pairs,
            "matrix": [list(row) for row in self.matrix],
        }

    def __repr__(self) -> str:
        facts = [f"{len(self.names)} images"]
        facts.append("no mean" if self.mean is None else f"mean {self.mean:.4f}")

        odd = self.odd_one_out
        if odd:
            facts.append(f"{self.names[odd.image]!r} fits least")
        if self.missing:
            facts.append(f"{len(self.missing)} of {len(self.pairs)} pairs without a score")
        return f"Scores({', '.join(facts)})"

    def __str__(self) -> str:
        """Format the scores like `pacorl score`."""
        return table(self)

    @property
    def _score_of_pair(self) -> dict[Pair, float | None]:
        return {(pair.first, pair.second): pair.p_yes for pair in self.pairs}


def mean_of_present(values: Sequence[float | None]) -> float | None:
    """Average the values that are not None; None if all are missing."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


# --- for people ------------------------------------------------------------------------------------------------

UNCALIBRATED = "P(Yes) is uncalibrated: the judge's own."
"""Line of a report without a calibration file."""


def summary(scores: Scores) -> list[str]:
    """Summarize the scores in sentences."""
    # Missing pairs.
    missing = []
    for pair in scores.missing:
        missing.append(f"No score: {scores.names[pair.first]} and {scores.names[pair.second]} ({pair.error}).")
    scored = len(scores.pairs) - len(missing)
    count = f"{scored} of {len(scores.pairs)}" if missing else f"{scored}"
    if not scored:
        return missing

    if not scores.calibrated:
        missing.append(UNCALIBRATED)

    # The best candidate of a ranking, or the mean of a set.
    if scores.ranking:
        best = scores.ranked[0]
        return [f"Closest to {scores.names[0]}: {scores.names[best.second]}, {p_yes_text(best.p_yes)}.", *missing]
    if len(scores.pairs) == 1:
        lines = [f"P(Yes), the two images belong together: {p_yes_text(scores.mean)}."]
    else:
        lines = [f"Mean consistency of {count} pairs: {p_yes_text(scores.mean)}."]

    # The outlier.
    odd = scores.odd_one_out
    if odd is not None:
        line = f"Fits least: {scores.names[odd.image]}, median {p_yes_text(odd.with_others)} with the others"
        if odd.among_others is not None:
            line += f"; the others among themselves reach {p_yes_text(odd.among_others)}"
        lines.append(f"{line}.")
    return lines + missing


def table(scores: Scores) -> str:
    """Format the scores for a terminal: one line for a pair, a matrix for a set, a list for a ranking."""
    rows = []
    if scores.ranking:
        rows = [f"{p_yes_text(pair.p_yes):>7}  {scores.names[pair.second]}" for pair in scores.ranked]
    elif len(scores.pairs) > 1:
        numbers = range(1, len(scores.names) + 1)
        rows = ["     " + "".join(f"{number:>7}" for number in numbers)]
        for number, row, name in zip(numbers, scores.matrix, scores.names, strict=True):
            cells = [p_yes_text(p_yes) for p_yes in row]
            # A dash on the diagonal would read as a missing score.
            cells[number - 1] = "·"
            padded = "".join(f"{cell:>7}" for cell in cells)
            rows.append(f"{number:>5}{padded}   {name}")
    lines = [*rows, *summary(scores)]
    for pair in scores.pairs:
        if pair.reasons or len(scores.questions) > 1:
            lines.append(_words(scores, pair))
    return "\n".join(lines)


def _words(scores: Scores, pair: PairScore) -> str:
    lines = [f"\n{scores.names[pair.first]} and {scores.names[pair.second]}: {p_yes_text(pair.p_yes)}"]
    if len(scores.questions) > 1:
        answers = zip(scores.questions, pair.by_question, strict=True)
        lines += [f"  {p_yes_text(p_yes):>7}  {question.label}" for question, p_yes in answers]
    if pair.reasons:
        lines.append("  " + pair.reasons.replace("\n", "\n  "))
    return "\n".join(lines)


def p_yes_text(p_yes: float | None) -> str:
    """Format P(Yes) with four digits; a dash if it is missing."""
    return "–" if p_yes is None else f"{p_yes:.4f}"
