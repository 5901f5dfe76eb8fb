"""Scoring of every pair of an image set: images, questions, scores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.config.options import UsageError
from pacorl.core import questions as wordings
from pacorl.core.batches import in_batches
from pacorl.core.grid import parse_layout, split
from pacorl.gate.scores import PairScore, QuestionSpec, Scores, mean_of_present
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, as_rgb, check_shape, images_in, png_texts
from pacorl.io.remote import open_source
from pacorl.io.terminal import Progress, silent
from pacorl.judge.pairwise import Pair, ask_pairs, errors_of
from pacorl.types import Grid, Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

TOGETHER = 256
"""Pairs of one call of the judge: the size decides the batches, and so the last bits of an answer."""


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


def open_images(sources: Sequence[Path | str]) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """Open images from files, folders or http(s) URLs, and return their names and the images.

    Raises:
        ImageError: listing every unusable source.
    """
    # All faults are listed at once, so that they can be mended together.
    opened: dict[str, Image] = {}
    faults = []
    for source in files_of(sources):
        if Path(source).is_dir():
            sets = any(path.is_dir() for path in Path(source).iterdir())
            fix = f"; `pacorl check --sets {source}` checks each of its subfolders" if sets else ""
            faults.append(f"{source} is a folder without images{fix}")
            continue

        # A source may occur twice, and names must be unique.
        name = source
        number = 1
        while name in opened:
            number += 1
            name = f"{source} ({number})"

        try:
            opened[name] = open_source(source)
        except (ImageError, OSError) as error:
            strerror = error.strerror if isinstance(error, OSError) else None
            faults.append(f"{source}: {strerror}" if strerror else str(error))
    if faults:
        raise ImageError("\n".join(faults))
    return tuple(opened), tuple(opened.values())


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


def open_panels(sources: Sequence[Path | str], *, grid: str = "") -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """Open images as `open_images` does, or cut the one image into panels.

    Args:
        grid: ROWSxCOLS of the one image's panels; by default the layout in its recipe.

    Raises:
        UsageError: One of several images is a whole page of panels.
        ValueError: The grid has several images to cut.
    """
    names, images = open_images(sources)
    layouts = [layout_of(name) for name in names]
    if len(images) == 1:
        layout = grid or layouts[0]
        return panels_of(names[0], images[0], parse_layout(layout)) if layout else (names, images)
    if grid:
        raise ValueError(f"--grid cuts one image, {len(images)} are given")
    for name, layout in zip(names, layouts, strict=True):
        if layout:
            raise UsageError(f"{name} is a whole page of {layout} panels; give it alone, or its panels")
    return names, images


def layout_of(source: str) -> str:
    """Read the layout of a page in its recipe; empty for a panel, and for an image without a recipe."""
    texts = png_texts(Path(source))
    layout = texts.get("layout", "1x1")
    return "" if layout == "1x1" or "panel" in texts else layout


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
        raise ValueError("ranking needs a reference and at least one candidate")
    if images < 2:
        raise ValueError(f"{images} image has nothing to be compared with; give two or more")


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
    progress: Progress = silent,
) -> Scores:
    """Score every pair of two or more images, up to `TOGETHER` pairs in one call of the judge.

    Args:
        names: Display names; numbered if empty.
        questions: Questions about each pair; empty for plain consistency.
        ranking: Compare only the first image, the reference, with each candidate; `ranked` holds them best first.
        pairs: The pairs to ask about, in place of all pairs.
        symmetric: Ask in both orders and take the mean.
        reasons: Request the answer in words too, which takes far longer.
        progress: Callback with (done, total) questions.

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
    per_pair = len(specs) * (2 if symmetric else 1)
    answers: dict[Pair, dict[int, Verdict]] = {}
    progress(0, per_pair * len(pairs))
    for chunk in in_batches(pairs, TOGETHER):
        (of_chunk,) = ask_pairs(judge, [images], [texts], pairs=[chunk], symmetric=symmetric)
        answers |= of_chunk
        progress(per_pair * len(answers), per_pair * len(pairs))
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
