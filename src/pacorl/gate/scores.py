"""Scores of image pairs and of whole sets: the questions, the answers, and their text.

A pair's score is the judge's P(Yes), averaged over the questions. A pair with an unanswered question has no score, but
an error message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pacorl.core import questions as wordings
from pacorl.core.batches import in_batches
from pacorl.core.set_scores import whole_mean
from pacorl.io.images import as_rgb
from pacorl.io.terminal import Progress, silent
from pacorl.judge.pairwise import Matrix, Pair, ask_pairs, errors_of, symmetric_matrix
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

TOGETHER = 256
"""Pairs of one call of the judge: the size decides the batches, and so the last bits of an answer."""
UNCALIBRATED = "P(Yes) is uncalibrated: the judge's own."
"""Line of a report without a calibration file."""

Questions = Mapping[str, str]
"""Short name in tables → wording sent to the judge."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """The judge's verdicts about two images of a set.

    Attributes:
        first: Index of the first image.
        second: Index of the second image.
        verdicts: Question → verdict.
        reasons: The judge's answer in words, if requested.
    """

    first: int
    second: int
    verdicts: Mapping[str, Verdict]
    reasons: str = ""

    @property
    def by_question(self) -> dict[str, float | None]:
        """Question → P(Yes), from 0 to 1."""
        return {question: verdict.p_yes for question, verdict in self.verdicts.items()}

    @property
    def p_yes(self) -> float | None:
        """The pair's score; None if a question stayed unanswered."""
        return whole_mean(self.by_question.values())

    @property
    def error(self) -> str:
        """Reason for a missing score."""
        return errors_of(self.verdicts.values())


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored pairs of some images.

    Attributes:
        names: Names of the images in tables.
        images: RGB images, exactly the judge's input.
        questions: Questions about every pair.
        pairs: Scores of all pairs, or of the pairs with the first image if `ranking`.
        ranking: Whether only the first image is compared with each candidate.
        calibrated: Whether a calibration file maps the judge's P(Yes).
    """

    names: tuple[str, ...]
    images: tuple[Image, ...]
    questions: Questions
    pairs: tuple[PairScore, ...]
    ranking: bool = False
    calibrated: bool = False

    @property
    def mean(self) -> float | None:
        """Mean over the pairs that have a score."""
        scored = [pair.p_yes for pair in self.pairs if pair.p_yes is not None]
        if not scored:
            return None
        return fmean(scored)

    @property
    def missing(self) -> tuple[PairScore, ...]:
        """The pairs without a score."""
        return tuple(pair for pair in self.pairs if pair.p_yes is None)

    @property
    def matrix(self) -> Matrix:
        """Symmetric score matrix, images × images; None on the diagonal and for missing scores."""
        return symmetric_matrix({(pair.first, pair.second): pair.p_yes for pair in self.pairs}, len(self.names))

    @property
    def ranked(self) -> tuple[PairScore, ...]:
        """The pairs by descending score; missing scores last."""
        # A score of 0 must sort before a missing score.
        return tuple(sorted(self.pairs, key=lambda pair: (pair.p_yes is None, -(pair.p_yes or 0.0))))

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of `--json`, with names in place of images."""
        pairs = []
        for pair in self.pairs:
            images = [self.names[pair.first], self.names[pair.second]]
            words = {"error": pair.error, "reasons": pair.reasons}
            pairs.append({"images": images, "p_yes": pair.p_yes, "by_question": pair.by_question, **words})
        return {
            "images": list(self.names),
            "questions": dict(self.questions),
            "calibrated": self.calibrated,
            "mean": self.mean,
            "missing": len(self.missing),
            "pairs": pairs,
            "matrix": [list(row) for row in self.matrix],
        }

    def __str__(self) -> str:
        """Format the scores like `pacorl score`."""
        return table(self)


# --- asking ----------------------------------------------------------------------------------------------------


def questions_about(theme: str = "", criteria: Mapping[str, str] | None = None) -> Questions:
    """Build the questions for a theme and written criteria (label → text); without either, the plain question."""
    questions = {}
    if theme:
        questions["theme"] = wordings.same_theme(theme)
    for label, text in (criteria or {}).items():
        questions[label] = wordings.meets_criterion(text)
    return questions or {"consistent": wordings.consistent()}


def score_set(
    judge: Judge,
    images: Sequence[Image],
    *,
    names: Sequence[str] = (),
    questions: Questions | None = None,
    ranking: bool = False,
    pairs: Iterable[Pair] | None = None,
    reasons: bool = False,
    progress: Progress = silent,
) -> Scores:
    """Score every pair of two or more images, up to `TOGETHER` pairs in one call of the judge.

    Args:
        names: Display names; numbered if empty.
        questions: Questions about each pair (`questions_about`); by default plain consistency.
        ranking: Compare only the first image, the reference, with each candidate; `ranked` holds them best first.
        pairs: The pairs to ask about, in place of all pairs.
        reasons: Request the answer in words too, which takes far longer.
        progress: Callback with (done, total) questions.

    Raises:
        ValueError: for fewer than two images, or an invalid image (an ImageError, which names it).
    """
    # Inputs: pairs, names, RGB images.
    if len(images) < 2:
        raise ValueError(f"{len(images)} image has nothing to be compared with; give two or more")
    if ranking:
        pairs = [(0, candidate) for candidate in range(1, len(images))]
    elif pairs is None:
        pairs = combinations(range(len(images)), 2)
    pairs = list(pairs)
    names = tuple(names) or tuple(f"image {number}" for number in range(1, len(images) + 1))
    images = [as_rgb(image, name) for image, name in zip(images, names, strict=True)]
    questions = questions or questions_about()

    # Verdicts.
    scored: list[PairScore] = []
    progress(0, len(questions) * len(pairs))
    for chunk in in_batches(pairs, TOGETHER):
        (answers,) = ask_pairs(judge, [images], [questions], pairs=[chunk])
        for (first, second), verdicts in answers.items():
            words = ""
            # Words cost a whole answer each, so pairs without a score get none.
            if reasons and all(verdict.valid for verdict in verdicts.values()):
                lines = []
                for label, text in questions.items():
                    reason = judge.explain(Question((images[first], images[second]), text))
                    lines.append(f"{label}: {reason}" if len(questions) > 1 else reason)
                words = "\n".join(lines)
            scored.append(PairScore(first, second, verdicts, words))
        progress(len(questions) * len(scored), len(questions) * len(pairs))
    calibrated = getattr(judge, "calibration", None) is not None
    return Scores(names, tuple(images), questions, tuple(scored), ranking, calibrated)


# --- for people ------------------------------------------------------------------------------------------------


def table(scores: Scores) -> str:
    """Format the scores for a terminal: one line for a pair, a matrix for a set, a list for a ranking."""
    lines = _rows(scores)
    if scores.mean is not None and not scores.ranking:
        about = "P(Yes), the two images belong together"
        if len(scores.pairs) > 1:
            about = f"Mean P(Yes) of {len(scores.pairs) - len(scores.missing)} of {len(scores.pairs)} pairs"
        lines.append(f"{about}: {p_yes_text(scores.mean)}.")
    for pair in scores.missing:
        lines.append(f"No score: {scores.names[pair.first]} and {scores.names[pair.second]} ({pair.error}).")
    if scores.mean is not None and not scores.calibrated:
        lines.append(UNCALIBRATED)

    # The answers in words, per question if there are several.
    for pair in scores.pairs:
        words = []
        if len(scores.questions) > 1:
            words += [f"  {p_yes_text(p_yes):>7}  {label}" for label, p_yes in pair.by_question.items()]
        if pair.reasons:
            words.append("  " + pair.reasons.replace("\n", "\n  "))
        if words:
            title = f"{scores.names[pair.first]} and {scores.names[pair.second]}: {p_yes_text(pair.p_yes)}"
            lines += ["", title, *words]
    return "\n".join(lines)


def _rows(scores: Scores) -> list[str]:
    """Format the ranking, or the matrix of a set."""
    if scores.ranking:
        return [f"{p_yes_text(pair.p_yes):>7}  {scores.names[pair.second]}" for pair in scores.ranked]
    if len(scores.pairs) == 1:
        return []
    numbers = range(1, len(scores.names) + 1)
    rows = ["     " + "".join(f"{number:>7}" for number in numbers)]
    for number, row, name in zip(numbers, scores.matrix, scores.names, strict=True):
        cells = [p_yes_text(p_yes) for p_yes in row]
        # A dash on the diagonal would read as a missing score.
        cells[number - 1] = "·"
        rows.append(f"{number:>5}{''.join(f'{cell:>7}' for cell in cells)}   {name}")
    return rows


def p_yes_text(p_yes: float | None) -> str:
    """Format P(Yes) with four digits; a dash if it is missing."""
    return "–" if p_yes is None else f"{p_yes:.4f}"
