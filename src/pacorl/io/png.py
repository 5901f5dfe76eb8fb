"""Pictures on the disk, with what made them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from PIL import Image, PngImagePlugin

TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}


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
