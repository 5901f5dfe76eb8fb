"""What a person hands in to be scored: files, URLs, panels of a grid image, written criteria."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.core.grid import split
from pacorl.io.documents import read_json
from pacorl.io.images import ImageError, check_shape
from pacorl.io.net import open_source
from pacorl.types import Grid

if TYPE_CHECKING:
    from PIL.Image import Image


def read_criteria(values: Sequence[str]) -> dict[str, str]:
    """Label → text from criteria written out, or from JSON files of them in the T2IS form (dimension → name → text).

    Raises ValueError if a file is no such JSON.
    """
    criteria: dict[str, str] = {}
    for value in values:
        if value.endswith(".json"):
            criteria |= _criteria_file(Path(value))
        else:
            criteria[value] = value
    return criteria


def _criteria_file(path: Path) -> dict[str, str]:
    document = read_json(path)
    document = document.get("criteria", document) if isinstance(document, dict) else document
    criteria: dict[str, str] = {}
    for dimension, entry in document.items() if isinstance(document, dict) else ():
        inner = entry if isinstance(entry, dict) else {"": entry}
        for name, text in inner.items():
            if not isinstance(text, str) or not text:
                raise ValueError(f"{path}: criterion {dimension}.{name} is {text!r}, not a text")
            criteria[" / ".join(filter(None, (dimension, name)))] = text
    if not criteria:
        raise ValueError(f'{path}: holds no criteria; write {{"Identity": {{"Hat": "The same hat in all images."}}}}')
    return criteria


def open_images(
    sources: Sequence[Path | str], *, keep_going: bool = False
) -> tuple[tuple[str, ...], tuple[Image, ...], dict[str, str]]:
    """Names, images, and what was left out and why (empty unless `keep_going`); sources are files or http(s) URLs.

    Raises ImageError naming every file that cannot be used, and if fewer than one remains.
    """
    opened: dict[str, Image] = {}
    refused: dict[str, str] = {}
    for source in sources:
        name = _unused(str(source), opened)
        try:
            opened[name] = open_source(source)
        except (ImageError, OSError) as error:
            refused[str(source)] = _reason(error, source)
    if refused and not (keep_going and opened):
        raise ImageError("\n".join(refused.values()))
    return tuple(opened), tuple(opened.values()), refused


def panels_of(name: str, image: Image, grid: Grid) -> tuple[tuple[str, ...], tuple[Image, ...]]:
    """The panels of a grid image, named by their numbers."""
    panels = split(image, grid)
    for number, panel in enumerate(panels, 1):
        check_shape(panel, f"panel {number} of {name}")
    return tuple(f"{name}[{number}]" for number in range(1, grid.count + 1)), tuple(panels)


def _unused(name: str, names: Mapping[str, object]) -> str:
    """The name, or with a number if one image is given twice."""
    return next(n for n in itertools.chain([name], (f"{name} ({i})" for i in itertools.count(2))) if n not in names)


def _reason(error: Exception, source: Path | str) -> str:
    return f"{source}: {error.strerror}" if isinstance(error, OSError) and error.strerror else str(error)
