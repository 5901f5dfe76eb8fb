"""Scoring of every pair of an image set: images, questions, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.config.options import UsageError
from pacorl.core import questions as wordings
from pacorl.core.grid import parse_layout, split
from pacorl.gate.scores import PairScore, QuestionSpec, Scores, mean_of_present
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, as_rgb, check_shape, images_in, png_texts
from pacorl.io.remote import open_source
from pacorl.judge.pairwise import Pair, ask_pairs, errors_of
from pacorl.types import Grid, Question

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge


def read_criteria(values: Sequence[str]) -> dict[str, str]:
    """Read label → text from literal criteria, or from JSON files in the T2IS form (dimension → name → text).

    Raises ValueError if a file has another form.
    """
    criteria: dict[str, str] = {}
    for path_or_text in values:
        if not path_or_text.endswith(".json"):
            criteria[path_or_text] = path_or_text
            continue

        # A whole T2IS record is valid too, for its criteria.
        document = read_json(Path(path_or_text))
        if isinstance(document, dict):
            document = document.get("criteria", document)

        of_file: dict[str, str] = {}
        for dimension, entry in document.items() if isinstance(document, dict) else ():
            texts = entry if isinstance(entry, dict) else {"": entry}
            for name, text in texts.items():
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
    """Open images from files, folders or http(s) URLs.

    Returns:
        Names, images, and source → error for skipped sources (empty unless `keep_going`).

    Raises:
        ImageError: listing every unusable source, or if no image is left.
    """
    # All faults are listed at once, so that they can be mended together.
    opened: dict[str, Image] = {}
    refused: dict[str, str] = {}
    for source in files_of(sources):
        if Path(source).is_dir():
            sets = any(path.is_dir() for path in Path(source).iterdir())
            fix = f"; `pacorl check --sets {source}` checks each of its subfolders" if sets else ""
            refused[source] = f"{source} is a folder without images{fix}"
            continue

        # A source may occur twice, and names must be unique.
        name = source
        number = 1
        while name in opened:
            number += 1
            name = f"{source} ({number})"

        # An unopened source takes no name.
        try:
            opened[name] = open_source(source)
        except (ImageError, OSError) as error:
            strerror = error.strerror if isinstance(error, OSError) else None
            refused[source] = f"{source}: {strerror}" if strerror else str(error)
    if refused and not (keep_going and opened):
        raise ImageError("\n".join(refused.values()))
    return tuple(opened), tuple(opened.values()), refused


def files_of(sources: Iterable[Path | str]) -> list[str]:
    """Replace each folder by the images in it; a folder without images stays."""
    files = []
    for source in map(str, sources):
        files += (panels_in(Path(source)) if Path(source).is_dir() else []) or [source]
    return files


def panels_in(folder: Path) -> list[str]:
    """List the images of a folder, without the sheets beside the panels of `pacorl generate`.

    Images in formats that are not read are listed too: opening them names them, so that no verdict passes them over.
    """
    images = images_in(folder, unread=True)
    # set-1.png shows the same as set-1-panel-1.png and its siblings. Any other image beside them is listed.
    sheets = {image.stem.rpartition("-panel-")[0] for image in images}
    return [str(image) for image in images if image.stem not in sheets]


def open_panels(
    sources: Sequence[Path | str], *, grid: str = "", keep_going: bool = False, whole_sets: bool = True
) -> tuple[tuple[str, ...], tuple[Image, ...], dict[str, str], str]:
    """Open images as `open_images` does, or cut the one image into the panels of `--grid`.

    Returns:
        Names, images, skipped sources, and the advice of `whole_set`.

    Raises:
        UsageError: The only image is a whole set, or one of several is and `whole_sets` is off.
        ValueError: The grid has several images to cut.
    """
    names, images, refused = open_images(sources, keep_going=keep_going)
    if not grid:
        advice = whole_set(names)
        if advice and (len(images) == 1 or not whole_sets):
            raise UsageError(advice)
        return names, images, refused, advice
    if len(images) != 1:
        raise ValueError(f"--grid cuts one image, {len(images)} are given")
    return *panels_of(names[0], images[0], parse_layout(grid)), refused, ""


def whole_set(sources: Sequence[str]) -> str:
    """Advise to cut a grid image written by `pacorl generate`, because a judge compares panels; empty for none."""
    for source in sources:
        texts = png_texts(Path(source))
        layout = texts.get("layout", "1x1")
        if layout != "1x1" and "panel" not in texts:
            return f"{source} is a whole set; give it alone with --grid {layout}, which compares its panels"
    return ""


def panels_of(name: str, image: Image, grid: Grid) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """Split a grid image into its panels, named by number."""
    panels = split(image, grid)
    names = []
    for number, panel in enumerate(panels, 1):
        # The image may be large enough while its panels are too small.
        check_shape(panel, f"panel {number} of {name}")
        names.append(f"{name}[{number}]")
    return tuple(names), tuple(panels)


def check_count(images: int, *, ranking: bool = False) -> None:
    """Raise ValueError if there are too few images to compare, cheaply enough for a check before loading."""
    if images < 2 and ranking:
        raise UsageError("ranking needs a reference and at least one candidate")
    if images < 2:
        raise UsageError(f"{images} image has nothing to be compared with; give two or more")


# --- asking ------------------------------------------------------------------------------------------------------


def questions_about(theme: str = "", criteria: Mapping[str, str] | None = None) -> tuple[QuestionSpec, ...]:
    """Build the questions for a theme and written criteria (label → text); without either, the plain question."""
    written = []
    for label, text in (criteria or {}).items():
        written.append(QuestionSpec(label, wordings.meets_criterion(text)))
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
    pairs: Iterable[Pair] | None = None,
    symmetric: bool = False,
    reasons: bool = False,
) -> Scores:
    """Score every pair of two or more images, in one call of the judge.

    Args:
        names: Display names; numbered if empty.
        questions: Questions about each pair; empty for plain consistency.
        ranking: Compare only the first image, the reference, with each candidate; `ranked` holds them best first.
        pairs: The pairs to ask about, in place of all pairs.
        symmetric: Ask in both orders and take the mean.
        reasons: Request the answer in words too, which takes far longer.

    Raises:
        ValueError: for fewer than two images, or an invalid image (an ImageError, which names it).
    """
    # Inputs: pairs, names, RGB images.
    check_count(len(images), ranking=ranking)  # callers from Python have not passed the command's check
    every = range(len(images))
    if pairs is None and ranking:
        pairs = product([0], every[1:])
    elif pairs is None:
        pairs = combinations(every, 2)
    pairs = list(pairs)
    names = tuple(names) or tuple(f"image {number + 1}" for number in every)
    images = [as_rgb(image, name) for image, name in zip(images, names, strict=True)]
    specs = tuple(questions) or questions_about()

    # Verdicts, with questions by number since two labels may be equal.
    texts = {number: question.text for number, question in enumerate(specs)}
    (answers,) = ask_pairs(judge, [images], [texts], pairs=[pairs], symmetric=symmetric)
    scored = []
    for (first, second), by_question in answers.items():
        verdicts = list(by_question.values())
        score = PairScore(
            first,
            second,
            by_question=tuple(verdict.p_yes for verdict in verdicts),
            order_gap=mean_of_present([verdict.order_gap for verdict in verdicts]),
            error=errors_of(verdicts),
        )
        # Words cost a whole answer each, so pairs without a score get none.
        if reasons and score.p_yes is not None:
            lines = []
            for spec in specs:
                reason = judge.explain(Question((images[first], images[second]), spec.text))
                if len(specs) > 1:
                    reason = f"{spec.label}: {reason}"
                lines.append(reason)
            score = replace(score, reasons="\n".join(lines))
        scored.append(score)

    calibrated = getattr(judge, "calibration", None) is not None
    return Scores(names, tuple(images), specs, tuple(scored), ranking, calibrated)
