"""The pictures that edits start from: their files, and the shapes that they ask for."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import as_rgb
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from PIL.Image import Image

ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held; values from SIDEWAYS on swap height and width."""
SIDEWAYS = 5


def open_source(path: Path) -> Image:
    """An upright RGB picture. Raises OSError or ImageError, which name the file, where it cannot be read."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    with Pillow.open(path) as image:
        return as_rgb(ImageOps.exif_transpose(image), str(path))


@cache
def source_size(path: Path) -> Size:
    """Height and width of a source as it is looked at, from its header."""
    from PIL import Image as Pillow

    with Pillow.open(path) as image:
        sideways = image.getexif().get(ORIENTATION, 1) >= SIDEWAYS
        return Size(image.width, image.height) if sideways else Size(image.height, image.width)


def sources_of(prompt: Prompt, *, most: int, model: str) -> tuple[Path, ...]:
    """The sources of an edit. Raises ValueError, naming the prompt, where there are none or more than `most`."""
    if not prompt.sources:
        raise ValueError(
            f"prompt {prompt.id} ({prompt.text[:60]!r}) has no source, and {model} edits pictures; "
            "give records of {image, instruction}"
        )
    if len(prompt.sources) > most:
        raise ValueError(
            f"prompt {prompt.id} ({prompt.text[:60]!r}) has {len(prompt.sources)} sources, and {model} takes {most}"
        )
    return prompt.sources


def check_area(size: Size, *, step: int) -> None:
    """Raises ValueError where an area is smaller than one token of `step` pixels."""
    if size.height * size.width < step * step:
        raise ValueError(f"size {size} is smaller than one token; give at least {Size(step, step)}")
