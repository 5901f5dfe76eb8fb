"""Reading of parquet files, with faults that name the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacorl.io.versions import install_command


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
