"""Items of published data, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pacorl.io.files import inside
from pacorl.io.images import open_image

if TYPE_CHECKING:
    from PIL.Image import Image


Item = TypeVar("Item")


@dataclass(frozen=True)
class Dataset(Generic[Item]):
    """Published data of a benchmark."""

    file: Path
    """File of the items, beside their images."""
    items: Sequence[Item]
    """Each with a `key`, which no other has."""
    content: Sequence[Any]
    """Texts of all the data, which identify them."""


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
