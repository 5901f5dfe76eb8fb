"""From the URL of an image in a request to its pixels."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from pacorl.io import net as remote_images
from pacorl.io.images import ImageError, open_image

if TYPE_CHECKING:
    from PIL.Image import Image


def fetch_image(url: str, *, name: str, max_pixels: int, max_bytes: int, allow_urls: bool = False) -> Image:
    """Decodes a data URL; fetches an http one (`io.net`) only if `allow_urls` says so.

    Raises ImageError naming the image and the fault. No other scheme is ever followed.
    """
    if url.startswith("data:"):
        return open_image(_decoded(url, name), name=name, max_pixels=max_pixels)
    if not remote_images.is_url(url):
        raise ImageError(f"{name}: only data URLs are taken" + (" and http(s) ones" if allow_urls else ""))
    if not allow_urls:
        raise ImageError(f"{name}: only data URLs are taken; this server does not fetch images")
    return remote_images.fetch_image(url, name=name, max_bytes=max_bytes, max_pixels=max_pixels)


def _decoded(url: str, name: str) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{name}: its data URL is not of the form data:image/png;base64,…")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ImageError(f"{name}: its data URL is not base64 ({error})") from None
