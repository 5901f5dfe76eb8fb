"""Items of published data: rows of parquet files (as the hub serves them) or of JSONL, and their images.

Texts are read at once. A whole row with its images is read on demand, forward, so that a table of many gigabytes takes
the memory of a few rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pacorl.io.documents import JsonObject
from pacorl.io.files import inside, text_digest
from pacorl.io.images import IMAGE_TYPES, ImageError, listed, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Source = TypeVar("Source")


class BadItemError(ValueError):
    """An item of the benchmark's own data that cannot be used, e.g. a missing or damaged image."""


@dataclass(frozen=True)
class Dataset(Generic[Item, Source]):
    """Selected items of a benchmark's published data."""

    items: Mapping[str, Item]
    """Items by key, in order."""
    content: Sequence[Any]
    """Texts of all the data, whatever the limit: a limit may be raised and the results kept."""
    source: Source
    """Source of the items' images."""

    @property
    def fingerprint(self) -> str:
        """Digest of the texts, which identifies the data."""
        # The content and not the path: results stay valid if the data are moved.
        # `str` for types that JSON lacks, and 64 bits, enough to distinguish versions.
        content = json.dumps(list(self.content), sort_keys=True, default=str)
        return text_digest(content)[:16]


def parse_records(
    records: Mapping[str, Sequence[Any]], parse: Callable[..., Item], *, key: Callable[[Item], str]
) -> dict[str, Item]:
    """Parse every record of a benchmark's data to the items by key.

    Args:
        records: name of a record → the arguments of `parse`.
        key: identifies an item; a second item of one key is a fault.

    Raises:
        ValueError: records cannot be used; it lists them.
    """
    items: dict[str, Item] = {}
    faults = []
    for name, record in records.items():
        try:
            item = parse(*record)
            if key(item) in items:
                raise ValueError(f"key {key(item)!r} is that of an earlier record")
            items[key(item)] = item
        except ValueError as error:  # collected, so that a data set is mended in one go
            faults.append(f"{name}: {error}")
    if faults:
        raise ValueError(f"{len(faults)} items cannot be used; mend them or take them out:{listed(faults)}")
    return items


def parse_rows(
    source: Path, rows: Sequence[JsonObject], parse: Callable[..., Item], *, key: Callable[[Item], str]
) -> dict[str, Item]:
    """Parse (index, row) of every row of a table by `parse_records`; messages count from 1."""
    records = {f"{source}, row {number + 1}": (number, row) for number, row in enumerate(rows)}
    return parse_records(records, parse, key=key)


class ImageCache:
    """Images of one folder, each opened once: a judge recognises equal images by their identity."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Image] = {}

    def open(self, name: str) -> Image:
        """Open an image by name. Raises BadItemError naming the file if it cannot be used."""
        if name not in self._opened:
            path = inside(self.folder, name)  # names in the data are untrusted input
            self._opened[name] = _open(path, name=str(path))
        return self._opened[name]

    def open_any(self, stem: str) -> Image:
        """Open the image of this name, in any format. Raises BadItemError if there is none."""
        for suffix in IMAGE_TYPES:
            if (self.folder / f"{stem}{suffix}").is_file():
                return self.open(f"{stem}{suffix}")
        raise BadItemError(f"{self.folder / stem}.png is missing")

    def decode(self, cell: Any, *, name: str) -> Image:
        """Open a table's cell: `{bytes, path}` as `datasets` writes it, bytes, or a path inside the folder."""
        content = cell
        path = cell
        if isinstance(cell, Mapping):
            content = cell.get("bytes")
            path = cell.get("path")
        # Bytes first: the path may be the file's name on the machine of the table's author.
        if isinstance(content, bytes):
            return _open(content, name=name)
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
