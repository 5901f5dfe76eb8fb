"""Rows of published tables, parquet files (as the hub serves them), JSONL or a JSON list: the only reader of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacorl.io.documents import JsonObject, read_json, read_jsonl
from pacorl.io.versions import install_command

ROWS_AT_A_TIME = 8
"""Rows of a parquet file in memory; each may hold several images of some megabytes."""


def open_rows(source: Path) -> Rows:
    """Open a folder of parquet files, one such file, a JSONL or a JSON. Raises ValueError if there is none."""
    if source.is_file() and source.suffix in (".json", ".jsonl", ".parquet"):
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
        self._read: Iterator[JsonObject] = iter(())
        self._next = 0
        self._last: JsonObject = {}

    def __iter__(self) -> Iterator[JsonObject]:
        """Read all rows, a few at a time."""
        for file in self.files:
            if file.suffix != ".parquet":
                yield from _read_documents(file)
                continue
            with parquet_file(file) as table:
                for part in table.iter_batches(batch_size=ROWS_AT_A_TIME):
                    yield from part.to_pylist()

    def texts(self, columns: Sequence[str]) -> list[JsonObject]:
        """Read all rows, only `columns`; None for a column that a file lacks."""
        rows: list[JsonObject] = []
        for file in self.files:
            if file.suffix != ".parquet":
                rows += [{name: row.get(name) for name in columns} for row in _read_documents(file)]
                continue
            with parquet_file(file) as table:
                present = [name for name in columns if name in table.schema_arrow.names]
                rows += [dict.fromkeys(columns) | row for row in table.read(columns=present).to_pylist()]
        return rows

    def row(self, number: int) -> JsonObject:
        """Read one whole row; a number below the last one reads from the first file again."""
        if number < self._next - 1:
            self._next = 0
        if self._next == 0:
            self._read = iter(self)
        while self._next <= number:
            self._last = next(self._read)
            self._next += 1
        return self._last


def _read_documents(path: Path) -> list[JsonObject]:
    if path.suffix == ".jsonl":
        return read_jsonl(path)
    rows = read_json(path)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path}: must be a list of objects")
    return rows


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a parquet file for the block, and report damaged pages as faults of the file.

    Raises:
        ValueError: it is damaged or cut off, or pyarrow is missing; the message names the file, or the package.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(f"parquet files need pyarrow; install it with `{install_command('data')}`") from None
    if not path.is_file():  # of a pipe Arrow would wait for the end
        raise ValueError(f"{path}: not a file")
    try:
        with pq.ParquetFile(path) as file:
            yield file
    # None of them names the file, and some are texts on several lines; UnicodeError is of a column's name or text.
    except (pa.ArrowException, OSError, UnicodeError) as error:
        raise ValueError(f"{path}: cannot be read as parquet ({' '.join(str(error).split())[:120]})") from None
