"""Images by URL, for a user's own `pacorl score`, `pacorl check` and `PacoReward`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import client_options, is_url, shown_url, wire_fault

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = 30.0
"""Longest silence of a server."""
LIMIT = 64 * 2**20
"""Bytes of an image's file; an endless answer would fill the memory."""
FIX = "check the URL, or download the image and give its file"


def open_source(source: Path | str) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image.

    Raises:
        ImageError: it is no image, or the URL gives none.
        ValueError: the file cannot be read.
    """
    if isinstance(source, str) and is_url(source):
        return open_image(fetch(source), name=shown_url(source))
    return open_image(source)


def fetch(url: str) -> bytes:
    """Fetch an image's file. Raises ImageError."""
    import httpx2

    options = client_options(url, seconds=SECONDS) | {"follow_redirects": True}
    content = bytearray()
    try:
        with httpx2.Client(**options) as client, client.stream("GET", url) as answer:
            if answer.status_code != 200:
                raise ImageError(f"{shown_url(url)}: the server answers {answer.status_code}; {FIX}")
            for part in answer.iter_bytes():
                content += part
                if len(content) > LIMIT:
                    raise ImageError(f"{shown_url(url)}: larger than {LIMIT / 2**20:.0f} MiB; {FIX}")
    except httpx2.HTTPError as error:
        raise ImageError(f"{shown_url(url)}: {wire_fault(error, url=url)}; {FIX}") from None
    return bytes(content)
