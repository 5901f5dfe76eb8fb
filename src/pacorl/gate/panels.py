"""Panels of a command: files, folders and URLs, or one page that is cut."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pacorl.config.options import UsageError
from pacorl.core.grid import LAYOUT, parse_layout, split
from pacorl.io.images import ImageError, check_shape, images_in, png_texts, recipe_of
from pacorl.io.remote import open_source

if TYPE_CHECKING:
    from PIL.Image import Image


class Panels(NamedTuple):
    """Images to compare.

    Attributes:
        names: Names in tables.
        images: RGB images.
        texts: What each shows, by its recipe; empty without one.
    """

    names: tuple[str, ...]
    images: tuple[Image, ...]
    texts: tuple[str, ...]


def open_panels(sources: Sequence[Path | str], *, grid: str = "") -> Panels:
    """Open images from files, folders or http(s) URLs, or cut the one image into panels.

    Args:
        grid: ROWSxCOLS of the one image's panels; by default the layout in its recipe.

    Raises:
        UsageError: One of several images is a whole page of panels, or the grid is none.
        ValueError: A source cannot be used, or is given twice, and is named; or the grid has several images to cut.
    """
    if grid and not LAYOUT.search(grid):
        raise UsageError(f"{grid!r} is no layout ROWSxCOLS, such as 2x2")
    names = files_of(sources)
    opened = {}
    for name in names:
        path = os.path.realpath(name)
        if path in opened:
            raise ImageError(f"{name} is given twice, and belongs to itself; give every image once")
        if Path(name).is_dir():
            raise ImageError(f"{name} is a folder without images")
        opened[path] = open_source(name)
    images = tuple(opened.values())

    # Panels, or the one page.
    layouts = [layout_of(name) for name in names]
    if len(images) == 1 and (grid or layouts[0]):
        return _cut(names[0], images[0], grid or layouts[0])
    if grid:
        raise ValueError(f"--grid cuts one image, {len(images)} are given")
    for name, layout in zip(names, layouts, strict=True):
        if layout:
            raise UsageError(f"{name} is a whole page of {layout} panels; give it alone, or its panels")
    return Panels(tuple(names), images, tuple(recipe_of(Path(name)).get("panel", "") for name in names))


def files_of(sources: Iterable[Path | str]) -> list[str]:
    """Replace each folder by the images in it, without the sheets of which `pacorl generate` saved the panels.

    A folder without images stays. Files that are no images are listed too: opening them names them, so that no verdict
    passes them over. Raises ImageError for a folder in a folder, unless it is hidden or holds drafts.
    """
    files: list[str] = []
    for source in sources:
        for inner in Path(source).glob("[!.]*/"):
            if inner.name != "tries":
                raise ImageError(f"{inner} would pass unseen; move it, or check each folder in {source} by --sets")
        images = images_in(Path(source))
        # set-1.png shows the same as set-1-panel-1.png and its siblings. Any other image is listed.
        sheets = {image.stem.rpartition("-panel-")[0] for image in images}
        panels = [str(image) for image in images if image.stem not in sheets]
        files += panels or [str(source)]
    return files


def layout_of(source: str) -> str:
    """Read the layout of a page in its recipe; empty for a panel, and for an image without a recipe."""
    texts = png_texts(Path(source))
    layout = texts.get("layout", "1x1")
    return "" if layout == "1x1" or "panel" in texts else layout


def _cut(name: str, image: Image, layout: str) -> Panels:
    """Split a page into its panels, named by number."""
    panels = split(image, parse_layout(layout))
    for number, panel in enumerate(panels, 1):
        # The page may be large enough while its panels are too small.
        check_shape(panel, f"panel {number} of {name}")
    texts = json.loads(recipe_of(Path(name)).get("panels", "[]"))
    if len(texts) != len(panels):
        texts = [""] * len(panels)
    names = [f"{name}[{number}]" for number in range(1, len(panels) + 1)]
    return Panels(tuple(names), tuple(panels), tuple(texts))
