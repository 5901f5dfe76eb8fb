"""Images by URL, for a user's own `pacorl score`, `pacorl check` and `PacoReward`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import client_options, is_url, shown_url

if TYPE_CHECKING:
    from PIL.Image import Image

SECONDS = 30.0
"""Longest silence of a server."""
FIX = "check the URL, or download the image and give its file"


def open_source(source: Path | str) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image.

    Raises:
        ImageError: it is no image, or the URL gives none.
        ValueError: the file cannot be read.
    """
    if not is_url(source):
        return open_image(source)
    import httpx2

    url = str(source)
    name = shown_url(url)
    try:
        with httpx2.Client(**client_options(url, seconds=SECONDS)) as client:
            answer = client.get(url, follow_redirects=True)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:  # its text may show a key in the query
        raise ImageError(f"{name}: it cannot be fetched, {type(error).__name__}; {FIX}") from None
    if answer.status_code != 200:
        raise ImageError(f"{name}: the server answers {answer.status_code}; {FIX}")
    return open_image(answer.content, name=name)
