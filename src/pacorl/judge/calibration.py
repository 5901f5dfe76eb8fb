"""Calibration file of a judge, written by `pacorl calibrate`: a curve per question, and thresholds per set size.

    {"judge": "tiny", "curves": {"": {"temperature": 1.9, "bias": 0.4}}, "thresholds": {"panels": {"4": 0.31}}}

The curve of "" serves the questions without a curve of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pacorl.config.options import UsageError
from pacorl.core.batches import in_batches
from pacorl.core.calibration import Curve, Floats, calibration_error, fit_curve
from pacorl.core.questions import without_theme
from pacorl.core.ranking import Interval, bootstrap
from pacorl.io.documents import blamed_on, read_object, typed, write_json
from pacorl.io.images import open_image
from pacorl.judge.judge import Judge
from pacorl.judge.pairwise import ask
from pacorl.types import Comparison, Question, Verdict

Bools = NDArray[np.bool_]
Mode = Literal["panels", "references"]
"""panels: each panel is compared with the other panels. references: with a character's reference images."""

FOLDS = 5
FEWEST = 10
"""Pairs of either label at least for a curve of a question's own; other questions share one curve."""
CHUNK = 256
"""Comparisons whose images are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Curves by question, and thresholds by set size."""

    judge: str
    """Name of the judge that was calibrated."""
    curves: Mapping[str, Curve]
    """Question without its theme → curve; "" for all other questions."""
    thresholds: Mapping[Mode, Mapping[int, float]] = field(default_factory=dict)
    """Mode → number of panels → least score of a panel."""

    def __post_init__(self) -> None:
        for mode, by_size in self.thresholds.items():
            for size, least in by_size.items():
                if size < 1 or not 0 <= least <= 1:
                    raise ValueError(
                        f"thresholds.{mode}.{size} is {least:g}; a threshold is from 0 to 1, for 1 panel or more"
                    )

    def calibrated(self, questions: Sequence[Question], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Calibrate the verdicts about these questions; missing verdicts stay missing."""
        calibrated = []
        for question, verdict in zip(questions, verdicts, strict=True):
            p_yes = verdict.p_yes
            if p_yes is not None:
                p_yes = self.curve_of(question.text)(p_yes)
            calibrated.append(replace(verdict, p_yes=p_yes))
        return calibrated

    def curve_of(self, text: str) -> Curve:
        """Return a question's curve."""
        return self.curves.get(without_theme(text)) or self.curves[""]

    def covers(self, text: str) -> bool:
        """Whether a question has a curve of its own, or no question has."""
        return len(self.curves) == 1 or without_theme(text) in self.curves

    def save(self, path: Path) -> None:
        """Write the file."""
        write_json(path, asdict(self), indent=1)


def read_calibration(path: str | Path) -> Calibration | None:
    """Read a calibration file; None for an empty path. Raises ValueError that names the file and the fault."""
    if not str(path):
        return None
    document = read_object(Path(path))
    with blamed_on(path):
        calibration = typed(document, Calibration)
        if "" not in calibration.curves:
            raise ValueError('curves has no entry ""; write the file with `pacorl calibrate`')
    return calibration


def threshold(
    calibration: Calibration | None,
    least: float | None,
    *,
    panels: int,
    references: Sequence[int] = (),
    plain: bool = True,
    name: str = "least",
) -> float:
    """Return the given threshold, else the calibration's for the largest listed size up to `panels`.

    Args:
        references: Number of reference images of each character.
        plain: Whether the plain question alone is asked.
        name: Name of the threshold where it is given, for errors.

    Raises:
        UsageError: There is neither, or the calibration's thresholds are not for this case.
    """
    if least is not None:
        return least
    by_size: Mapping[int, float] | None = None
    if calibration:
        by_size = calibration.thresholds.get("references" if references else "panels")
    if not by_size:
        raise UsageError(f"no threshold: give {name}, or a calibration that has thresholds")
    if not plain or sum(references) > 1:
        raise UsageError(
            "the calibration's thresholds are for one character, one reference image and the plain question; give "
            f"{name}"
        )
    return by_size[max((size for size in by_size if size <= panels), default=min(by_size))]


# --- fitting -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answers:
    """A judge's answers to labelled comparisons."""

    questions: tuple[str, ...]
    """Questions without their themes."""
    p_N: Floats
    """P(Yes)."""
    yes_N: Bools
    """Labels."""
    groups: tuple[str, ...]
    """Comparisons of one group share images."""

    def of(self, calibration: Calibration) -> Floats:
        """Calibrate the answers."""
        calibrated = []
        for text, p_yes in zip(self.questions, self.p_N.tolist(), strict=True):
            calibrated.append(calibration.curve_of(text)(p_yes))
        return np.array(calibrated)

    def where(self, mask_N: Bools) -> Answers:
        """Select answers."""
        questions = tuple(compress(self.questions, mask_N))
        groups = tuple(compress(self.groups, mask_N))
        return Answers(questions, self.p_N[mask_N], self.yes_N[mask_N], groups)

    def errors(self, *p_N: Floats) -> list[Interval]:
        """Compute the ECE of each version of the probabilities, with bootstrap intervals over groups."""
        return bootstrap(
            self.groups,
            lambda index_N: np.array([calibration_error(version[index_N], self.yes_N[index_N]) for version in p_N]),
        )


def ask_comparisons(judge: Judge, comparisons: Sequence[Comparison]) -> Answers:
    """Ask a judge about labelled comparisons. Raises RuntimeError for a missing answer, with its reason."""
    p_yes: list[float] = []
    # In chunks: the images of a whole data set would not fit into memory.
    for chunk in in_batches(comparisons, CHUNK):
        questions = {}
        for number, comparison in enumerate(chunk):
            images = tuple(open_image(path) for path in comparison.images)
            questions[number] = Question(images, comparison.question)
        for verdict in ask(judge, questions).values():
            if verdict.p_yes is None:
                raise RuntimeError(f"the judge gave no answer: {verdict.error}")
            p_yes.append(verdict.p_yes)

    texts = tuple(without_theme(comparison.question) for comparison in comparisons)
    labels = np.array([comparison.consistent for comparison in comparisons], dtype=bool)
    groups = tuple(map(group_of, comparisons))
    return Answers(texts, np.array(p_yes), labels, groups)


def fit_calibration(answers: Answers, *, judge: str) -> Calibration:
    """Fit a curve for each question with enough pairs of both labels, and one for all answers.

    Raises ValueError that names the question of a failed fit.
    """
    # The common curve, for questions without enough pairs of both labels.
    with blamed_on("all questions"):
        curves = {"": fit_curve(answers.p_N, answers.yes_N)}
    for text in dict.fromkeys(answers.questions):
        of_text = answers.where(np.array([question == text for question in answers.questions]))
        if min(of_text.yes_N.sum(), (~of_text.yes_N).sum()) >= FEWEST:
            with blamed_on(f"the question {text!r}"):
                curves[text] = fit_curve(of_text.p_N, of_text.yes_N)
    return Calibration(judge, curves)


def check_folds(comparisons: Sequence[Comparison]) -> None:
    """Raise ValueError, before a judge is asked, if a fold leaves no Yes or no No for the others."""
    yes_N = np.array([comparison.consistent for comparison in comparisons], dtype=bool)
    fold_N = folds_of([group_of(comparison) for comparison in comparisons])
    for fold in range(FOLDS):
        others_N = yes_N[fold_N != fold]
        if others_N.all() or not others_N.any():
            raise ValueError(
                f"without fold {fold + 1} of {FOLDS} there are {others_N.sum()} pairs labelled Yes and "
                f"{(~others_N).sum()} labelled No; give more pairs of both labels"
            )


def group_of(comparison: Comparison) -> str:
    """Name the group of a comparison; by default its first image."""
    return comparison.group or str(comparison.images[0])


def folds_of(groups: Sequence[str]) -> NDArray[np.int64]:
    """Draw the fold of each comparison. Raises ValueError if there are fewer groups than folds."""
    # Sorted, so that folds do not depend on the order of the pairs.
    names = sorted(set(groups))
    if len(names) < FOLDS:
        raise ValueError(
            f"{len(names)} groups of pairs are too few for {FOLDS} folds; give pairs of {FOLDS} prompts or more that "
            "the judge was not trained on (of an export, by a larger --test-share before the training)"
        )
    shuffled = np.random.default_rng(0).permutation(len(names))
    fold_of = {}
    for position, index in enumerate(shuffled):
        fold_of[names[index]] = position % FOLDS
    return np.array([fold_of[group] for group in groups])


def cross_validated(answers: Answers) -> Floats:
    """Calibrate each answer by curves fitted on the other folds. Groups are never divided."""
    # Each answer is calibrated by curves that have not seen its group.
    fold_N = folds_of(answers.groups)
    p_N = np.empty(len(fold_N))
    for fold in range(FOLDS):
        fitted = fit_calibration(answers.where(fold_N != fold), judge="")
        p_N[fold_N == fold] = answers.where(fold_N == fold).of(fitted)
    return p_N
