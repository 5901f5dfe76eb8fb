"""Images of published data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pacorl.io.files import inside
from pacorl.io.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageCache:
    """Images of one folder, each opened once: a judge recognises equal images by their identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Image] = {}

    def open(self, name: str) -> Image:
        """Open an image by name. Raises ValueError naming the file if it cannot be used."""
        if name not in self._opened:
            self._opened[name] = open_image(inside(self.folder, name))  # names in the data are untrusted input
        return self._opened[name]
