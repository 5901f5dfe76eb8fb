"""The items of published data: rows of parquet files (as the hub serves them) or of JSONL, and the images of both.

Texts are read at once; a row with its images only when it is needed, reading forward, so that a table of many
gigabytes takes the memory of a few rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pacorl.io.documents import read_jsonl
from pacorl.io.files import inside
from pacorl.io.images import ImageError, listed, open_image
from pacorl.io.tables import parquet_file

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")
Source = TypeVar("Source")

ROWS_AT_A_TIME = 8
"""Of a parquet file; each may hold several images of some megabytes."""


def faded(colour: str, share: float, *, side: int = 32) -> Image:
    """One colour, of which a share is white: the images of examples."""
    import PIL.Image

    size = (side, side)
    plain = PIL.Image.new("RGB", size, colour)
    white = PIL.Image.new("RGB", size, "white")
    return PIL.Image.blend(plain, white, share)


class BadItemError(ValueError):
    """An item of the benchmark's own data that cannot be used: a missing image, a damaged one."""


@dataclass(frozen=True)
class Dataset(Generic[Item, Source]):
    """The wanted items of a benchmark's published data."""

    items: Mapping[str, Item]
    """By their keys, in order."""
    refused: Mapping[str, str]
    """Records that were left out on request, and why."""
    content: Sequence[Any]
    """The texts of all the data, whatever the limit: a limit may be raised and the results kept."""
    source: Source
    """What the items' images are read from."""

    @property
    def fingerprint(self) -> str:
        """What tells one data set from another: a digest of its texts."""
        # Of the content and not of the path: results stay valid if the data are moved.
        # `str` for what JSON has not, and 64 bits, which tell versions of a data set apart.
        content = json.dumps(list(self.content), sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def parse_records(
    records: Mapping[str, Sequence[Any]], parse: Callable[..., Item], *, at: str = "", skip_bad: bool = False
) -> tuple[list[Item], dict[str, str]]:
    """Parses every record of a benchmark's data.

    Args:
        records: key → the arguments of `parse`.
        at: precedes the key in messages, if the key alone does not say which file it is in.

    Returns:
        The items, and key → fault of the records that are left out.

    Raises:
        ValueError: if records cannot be used and may not be left out; it lists them.
    """
    items: list[Item] = []
    faults: dict[str, str] = {}
    for key, record in records.items():
        try:
            items.append(parse(*record))
        except ValueError as error:  # collected, so that a data set is mended in one go
            faults[key] = f"{at}{key}: {error}"
    if faults and not skip_bad:
        raise ValueError(
            f"{len(faults)} items cannot be used; mend them, or leave them out with --skip-bad:"
            f"{listed(list(faults.values()))}"
        )
    return items, faults


def check_filled(row: Mapping[str, Any], columns: Sequence[str], *, schema: str) -> None:
    """Raises ValueError naming the columns that a row has no value for; `schema` says what a row has."""
    missing = [name for name in columns if row.get(name) in (None, "", [])]
    if missing:
        raise ValueError(f"no {', '.join(missing)}; {schema}")


def open_rows(source: Path) -> Rows:
    """A folder of parquet files, one such file, or a JSONL. Raises ValueError if there is nothing of the kind."""
    if source.is_file() and source.suffix in (".jsonl", ".parquet"):
        return Rows(source.parent, [source])
    # By name, which is the order of the hub's shards (train-00000-of-00002.parquet): row numbers depend on it.
    files = sorted(source.rglob("*.parquet"))
    lists = sorted(source.glob("*.jsonl"))
    if not files and len(lists) != 1:
        raise ValueError(
            f"{source}: holds no parquet files and not one JSONL; download the data set, e.g. `hf download`"
        )
    return Rows(source if files else lists[0].parent, files or lists)


class Rows:
    """The rows of some files; images are inside them, or paths in `folder`."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder = folder
        self.files = files
        self._batches: Iterator[tuple[int, list[dict[str, Any]]]] = iter(())
        self._start = 0
        self._batch = list[dict[str, Any]]()

    def texts(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Every row, these columns only."""
        rows: list[dict[str, Any]] = []
        for file in self.files:
            if file.suffix == ".jsonl":
                rows += [{name: row.get(name) for name in columns} for row in read_jsonl(file)]
                continue
            with parquet_file(file) as table:
                # A mirror may lack a column, or have it in some of its files only; `check_filled` tells of it by row.
                present = [name for name in columns if name in table.schema_arrow.names]
                rows += [dict.fromkeys(columns) | row for row in table.read(columns=present).to_pylist()]
        return rows

    def row(self, number: int) -> Mapping[str, Any]:
        """One whole row; a number below the last one may read from the first file again."""
        if number < self._start or not self._batch:
            self._batches = self._read()
            self._start = 0
            self._batch = []
        while number >= self._start + len(self._batch):
            self._start, self._batch = next(self._batches)
        return self._batch[number - self._start]

    def _read(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """(number of its first row, rows) of every batch; a JSONL holds paths, and is one batch."""
        start = 0
        for file in self.files:
            for batch in [read_jsonl(file)] if file.suffix == ".jsonl" else _parquet_batches(file):
                yield start, batch
                start += len(batch)


def _parquet_batches(file: Path) -> Iterator[list[dict[str, Any]]]:
    with parquet_file(file) as table:
        for batch in table.iter_batches(batch_size=ROWS_AT_A_TIME):
            yield batch.to_pylist()


class ImageCache:
    """Opens images of one folder, and hands the same object out again: a judge knows equal images by it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Image] = {}

    def open(self, name: str) -> Image:
        """The image of that name. Raises BadItemError naming the file if there is none that can be used."""
        if name not in self._opened:
            path = inside(self.folder, name)  # names come out of the data, and may lead anywhere
            self._opened[name] = _open(path, name=str(path))
        return self._opened[name]

    def decode(self, cell: Any, *, name: str) -> Image:
        """A table's cell: `{bytes, path}` as `datasets` writes it, bytes, or a path inside the folder."""
        # Bytes first: beside them, the path is only what the file was called on the machine that wrote the table.
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
