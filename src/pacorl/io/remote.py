"""Images by URL, for a user's own `pacorl score`, `pacorl check` and `PacoReward`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import is_url, shown_url

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = 30.0
"""Longest silence of a server."""


def open_source(source: Path | str) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image.

    Raises:
        ImageError: it is no image, or the URL gives none.
        ValueError: the file cannot be read.
    """
    if not is_url(source):
        return open_image(source)
    import httpx2

    name = shown_url(str(source))
    try:
        answer = httpx2.get(str(source), timeout=SECONDS, follow_redirects=True).raise_for_status()
    except httpx2.HTTPError as error:  # its text may show a key in the query
        reason = f"{type(error).__name__}; check the URL, or download the image and give its file"
        raise ImageError(f"{name}: it cannot be fetched, {reason}") from None
    return open_image(answer.content, name=name)
