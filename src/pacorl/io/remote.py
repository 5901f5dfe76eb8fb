"""Images by URL, for a user's own `pacorl score` and `PacoReward`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import TransientError, client_options, exchange, is_url, shown_url

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20_000_000
MAX_REDIRECTS = 3
DEADLINE_SECONDS = 30.0
"""For all redirects and the whole body together."""


def open_source(source: Path | str) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image."""
    if isinstance(source, str) and is_url(source):
        return open_image(fetch(source), name=shown_url(source))
    return open_image(source)


def fetch(url: str, *, seconds: float = DEADLINE_SECONDS) -> bytes:
    """Fetch the file of an image. Raises ImageError."""
    import httpx2

    options = client_options(url, seconds=seconds) | {"follow_redirects": True, "max_redirects": MAX_REDIRECTS}
    try:
        with httpx2.Client(**options) as client:
            headers = {"Accept": "image/*"}
            answer = exchange(client, "GET", url, seconds=seconds, max_bytes=MAX_BYTES, headers=headers)
        if answer.status_code == 200:
            return answer.content
        fault = f"the server answers {answer.status_code}"
    except (TransientError, ValueError) as error:
        fault = str(error)
    raise ImageError(f"{shown_url(url)}: {fault}; check the URL, or download the image and give its file")
