"""Rows of a published data set on the disk: parquet files (as the hub serves them), or JSONL beside its pictures.

Texts are read at once; a row with its pictures only when it is asked for, reading forward, so that a table of many
gigabytes takes the memory of a few rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from pacorl.io.documents import read_jsonl

ROWS_AT_A_TIME = 8
"""Of a parquet file; each may hold several pictures of some megabytes."""


class Rows(Protocol):
    """A table whose rows are dicts."""

    folder: Path

    def texts(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        """Every row, these columns only."""

    def row(self, number: int) -> Mapping[str, Any]:
        """One whole row; ask in ascending order where you can."""


def open_rows(source: Path) -> Rows:
    """A folder of parquet files, one such file, or a JSONL. Raises ValueError where there is nothing of the kind."""
    if source.is_file() and source.suffix == ".jsonl":
        return JsonRows(source)
    files = [source] if source.suffix == ".parquet" and source.is_file() else sorted(source.rglob("*.parquet"))
    if files:
        return ParquetRows(source if source.is_dir() else source.parent, files)
    lists = sorted(source.glob("*.jsonl"))
    if len(lists) == 1:
        return JsonRows(lists[0])
    raise ValueError(f"{source}: holds no parquet files and not one JSONL; download the data set, e.g. `hf download`")


class JsonRows:
    """A JSONL; pictures are paths beside it."""

    def __init__(self, path: Path) -> None:
        self.folder = path.parent
        self._rows = read_jsonl(path)

    def texts(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        return [{name: row.get(name) for name in columns} for row in self._rows]

    def row(self, number: int) -> Mapping[str, Any]:
        return self._rows[number]


class ParquetRows:
    """Parquet files, in the order of their names."""

    def __init__(self, folder: Path, files: Sequence[Path]) -> None:
        self.folder, self.files = folder, files
        self._reader: Iterator[tuple[int, list[dict[str, Any]]]] = iter(())
        self._start, self._part = 0, list[dict[str, Any]]()

    def texts(self, columns: Sequence[str]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        for file in self.files:
            table = _parquet(file)
            present = [name for name in columns if name in table.schema_arrow.names]
            empty = dict.fromkeys(columns)
            rows += [empty | row for row in table.read(columns=present).to_pylist()]
        return rows

    def row(self, number: int) -> Mapping[str, Any]:
        if number < self._start or not self._part:
            self._reader, self._start, self._part = self._parts(), 0, []
        while number >= self._start + len(self._part):
            self._start, self._part = next(self._reader)
        return self._part[number - self._start]

    def _parts(self) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        start = 0
        for file in self.files:
            for batch in _parquet(file).iter_batches(batch_size=ROWS_AT_A_TIME):
                yield start, batch.to_pylist()
                start += batch.num_rows


def _parquet(path: Path) -> Any:
    """Raises ValueError where pyarrow is missing or the file is no parquet."""
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("parquet files need pyarrow; install it with `pip install 'pacorl[data]'`") from None
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: no whole parquet file ({' '.join(str(error).split())[:120]})") from None


def fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """What tells one data set from another: a digest of its texts."""
    return hashlib.sha256(json.dumps(list(rows), sort_keys=True, default=str).encode()).hexdigest()[:16]


def lacking(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Names the columns that a row has no value for; empty where it has all."""
    missing = [name for name in columns if row.get(name) in (None, "", [])]
    return f"no {', '.join(missing)}" if missing else ""
