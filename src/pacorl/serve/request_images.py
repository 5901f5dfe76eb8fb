"""Images of requests: data URLs, limited by the sizes in their headers, and decoded in another process."""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacorl.io.images import ImageError, check_shape
from pacorl.io.uploads import submit_upload, upload_size
from pacorl.serve.schema import Limits
from pacorl.types import Size

if TYPE_CHECKING:
    from PIL.Image import Image

LARGE = 2**20
"""Pixels above which an image is decoded to the size in which the judge reads it."""
PIECE = 2**20
"""Letters of base64 that one call decodes; a multiple of four."""


@dataclass(frozen=True, slots=True)
class ReceivedImage:
    """Image file and the size in its header."""

    name: str
    content: bytes
    size: Size


class RequestImages:
    """Reader of request images within a server's limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    async def receive(self, urls: Sequence[str]) -> list[ReceivedImage]:
        """Read image files and their headers, without decoding.

        Raises:
            ImageError: if there are too many, they have too many pixels together, or one cannot be read; the message
                names it.
        """
        if len(urls) > self._limits.images:
            raise ImageError(
                f"{len(urls)} images in one request; this server takes {self._limits.images} (--max-images)"
            )
        received = []
        for number, url in enumerate(urls, 1):
            name = f"image {number}"
            content = await asyncio.to_thread(data_of, url, name=name)
            size = await asyncio.to_thread(upload_size, content, name=name)
            check_shape(size, name)
            received.append(ReceivedImage(name, content, size))
        pixels = sum(file.size.height * file.size.width for file in received)
        if pixels > self._limits.pixels:
            raise ImageError(
                f"the images of this request have {pixels:,} pixels together; send at most {self._limits.pixels:,}"
            )
        return received

    async def decoded(self, received: Sequence[ReceivedImage], *, resized: Callable[[Size], Size]) -> list[Image]:
        """Decode images, one after the other.

        Args:
            received: image files.
            resized: size in which the judge reads an image. Large images arrive in it, since the judge's one thread
                would resize them while other callers wait, and they would take the memory of hundreds of small ones.

        Raises:
            ImageError: if one cannot be decoded.
        """
        images = []
        for file in received:
            # A header can be false: no more pixels are decoded than it states.
            pixels = file.size.height * file.size.width
            target = _target(file.size, resized)
            decoding = submit_upload(file.content, name=file.name, max_pixels=pixels, resized=target)
            images.append(await asyncio.wrap_future(decoding))
        return images


def _target(size: Size, resized: Callable[[Size], Size]) -> Size | None:
    """Return the size to decode a large image to, or None for an image that is kept as it is."""
    pixels = size.height * size.width
    read = resized(size)
    most = max(LARGE, read.height * read.width)
    if pixels <= most:
        return None
    if resized(read) == read:
        return read

    # This judge would enlarge `read` again: its bounds are closer together than its patches, as the tiny judge's. Its
    # image is resized twice, here in its own proportions.
    scale = math.sqrt(most / pixels)
    return Size(height=max(1, round(size.height * scale)), width=max(1, round(size.width * scale)))


def data_of(url: str, *, name: str) -> bytes:
    """Return the content of a data URL. Raises ImageError naming the image and the fault."""
    head, comma, encoded = url.partition(",")
    if not head.startswith("data:"):
        raise ImageError(f"{name}: only data URLs are taken; this server does not fetch images")
    if not comma or not head.endswith(";base64"):
        raise ImageError(f"{name}: its data URL is not of the form data:image/png;base64,…")
    try:
        # The decoder of a piece accepts padding at its end, where the next piece begins.
        if encoded.find("=", 0, len(encoded) - 2) >= 0:
            raise binascii.Error("padding before the end")
        # In pieces, since each call holds the interpreter's lock. Validated, since characters outside of the alphabet
        # would be skipped, and a damaged URL could pass as an image.
        content = bytearray()
        for start in range(0, len(encoded), PIECE):
            content += base64.b64decode(encoded[start : start + PIECE], validate=True)
    except ValueError as error:
        raise ImageError(f"{name}: its data URL is not base64 ({error})") from None
    return bytes(content)
