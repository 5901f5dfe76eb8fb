"""Pictures as data URLs: small ones as they are, large ones shrunk until the page stays light."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

from PIL import Image

PIXEL_ART_BELOW = 200 * 200
"""A picture of fewer pixels is kept lossless and shown with hard pixel edges."""

LADDER = ((1024, 88), (768, 86), (768, 76), (512, 76), (384, 66))
"""(longer side in pixels, JPEG quality), tried in turn until a picture fits its budget; the last is always taken."""

BUDGET = 200_000
"""Bytes of one data URL: a page of 36 pictures stays under 8 MB."""

COLUMN = 384
"""CSS pixels of a picture beside another; small ones grow by the largest whole factor that fits."""

WIDE = 1.8
"""A picture at least so much wider than high is shown at twice the column."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a page shows it; width and height in CSS pixels."""

    url: str
    width: int
    height: int
    pixel_art: bool

    @property
    def wide(self) -> bool:
        return self.width >= WIDE * self.height


def show(image: Image.Image) -> Picture:
    """The picture at the size that suits it."""
    pixel_art = image.width * image.height < PIXEL_ART_BELOW
    room = COLUMN * 2 if image.width >= WIDE * image.height else COLUMN
    factor = max(1, room // image.width) if pixel_art else room / image.width
    width, height = round(image.width * factor), round(image.height * factor)
    return Picture(url=data_url(image), width=width, height=height, pixel_art=pixel_art)


def data_url(image: Image.Image, *, budget: int = BUDGET) -> str:
    """The picture as a data URL of about `budget` bytes at most: PNG below PIXEL_ART_BELOW, else JPEG."""
    if image.width * image.height < PIXEL_ART_BELOW:
        return _url(_bytes(image.convert("RGB"), "PNG"), "png")
    for side, quality in LADDER:
        encoded = _bytes(_within(image.convert("RGB"), side), "JPEG", quality=quality)
        if len(encoded) * 4 / 3 <= budget:
            break
    return _url(encoded, "jpeg")


def _within(image: Image.Image, side: int) -> Image.Image:
    scale = min(1.0, side / max(image.size))
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)


def _bytes(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, **options)
    return buffer.getvalue()


def _url(encoded: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"
