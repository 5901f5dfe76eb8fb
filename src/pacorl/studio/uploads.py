"""Images that people hand in to be judged: checked at once, stored as they came, few and in memory only."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pacorl.io.images import open_image, png_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 20 * 1024 * 1024
MAX_PIXELS = 25_000_000
MAX_IMAGES = 12
"""66 pairs."""
PREVIEW = 512  # pixels of the longer side


@dataclass(frozen=True, slots=True)
class Upload:
    """One image as it came, and a small one to show."""

    id: str
    name: str
    data: bytes
    preview: bytes
    size: tuple[int, int]

    def open(self) -> Image:
        return open_image(self.data, name=self.name, max_pixels=MAX_PIXELS)


class Uploads:
    """What has been handed in and not taken back."""

    def __init__(self) -> None:
        self._uploads: dict[str, Upload] = {}
        self._lock = threading.Lock()

    def add(self, data: bytes, name: str) -> Upload:
        """Checks an image and stores it.

        Raises:
            ImageError: if `data` is no image that can be judged; it begins with the name.
            ValueError: if there are too many.
        """
        name = " ".join(name.split())[:120] or "image"
        image = open_image(data, name=name, max_pixels=MAX_PIXELS)
        upload = Upload(secrets.token_hex(8), name, data, png_bytes(preview_of(image)), image.size)
        # Decoding took its time outside of the lock, so the count is checked here, where nothing can come between.
        with self._lock:
            if len(self._uploads) >= MAX_IMAGES:
                raise ValueError(f"{name}: {MAX_IMAGES} images are here already; take one away first")
            self._uploads[upload.id] = upload
        return upload

    def find(self, name: str) -> Upload | None:
        return self._uploads.get(name)

    def remove(self, name: str) -> None:
        with self._lock:
            self._uploads.pop(name, None)

    @property
    def all(self) -> list[Upload]:
        return list(self._uploads.values())


def preview_of(image: Image) -> Image:
    small = image.copy()
    small.thumbnail((PREVIEW, PREVIEW))
    return small
