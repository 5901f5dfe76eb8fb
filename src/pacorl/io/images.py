"""Opening pictures that people hand us: every file becomes an upright RGB image, or an error that names it.

What is read: whatever Pillow reads, at 8 bits a channel, with its EXIF orientation applied; `io/pixels` says what
becomes of transparency, of other colour modes and of several frames.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from pacorl.io.pixels import ImageError, as_rgb, check_frames, check_shape

MAX_PIXELS = 64_000_000
"""A decompressed picture of this many pixels takes about 250 MB; larger ones are bombs, or meant for print."""

SHOWN_FAULTS = 10
"""How many unusable images a message lists; the rest is counted."""

# What Pillow's decoders raise on damaged files.
DAMAGE = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, OverflowError, struct.error, zlib.error)


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
    return as_rgb(upright, name)


def _identified(data: bytes, name: str, max_pixels: int) -> Image.Image:
    """The image with its header read and its pixels not yet."""
    try:
        image = Image.open(io.BytesIO(data))
        check_frames(image, name)
    except ImageError:
        raise
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
    check_shape(image, name)
    return image


def check_readable(paths: Iterable[Path], *, threads: int = 8) -> None:
    """Opens every image once. Raises ImageError that lists those that cannot be used, each with its reason."""
    with ThreadPoolExecutor(threads) as pool:
        faults = [fault for fault in pool.map(_fault_of, dict.fromkeys(paths)) if fault]
    if faults:
        shown = "".join(f"\n  {fault}" for fault in faults[:SHOWN_FAULTS])
        more = f"\n  and {len(faults) - SHOWN_FAULTS} more" if len(faults) > SHOWN_FAULTS else ""
        raise ImageError(f"{len(faults)} image(s) cannot be used; mend them or take their records out:{shown}{more}")


def _fault_of(path: Path) -> str:
    """Why an image cannot be used; empty where it can."""
    try:
        open_image(path)
    except ImageError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    return ""


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
