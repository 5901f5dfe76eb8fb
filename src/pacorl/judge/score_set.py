"""The judge asked about every pair of a set of images: images, questions, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations, count
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.core import questions as wordings
from pacorl.core.grid import split
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, as_rgb, check_shape
from pacorl.io.remote import open_source
from pacorl.judge.pairwise import Pair, ask_pairs, errors_of
from pacorl.judge.scores import PairScore, QuestionSpec, Scores, mean_of_present
from pacorl.types import Grid, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge


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
        order_gap=mean_of_present([verdict.order_gap for verdict in verdicts]),
        error=errors_of(verdicts),
        declined=any(verdict.declined for verdict in verdicts),
    )


def _reasons(judge: Judge, images: Sequence[Image], pair: PairScore, questions: Sequence[QuestionSpec]) -> str:
    both = (images[pair.first], images[pair.second])
    texts = [(question.label, judge.explain(Question(both, question.text))) for question in questions]
    return "\n".join(f"{label}: {text}" if len(texts) > 1 else text for label, text in texts)
