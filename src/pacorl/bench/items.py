"""Items of published data: rows of parquet files (as the hub serves them) or of JSONL, and their images.

Texts are read at once. A whole row with its images is read on demand, forward, so that a table of many gigabytes takes
the memory of a few rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pacorl.io.documents import JsonObject, read_jsonl
from pacorl.io.files import inside, text_digest
from pacorl.io.images import IMAGE_TYPES, ImageError, listed, open_image
from pacorl.io.tables import parquet_file

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Source = TypeVar("Source")

ROWS_AT_A_TIME = 8
"""Rows of a parquet file in memory; each may hold several images of some megabytes."""


class BadItemError(ValueError):
    """An item of the benchmark's own data that cannot be used, e.g. a missing or damaged image."""


@dataclass(frozen=True)
class Dataset(Generic[Item, Source]):
    """Selected items of a benchmark's published data."""

    items: Mapping[str, Item]
    """Items by key, in order."""
    refused: Mapping[str, str]
    """Records left out on request, and why."""
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
    records: Mapping[str, Sequence[Any]],
    parse: Callable[..., Item],
    *,
    key: Callable[[Item], str],
    at: str = "",
    skip_bad: bool = False,
) -> tuple[dict[str, Item], dict[str, str]]:
    """Parse every record of a benchmark's data.

    Args:
        records: name of a record → the arguments of `parse`.
        key: identifies an item; a second item of one key is a fault.
        at: prefix of a record's name in messages, if the name does not contain its file.

    Returns:
        The items by key, and name → fault of the records that are left out.

    Raises:
        ValueError: records cannot be used and may not be left out; it lists them.
    """
    items: dict[str, Item] = {}
    faults: dict[str, str] = {}
    for name, record in records.items():
        try:
            item = parse(*record)
            # A refused record takes no key.
            if key(item) in items:
                raise ValueError(f"key {key(item)!r} is that of an earlier record")
            items[key(item)] = item
        except ValueError as error:  # collected, so that a data set is mended in one go
            faults[name] = f"{at}{name}: {error}"
    if faults and not skip_bad:
        raise ValueError(
            f"{len(faults)} items cannot be used; mend them, or leave them out with --skip-bad:"
            f"{listed(list(faults.values()))}"
        )
    return items, faults


def parse_rows(
    source: Path, rows: Sequence[JsonObject], parse: Callable[..., Item], *, key: Callable[[Item], str], skip_bad: bool
) -> tuple[dict[str, Item], dict[str, str]]:
    """Parse (index, row) of every row of a table by `parse_records`; messages count from 1."""
    records = {}
    for number, row in enumerate(rows):
        records[f"{source}, row {number + 1}"] = (number, row)
    return parse_records(records, parse, key=key, skip_bad=skip_bad)


def named_texts(mapping: Any) -> dict[str, str]:
    """Select the texts of a mapping; published criteria have a few names without one."""
    texts = {}
    for name, text in (mapping or {}).items():
        if isinstance(text, str) and text:
            texts[str(name)] = text
    return texts


def check_filled(row: JsonObject, columns: Sequence[str], *, schema: str) -> None:
    """Raise ValueError naming the columns without a value in a row; `schema` describes a row."""
    missing = []
    for name in columns:
        if row.get(name) in (None, "", []):
            missing.append(name)

    if missing:
        raise ValueError(f"no {', '.join(missing)}; {schema}")


def open_rows(source: Path) -> Rows:
    """Open a folder of parquet files, one such file, or a JSONL. Raises ValueError if there is none."""
    if source.is_file() and source.suffix in (".jsonl", ".parquet"):
        return Rows(source.parent, [source])
    # By name, the order of the hub's shards (train-00000-of-00002.parquet): row numbers depend on it.
    files = sorted(source.rglob("*.parquet"))
    lists = sorted(source.glob("*.jsonl"))
    if not files and len(lists) != 1:
        raise ValueError(
            f"{source}: holds no parquet files and not one JSONL; download the data set, e.g. `hf download`"
        )
    return Rows(source, files or lists)


class Rows:
    """Rows of some files; images are inside them, or paths in `folder`."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder = folder
        self.files = files
        self._batches: Iterator[tuple[int, list[JsonObject]]] = iter(())
        self._start = 0
        self._batch = list[JsonObject]()

    def texts(self, columns: Sequence[str]) -> list[JsonObject]:
        """Read all rows, only `columns`."""
        rows: list[JsonObject] = []
        for file in self.files:
            if file.suffix == ".jsonl":
                for row in read_jsonl(file):
                    rows.append({name: row.get(name) for name in columns})
                continue
            with parquet_file(file) as table:
                # A mirror may lack a column, or have it in some files only; `check_filled` reports it by row.
                present = [name for name in columns if name in table.schema_arrow.names]
                for row in table.read(columns=present).to_pylist():
                    rows.append(dict.fromkeys(columns) | row)
        return rows

    def row(self, number: int) -> JsonObject:
        """Read one whole row; a number below the last one may read from the first file again."""
        # Forward only: a number below the current batch starts over.
        if number < self._start or not self._batch:
            self._batches = self._read()
            self._start = 0
            self._batch = []
        while number >= self._start + len(self._batch):
            self._start, self._batch = next(self._batches)
        return self._batch[number - self._start]

    def _read(self) -> Iterator[tuple[int, list[JsonObject]]]:
        """Yield (number of its first row, rows) of every batch; a JSONL holds paths, and is one batch."""
        start = 0
        for file in self.files:
            if file.suffix == ".jsonl":
                batch = read_jsonl(file)
                yield start, batch
                start += len(batch)
                continue
            with parquet_file(file) as table:
                for part in table.iter_batches(batch_size=ROWS_AT_A_TIME):
                    yield start, part.to_pylist()
                    start += len(part)


class ListedRows(Rows):
    """Rows of a whole document; images are paths in `folder`."""

    def __init__(self, folder: Path, rows: Sequence[JsonObject]) -> None:
        super().__init__(folder, [])
        self._rows = rows

    def row(self, number: int) -> JsonObject:
        return self._rows[number]


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
