"""Opening pictures that people hand us: every file becomes an upright RGB image, or an error that names it.

What is read: whatever Pillow reads, at 8 bits a channel. Transparency is laid on white (what a page would show), EXIF
orientation is applied, CMYK, palette and 16-bit grey become RGB. A file of several frames or pages is refused: which
of them is meant, only its owner knows. The second picture in a phone's photo (MPO) is not such a frame, and ignored.
"""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

MAX_PIXELS = 64_000_000
"""A decompressed picture of this many pixels takes about 250 MB; larger ones are bombs, or meant for print."""
MIN_SIDE = 4
"""Below it, rows and columns cannot be told from colour channels, and there is nothing to judge."""
MAX_ASPECT = 200
"""The judge's image processor refuses longer strips."""

# What Pillow's decoders raise on damaged files.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)


class ImageError(ValueError):
    """A picture that cannot be used; the message names it and says why."""


def open_image(source: Path | str | bytes, *, name: str = "", max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Reads a file, or the bytes of one, as an upright RGB image. `name` stands for bytes in messages.

    Raises ImageError where it is no image, damaged, too large or too small, or has several frames; OSError where the
    file cannot be read at all.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    name = name or ("the image" if isinstance(source, bytes) else str(source))
    image = _identified(data, name, max_pixels)
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except DAMAGE as error:
        raise ImageError(f"{name}: damaged or cut off ({_short(error)})") from None
    return _rgb(upright, name)


def _identified(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """The image with its header read and its pixels not yet."""
    try:
        image = Image.open(io.BytesIO(data))
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{name}: too large; an image may have {max_pixels:,} pixels") from None
    except UnidentifiedImageError:
        kind = "empty" if not data else "not an image of a known format"
        raise ImageError(f"{name}: {kind}") from None
    except DAMAGE as error:
        raise ImageError(f"{name}: damaged or cut off ({_short(error)})") from None
    width, height = image.size
    if width * height > max_pixels:
        raise ImageError(f"{name}: {width}x{height} is too large; an image may have {max_pixels:,} pixels")
    if frames > 1:
        raise ImageError(f"{name}: has {frames} frames or pages; save the one that is meant as a picture of its own")
    check_shape(image, name)
    return image


def check_shape(image: Image.Image, name: str) -> None:
    """Raises ImageError where an image is too small or too long and thin for a judge."""
    short, long = sorted(image.size)
    if short < MIN_SIDE:
        raise ImageError(f"{name}: {image.width}x{image.height} is too small; each side needs {MIN_SIDE} pixels")
    if long > MAX_ASPECT * short:
        raise ImageError(
            f"{name}: {image.width}x{image.height} is too long; one side may be {MAX_ASPECT} times the other"
        )


def _rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in ("I", "F"):
        raise ImageError(f"{name}: its pixels (mode {image.mode}) have no fixed white; save it with 8 bits a channel")
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 257).convert("L").convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
