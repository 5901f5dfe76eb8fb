"""Scores of pairs of images: what a person hands in, what was asked, what the judge said, and what follows for a set.

A pair's score is the judge's P(Yes), mean over the questions that were asked (and over both orders, if wanted). A pair
of which any question stayed unanswered has no score, and its reason is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core import questions as wordings
from pacorl.core.grid import split
from pacorl.core.set_scores import LowestPanel, lowest_panel, panel_medians
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, as_rgb, check_shape
from pacorl.io.remote import open_source
from pacorl.judge.pairwise import Matrix, Pair, ask_pairs, errors_of, symmetric_matrix
from pacorl.types import Grid, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge


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
        return _mean(self.by_question) if None not in self.by_question else None


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
        return _mean([pair.p_yes for pair in self.pairs])

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
        return OddOneOut(lowest.panel, lowest.median, _mean(among_others))

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
        from pacorl.judge.score_page import table  # which imports this module

        return table(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `pacorl score --report`."""
        from pacorl.judge.score_page import page_of  # which imports this module
        from pacorl.report.page import notebook_frame

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


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


# --- what is handed in -------------------------------------------------------------------------------------------


def read_criteria(values: Sequence[str]) -> dict[str, str]:
    """Label → text from criteria written out, or from JSON files of them in the T2IS form (dimension → name → text).

    Raises ValueError if a file is no such JSON.
    """
    criteria: dict[str, str] = {}
    for path_or_text in values:
        if not path_or_text.endswith(".json"):
            criteria[path_or_text] = path_or_text
            continue
        document = read_json(Path(path_or_text))
        # A whole T2IS record is taken too, for its criteria.
        document = document.get("criteria", document) if isinstance(document, dict) else {}
        of_file: dict[str, str] = {}
        for dimension, entry in document.items() if isinstance(document, dict) else ():
            for name, text in (entry if isinstance(entry, dict) else {"": entry}).items():
                if not isinstance(text, str) or not text:
                    raise ValueError(f"{path_or_text}: criterion {dimension}.{name} is {text!r}, not a text")
                of_file[" / ".join(filter(None, (dimension, name)))] = text
        if not of_file:
            example = '{"Identity": {"Hat": "The same hat in all images."}}'
            raise ValueError(f"{path_or_text}: holds no criteria; write {example}")
        criteria |= of_file
    return criteria


def open_images(
    sources: Sequence[Path | str], *, keep_going: bool = False
) -> tuple[tuple[str, ...], tuple[Image, ...], dict[str, str]]:
    """Names, images, and what was left out and why (empty unless `keep_going`); sources are files or http(s) URLs.

    Raises ImageError naming every file that cannot be used, and if fewer than one remains.
    """
    opened: dict[str, Image] = {}
    refused: dict[str, str] = {}
    for source in map(str, sources):
        # One image may be given twice, and each of the two needs a name of its own.
        numbered = chain([source], (f"{source} ({number})" for number in count(2)))
        if Path(source).is_dir():
            refused[source] = f"{source} is a folder; name its images, as in {source.rstrip('/')}/*.png"
            continue
        try:
            opened[next(name for name in numbered if name not in opened)] = open_source(source)
        except (ImageError, OSError) as error:
            strerror = error.strerror if isinstance(error, OSError) else None
            refused[source] = f"{source}: {strerror}" if strerror else str(error)
    if refused and not (keep_going and opened):
        raise ImageError("\n".join(refused.values()))
    return tuple(opened), tuple(opened.values()), refused


def panels_of(name: str, image: Image, grid: Grid) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """The panels of a grid image, named by their numbers."""
    panels = split(image, grid)
    for number, panel in enumerate(panels, 1):
        # The image may be large enough, and its panels not.
        check_shape(panel, f"panel {number} of {name}")
    return tuple(f"{name}[{number}]" for number in range(1, grid.count + 1)), tuple(panels)


def check_count(images: int, *, ranking: bool = False) -> None:
    """Raises ValueError if there are too few images to compare; costs nothing, so that a door can ask it first."""
    if images < 2 and ranking:
        raise ValueError("ranking needs a reference and at least one candidate")
    if images < 2:
        raise ValueError(f"{images} image has nothing to be compared with; give two or more, or a --grid")


# --- asking ------------------------------------------------------------------------------------------------------


def questions_about(theme: str = "", criteria: Mapping[str, str] | None = None) -> tuple[QuestionSpec, ...]:
    """The questions that a theme and written criteria (label → text) ask for; without either, the plain one."""
    written = [QuestionSpec(label, wordings.meets_criterion(text)) for label, text in (criteria or {}).items()]
    if theme:
        return (QuestionSpec("theme", wordings.same_theme(theme)), *written)
    return tuple(written) or (QuestionSpec("consistent", wordings.consistent()),)


def score_set(
    judge: Judge,
    images: Sequence[Image],
    *,
    names: Sequence[str] = (),
    questions: Sequence[QuestionSpec] = (),
    ranking: bool = False,
    symmetric: bool = False,
    reasons: bool = False,
) -> Scores:
    """Scores every pair of two images or more, in one call of the judge.

    Args:
        names: What to call the images; numbered if empty.
        questions: What to ask about each pair; whether they are consistent if empty.
        ranking: Scores the first image, the reference, against each of the others only; `ranked` holds them best first.
        symmetric: Asks in both orders and takes the mean.
        reasons: Asks for the answer in words too, which takes longer by far.

    Raises:
        ValueError: for fewer than two images, or what is no image (an ImageError, which names it).
    """
    check_count(len(images), ranking=ranking)  # again: Python's callers have no door in front
    every = range(len(images))
    pairs = [(0, candidate) for candidate in every[1:]] if ranking else list(combinations(every, 2))
    names = tuple(names) or tuple(f"image {number + 1}" for number in every)
    images = [as_rgb(image, name) for image, name in zip(images, names, strict=True)]
    specs = tuple(questions) or questions_about()
    texts = dict(enumerate(question.text for question in specs))  # by number: two labels may be the same
    (answers,) = ask_pairs(judge, [images], [texts], pairs=lambda _: pairs, symmetric=symmetric)
    scored = [_pair_score(pair, list(verdicts.values())) for pair, verdicts in answers.items()]
    if reasons:
        # Words cost a whole answer each, so a pair without a score is not asked for any.
        scored = [
            pair if pair.p_yes is None else replace(pair, reasons=_reasons(judge, images, pair, specs))
            for pair in scored
        ]
    return Scores(names, tuple(images), specs, tuple(scored), ranking)


def _pair_score(pair: Pair, verdicts: Sequence[Verdict]) -> PairScore:
    """`verdicts`: one per question."""
    return PairScore(
        *pair,
        by_question=tuple(verdict.p_yes for verdict in verdicts),
        order_gap=_mean([verdict.order_gap for verdict in verdicts]),
        error=errors_of(verdicts),
        declined=any(verdict.declined for verdict in verdicts),
    )


def _reasons(judge: Judge, images: Sequence[Image], pair: PairScore, questions: Sequence[QuestionSpec]) -> str:
    both = (images[pair.first], images[pair.second])
    texts = [(question.label, judge.explain(Question(both, question.text))) for question in questions]
    return "\n".join(f"{label}: {text}" if len(texts) > 1 else text for label, text in texts)
