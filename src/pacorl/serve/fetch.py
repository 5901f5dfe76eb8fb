"""From the URL of an image in a request to its pixels."""

from __future__ import annotations

import base64
import binascii
import urllib.request
from typing import TYPE_CHECKING

from pacorl.io.images import open_image
from pacorl.io.pixels import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

FETCH_SECONDS = 10.0


def fetch_image(url: str, *, name: str, max_pixels: int, max_bytes: int, allow_urls: bool = False) -> Image:
    """Decodes a data URL; fetches an http one only where `allow_urls` says so. No other scheme is ever followed.

    Raises ImageError naming the image and the fault, OSError where a fetch fails.
    """
    if url.startswith("data:"):
        return open_image(_decoded(url, name), name=name, max_pixels=max_pixels)
    if not url.startswith(("http://", "https://")):
        raise ImageError(f"{name}: only data URLs are taken" + (" and http(s) ones" if allow_urls else ""))
    if not allow_urls:
        raise ImageError(f"{name}: only data URLs are taken; this server does not fetch images")
    return open_image(_fetched(url, name, max_bytes), name=name, max_pixels=max_pixels)


def _decoded(url: str, name: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{name}: its data URL is not of the form data:image/png;base64,…")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ImageError(f"{name}: its data URL is not base64 ({error})") from None


def _fetched(url: str, name: str, max_bytes: int) -> bytes:
    # An opener of its own: redirects stay on http(s), and nothing reads files or FTP.
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    with opener.open(url, timeout=FETCH_SECONDS) as answer:
        data: bytes = answer.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ImageError(f"{name}: is larger than {max_bytes:,} bytes")
    return data
