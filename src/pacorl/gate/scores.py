"""Scores of image pairs and of whole sets: the question, the answers, and their text.

A pair's score is the judge's P(Yes). A pair without an answer has no score, but an error message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pacorl.core.batches import in_batches
from pacorl.core.questions import consistent, same_theme
from pacorl.io.images import as_rgb
from pacorl.io.remote import open_source
from pacorl.io.terminal import Progress, silent
from pacorl.judge.pairwise import Pair, ask, symmetric_matrix
from pacorl.report.html import render
from pacorl.types import Matrix, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

TOGETHER = 256
"""Pairs of one call of the judge: the size decides the batches, and so the last bits of an answer."""
UNCALIBRATED = "P(Yes) is uncalibrated: the judge's own."
"""Line of a report without a calibration file."""


@dataclass(frozen=True, slots=True)
class PairScore:
    """The judge's answer about two images of a set.

    Attributes:
        first: Index of the first image.
        second: Index of the second image.
        p_yes: The pair's score, from 0 to 1; None without an answer.
        error: Reason for a missing score.
        reasons: The judge's answer in words, if requested.
    """

    first: int
    second: int
    p_yes: float | None
    error: str = ""
    reasons: str = ""


@dataclass(frozen=True, slots=True)
class Scores:
    """The scored pairs of some images.

    Attributes:
        names: Names of the images in tables.
        images: RGB images, exactly the judge's input.
        question: Question about every pair.
        pairs: Scores of all pairs, or of the pairs with the first image if `ranking`.
        ranking: Whether only the first image is compared with each candidate.
        calibrated_on: Number of pairs of the calibration file that maps P(Yes); None without a file.
    """

    names: tuple[str, ...]
    images: tuple[Image, ...]
    question: str
    pairs: tuple[PairScore, ...]
    ranking: bool = False
    calibrated_on: int | None = None

    @property
    def calibration(self) -> str:
        """State of the judge's calibration for people."""
        return "uncalibrated" if self.calibrated_on is None else f"calibrated on {self.calibrated_on} pairs"

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
            pairs.append({"images": images, "p_yes": pair.p_yes, "error": pair.error, "reasons": pair.reasons})
        return {
            "images": list(self.names),
            "question": self.question,
            "calibrated_on": self.calibrated_on,
            "mean": self.mean,
            "missing": len(self.missing),
            "pairs": pairs,
            "matrix": [list(row) for row in self.matrix],
        }

    def __str__(self) -> str:
        """Format the scores for a terminal: a line for each pair, best first in a ranking, and the mean."""
        return render("scores.txt", scores=self, p_yes_text=p_yes_text, uncalibrated=UNCALIBRATED).rstrip()


def question_about(theme: str) -> str:
    """Build the question about two images of a theme; of an empty theme, the plain question."""
    return same_theme(theme) if theme else consistent()


def opened(images: Sequence[Any]) -> list[Any]:
    """Open the paths and URLs among images. Raises ValueError for a path in place of a list."""
    if isinstance(images, str | Path):
        raise ValueError(f"{images} is one path; give a list of images, such as a folder's")
    return [open_source(image) if isinstance(image, str | Path) else image for image in images]


def score_set(
    judge: Judge,
    images: Sequence[Image],
    *,
    names: Sequence[str] = (),
    theme: str = "",
    ranking: bool = False,
    pairs: Iterable[Pair] | None = None,
    reasons: bool = False,
    progress: Progress = silent,
) -> Scores:
    """Score every pair of two or more images, up to `TOGETHER` pairs in one call of the judge.

    Args:
        names: Display names; numbered if empty.
        theme: The images' theme; without one the judge is asked about plain consistency.
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
    question = question_about(theme)

    # Answers.
    scored: list[PairScore] = []
    progress(0, len(pairs))
    for chunk in in_batches(pairs, TOGETHER):
        questions = {(first, second): Question((images[first], images[second]), question) for first, second in chunk}
        for pair, verdict in ask(judge, questions).items():
            # Words cost a whole answer each, so pairs without a score get none.
            words = judge.explain(questions[pair]) if reasons and not verdict.error else ""
            scored.append(PairScore(*pair, verdict.p_yes, verdict.error, words))
        progress(len(scored), len(pairs))
    calibration = getattr(judge, "calibration", None)
    pairs_fitted = calibration.pairs if calibration else None
    return Scores(names, tuple(images), question, tuple(scored), ranking, pairs_fitted)


def p_yes_text(p_yes: float | None) -> str:
    """Format P(Yes) with four digits; a dash if it is missing."""
    return "–" if p_yes is None else f"{p_yes:.4f}"
