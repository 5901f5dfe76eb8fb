"""Items of published data, and their images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pacorl.io.files import inside, text_digest
from pacorl.io.images import open_image
from pacorl.records.prompts import evenly_spread

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")


@dataclass(frozen=True)
class Dataset(Generic[Item]):
    """Selected items of a benchmark's published data."""

    items: Mapping[str, Item]
    """Items by key, in order."""
    content: Sequence[Any]
    """Texts of all the data, whatever the limit: a limit may be raised and the results kept."""
    folder: Path
    """Folder of the items' images."""
    total: int = 0
    """Number of items, whatever the limit."""

    @classmethod
    def selected(
        cls, items: Mapping[str, Item], *, content: Sequence[Any], source: Path, limit: int | None
    ) -> Dataset[Item]:
        """Select at most `limit` items, evenly spread. Raises ValueError if `source` has none."""
        if not items:
            raise ValueError(f"{source} holds no records")
        return cls(dict(evenly_spread(list(items.items()), limit)), content, source.parent, len(items))

    @property
    def fingerprint(self) -> str:
        """Digest of the texts, which identifies the data."""
        # The content and not the path: results stay valid if the data are moved.
        # `str` for types that JSON lacks, and 64 bits, enough to distinguish versions.
        content = json.dumps(list(self.content), sort_keys=True, default=str)
        return text_digest(content)[:16]


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
