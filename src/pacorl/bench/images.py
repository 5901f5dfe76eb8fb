"""Images of a benchmark's data: files beside it, or bytes inside its tables; each opened once per call."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.bench.suite import BadItemError
from pacorl.io.files import inside
from pacorl.io.images import ImageError, open_image

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageCache:
    """Opens images of one folder, and hands the same object out again: a judge knows equal images by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Image] = {}

    def open(self, name: str) -> Image:
        """The image of that name.

        Raises:
            BadItemError: if there is none that can be used; it names the file.
        """
        if name not in self._opened:
            path = inside(self.folder, name)
            self._opened[name] = _open(path, name=str(path))
        return self._opened[name]

    def decode(self, cell: Any, *, name: str) -> Image:
        """A table's cell: `{bytes, path}` as `datasets` writes it, bytes, or a path inside the folder."""
        content = cell.get("bytes") if isinstance(cell, Mapping) else cell
        if isinstance(content, bytes):
            return _open(content, name=name)
        path = cell.get("path") if isinstance(cell, Mapping) else cell
        if not isinstance(path, str) or not path:
            raise BadItemError(f"{name}: holds neither an image's bytes nor a path")
        return self.open(path)


def _open(source: Path | bytes, *, name: str) -> Image:
    try:
        return open_image(source, name=name)
    except ImageError as error:
        raise BadItemError(str(error)) from None
    except OSError as error:
        raise BadItemError(f"{name}: cannot be read ({error.strerror or error})") from None
