"""Pictures on the disk: opened with care, saved with what made them."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, PngImagePlugin, UnidentifiedImageError

MAX_PIXELS = 64_000_000
"""Above this a picture is refused unread: eight times a 4K sheet, and far below what fills the memory."""

TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


def open_image(path: Path) -> Image.Image:
    """The picture in RGB. Raises ValueError that names the file where it is missing, broken or too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is stricter
            with Image.open(path) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise ValueError(f"{path}: {image.width}x{image.height} pixels; at most {MAX_PIXELS:,} are read")
                return image.convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as a picture ({error})") from None


def png_bytes(image: Image.Image, texts: Mapping[str, str] | None = None) -> bytes:
    """The picture as PNG, with `texts` in its text chunks."""
    chunks = PngImagePlugin.PngInfo()
    for key, text in (texts or {}).items():
        chunks.add_itxt(key, text)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=chunks)
    return buffer.getvalue()


def png_text(path: Path, key: str) -> str | None:
    """One text chunk of a PNG; None where the file or the chunk is missing, or the file is broken."""
    try:
        with Image.open(path) as image:
            image.load()
            return str(image.info[key]) if key in image.info else None
    except (OSError, SyntaxError, ValueError):
        return None
