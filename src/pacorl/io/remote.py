"""Images by URL, for a user's own `pacorl score`, `pacorl check` and `PacoReward`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import client_options, is_url, shown_url, wire_fault

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20_000_000
MAX_REDIRECTS = 3
DEADLINE_SECONDS = 30.0
"""For all redirects and the whole body together."""


def open_source(source: Path | str) -> Image:
    """Read a file, or fetch an http(s) URL, as an upright RGB image.

    Raises:
        ImageError: it is no image, or the URL gives none within the limits.
        ValueError: the file cannot be read.
    """
    if isinstance(source, str) and is_url(source):
        return open_image(fetch(source), name=shown_url(source))
    return open_image(source)


def fetch(url: str, *, seconds: float = DEADLINE_SECONDS, most: int = MAX_BYTES) -> bytes:
    """Fetch an image's file of at most so many bytes. Raises ImageError."""
    import httpx2

    def refusal(fault: object) -> ImageError:
        return ImageError(f"{shown_url(url)}: {fault}; check the URL, or download the image and give its file")

    ends = time.monotonic() + seconds
    options = client_options(url, seconds=seconds) | {"follow_redirects": True, "max_redirects": MAX_REDIRECTS}
    content = bytearray()
    # In parts: neither a size nor a time limit of the client covers the whole body.
    try:
        with httpx2.Client(**options) as client, client.stream("GET", url) as response:
            if response.status_code != 200:
                raise refusal(f"the server answers {response.status_code}")
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > most:
                    raise refusal(f"more than {most} bytes")
                if time.monotonic() > ends:
                    raise refusal(f"not here after {seconds:g} s")
    except httpx2.HTTPError as error:
        raise refusal(wire_fault(error, url=url)) from None
    return bytes(content)
