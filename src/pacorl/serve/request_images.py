"""Images of requests: read whole, limited by the sizes in their headers, and decoded in other processes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacorl.io import net, remote
from pacorl.io.decoder import submit_upload
from pacorl.io.images import ImageError, check_shape, image_size
from pacorl.serve.schema import Limits
from pacorl.types import Size
from pacorl.web.budget import PixelBudget

if TYPE_CHECKING:
    from PIL.Image import Image

LARGE = 2**20
"""Pixels above which an image is decoded to the size in which the judge reads it."""
PIECE = 2**20
"""Letters of base64 that one call decodes; a multiple of four."""
FETCHES = 8
"""Concurrent downloads for all callers, in a thread pool of their own."""


@dataclass(frozen=True, slots=True)
class ReceivedImage:
    """Image file and the size in its header."""

    name: str
    content: bytes
    size: Size


class RequestImages:
    """Reader of request images within a server's limits."""

    def __init__(self, limits: Limits, *, allow_urls: bool) -> None:
        self._limits = limits
        self._allow_urls = allow_urls
        self._budget = PixelBudget(max(limits.pixels, limits.held_pixels), per_request=limits.pixels)
        self._fetches = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")

    async def receive(self, urls: Sequence[str]) -> list[ReceivedImage]:
        """Read image files and their headers, without decoding.

        Raises:
            ImageError: if there are too many, or one cannot be read; the message names it.
        """
        if len(urls) > self._limits.images:
            raise ImageError(
                f"{len(urls)} images in one request; this server takes {self._limits.images} (--max-images)"
            )
        received = []
        # Downloads count like bodies: all images of a request share the limit.
        spare = self._limits.body_bytes
        for number, url in enumerate(urls, 1):
            name = f"image {number}"
            content = await self._content(url, name, most=spare)
            spare -= len(content)
            size = image_size(content, name=name)
            check_shape(size, name)
            received.append(ReceivedImage(name, content, size))
        return received

    @asynccontextmanager
    async def decoded(
        self, received: Sequence[ReceivedImage], *, resized: Callable[[Size], Size], caller: str
    ) -> AsyncIterator[list[Image]]:
        """Decode images, whose pixels count as held until the block ends.

        Args:
            received: image files.
            resized: size in which the judge reads an image. Large images arrive in it, since the judge's one thread
                would resize them while other callers wait, and they would take the memory of hundreds of small ones.
            caller: address of the client.

        Raises:
            ImageError: if they have too many pixels together, or one cannot be decoded.
        """
        self._budget.check([file.size for file in received])
        targets = [_target(file.size, resized) for file in received]
        async with self._budget.reserve([target or file.size for file, target in zip(received, targets, strict=True)]):
            images = []
            for file, target in zip(received, targets, strict=True):
                # A header can be false: no more pixels are decoded than it states.
                pixels = file.size.height * file.size.width
                decoding = submit_upload(file.content, name=file.name, max_pixels=pixels, caller=caller, resized=target)
                images.append(await asyncio.wrap_future(decoding))
            yield images

    async def _content(self, url: str, name: str, *, most: int) -> bytes:
        """Read the file of an image; a download has at most `most` bytes, and schemes are data, http and https."""
        if url.startswith("data:"):
            return await asyncio.to_thread(data_of, url, name=name)
        if not net.is_url(url):
            schemes = "data URLs and http(s) URLs" if self._allow_urls else "data URLs"
            raise ImageError(f"{name}: only {schemes} are taken")
        if not self._allow_urls:
            raise ImageError(f"{name}: only data URLs are taken; this server does not fetch images")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._fetches, lambda: remote.fetch_bytes(url, max_bytes=most))


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
