"""Images by URL, for a user's own `pacorl score` and `PacoReward`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from pacorl.io.images import ImageError, open_image
from pacorl.io.net import DeadlineError, TransientError, blocking, exchange, is_url, shown_url

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
    deadline = time.monotonic() + seconds
    target = url
    fault = f"more than {MAX_REDIRECTS} redirects"
    try:
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(target)
            if parts.scheme not in ("http", "https") or parts.port == 0:  # ValueError beyond the largest port
                break
            left = max(0.0, deadline - time.monotonic())
            answer = blocking(exchange(target, seconds=left, max_bytes=MAX_BYTES, headers={"Accept": "image/*"}))
            if answer.status == 200:
                return answer.body
            fault = f"the server answers {answer.status}"
            target = urljoin(target, answer.headers.get("location", ""))
            if not answer.redirect:
                break
    except DeadlineError:
        fault = f"no answer within {seconds:g} s"
    except (TransientError, ValueError) as error:
        fault = str(error)
    raise ImageError(f"{shown_url(url)}: {fault}; check the URL, or download the image and give its file")
