"""A set's grid image: parsing its layout and its panels' texts, cutting it apart and joining it again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from PIL import Image

from pacorl.types import Grid

# Of three digits at most: without bounds a text of 20,000 digits takes half a minute.
LAYOUT = re.compile(r"(?<!\d)(\d{1,3})\s{0,9}[x×⨉]\s{0,9}(\d{1,3})(?!\d)")
"""`2x2 grid layout`, `1×5`, `1 ⨉ 3`: the first pair of numbers around a cross is the layout (the released rule)."""

LAYOUT_OPENING = re.compile(
    r"^(?:[A-Z]+-PANEL images with an? |an? )?\d{1,3}\s?[x×⨉]\s?\d{1,3} grid layout(?:\. |,? (?:of |[a-z]+ing ))", re.I
)
"""Opening words of a T2IS prompt about its layout, before its subject."""

PANEL_TAG = re.compile(r"[.\"]\s+[A-Z0-9\-\[\]]+:")
"""A panel opens with a tag of capitals, digits, dashes and brackets that ends in a colon, after the end of a sentence:
`… detail. [TOP]-[LEFT]:A dentist …` (the released rule)."""

# Nothing quoted holds a mark of its kind: a text of 20,000 of them would take 20 s. An apostrophe in a word is none.
QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]|「([^「」]+)」|(?<!\w)['‘]((?:[^'‘’]|(?<=\w)['’](?=\w))+)['’](?!\w)")
"""Words between quotation marks, straight, curly or mixed; a single mark counts only if no letter touches its outside
(not in "dog's")."""


SetImages = Image.Image | Sequence[Image.Image]
"""Images of a set: its grid image, or one image per panel."""


def parse_layout(text: str) -> Grid:
    """Parse the first `RxC` in `text`.

    Raises ValueError if there is none or a side is 0.
    """
    layout = LAYOUT.search(text)
    if layout is None:
        raise ValueError(f"no layout such as '2x2' in {text[:80]!r}")
    return Grid(rows=int(layout[1]), cols=int(layout[2]))


def panel_texts(prompt: str) -> tuple[str, ...]:
    """Split the texts after the panel tags of a T2IS prompt, in order; empty without tags."""
    tags = list(PANEL_TAG.finditer(prompt))
    ends = [*(tag.start() + 1 for tag in tags[1:]), len(prompt)]
    # Without tags there is one end and no text to go with it.
    return tuple(prompt[tag.end() : end].strip() for tag, end in zip(tags, ends, strict=bool(tags)))


def panel_tags(grid: Grid) -> list[str]:
    """List the panel tags: `[TOP]-[LEFT]` … for 2×2, as released; `[1]-[2]` (row, column) for other grids."""
    if grid == Grid(2, 2):
        return ["[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]"]
    return [f"[{row + 1}]-[{col + 1}]" for row in range(grid.rows) for col in range(grid.cols)]


def shared_text(prompt: str) -> str:
    """Return the part of a T2IS prompt before its first panel tag."""
    first = PANEL_TAG.search(prompt)
    return (prompt if first is None else prompt[: first.start() + 1]).strip()


def subject_text(shared: str) -> str:
    """Return a shared text without its words about the layout: `2x2 grid layout of a red fox.` → `a red fox.`"""
    return LAYOUT_OPENING.sub("", shared) or shared


def split(image: SetImages, grid: Grid) -> list[Image.Image]:
    """Cut a grid image into its panels, row-major, by integer division; a remainder at the right or bottom is lost.

    Separate images of the panels are returned as they are, and may differ in size.

    Raises ValueError if the image has fewer pixels than panels along a side, or there is not one image per panel.
    """
    if not isinstance(image, Image.Image):
        if len(image) != grid.count:
            raise ValueError(f"a {grid} grid has {grid.count} panels, and {len(image)} images are given; give one each")
        return list(image)
    height, width = image.height // grid.rows, image.width // grid.cols
    if height == 0 or width == 0:
        raise ValueError(f"a {image.width}x{image.height} image cannot be cut into {grid} panels")
    corners = [(row * height, col * width) for row in range(grid.rows) for col in range(grid.cols)]
    # Cut and never resized: a judge must see the pixels that were generated.
    return [image.crop((left, top, left + width, top + height)) for top, left in corners]


def join(panels: Sequence[Image.Image], grid: Grid) -> Image.Image:
    """Join panels of one size, the inverse of `split`."""
    sizes = {panel.size for panel in panels}
    if len(panels) != grid.count or len(sizes) != 1:
        raise ValueError(f"a {grid} grid needs {grid.count} panels of one size, got {len(panels)} of {sorted(sizes)}")
    width, height = panels[0].size
    image = Image.new("RGB", (width * grid.cols, height * grid.rows))
    for index, panel in enumerate(panels):
        row, col = divmod(index, grid.cols)
        image.paste(panel, (col * width, row * height))
    return image
