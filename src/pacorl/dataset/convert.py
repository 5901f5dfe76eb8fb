"""Convert published collections to JSONL and image files, once (`pacorl data FILE`).

Parquet files (a folder or one)     rows.jsonl of the same columns, whose images are paths in `images/`
GEdit-Bench's parquet files         edits.jsonl, en.jsonl and cn.jsonl, images in `images/`
ShareGPT-4o-Image, its JSON         NAME.jsonl in its folder, images where its archives unpack them
"""

from collections.abc import Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pacorl.io.documents import JsonObject, blamed_on, read_records, typed, write_jsonl
from pacorl.io.files import existing, flush_all, write_atomic
from pacorl.io.images import open_image
from pacorl.records.fields import Listed, NonBlank

MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}
LANGUAGES = ("en", "cn")
ROWS_AT_A_TIME = 8
"""Rows in memory; each may hold several images of some megabytes."""


class ShareGpt4oRecord(BaseModel):
    """A record of ShareGPT-4o-Image; without input images it is a plain prompt."""

    input_prompt: NonBlank
    input_image: Listed = []


def convert(source: Path) -> list[Path]:
    """Convert a collection, and return the written files.

    Raises:
        ValueError: it is of another form, or a row cannot be used; the message names it.
    """
    if not source.exists():
        raise ValueError(f"{source} does not exist; name a file or folder to convert, or t2is")
    if source.suffix == ".json":
        rows = read_records(source, partial(_sharegpt_4o, folder=source.parent))
        files = {source.with_suffix(".jsonl"): rows}
    elif source.is_file() and source.suffix != ".parquet":
        raise ValueError(
            f"{source} is neither parquet nor a JSON of ShareGPT-4o-Image; prompts of your own are a .txt of one "
            "sentence a line or a .jsonl of records, and are split by --test N"
        )
    else:
        folder = source if source.is_dir() else source.parent
        rows = []
        for number, row in enumerate(parquet_rows(source), 1):
            with blamed_on(f"{source}, row {number}"):
                cells = _gedit(row) if "instruction_language" in row else row
                rows.append({name: _written(cell, folder) for name, cell in cells.items()})
        # One wait for all images, before a file names them.
        flush_all()
        files = {folder / "rows.jsonl": rows}
        # GEdit-Bench: all edits, and the edits per language.
        if rows and "intersection" in rows[0]:
            files = {folder / "edits.jsonl": rows}
            for language in LANGUAGES:
                files[folder / f"{language}.jsonl"] = [row for row in rows if row["task_name"] == language]
    if not rows:
        raise ValueError(f"{source} holds no rows")
    for path, content in files.items():
        write_jsonl(path, content)
    return list(files)


def parquet_rows(source: Path) -> Iterator[JsonObject]:
    """Read the rows of a parquet file, or of every parquet file in a folder.

    Raises:
        ValueError: there is none, it is damaged, or pyarrow is missing; the message names the file, or the package.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("parquet files need pyarrow; install it with `pip install 'pacorl[data]'`") from None
    # By name, the order of the hub's shards (train-00000-of-00002.parquet).
    files = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
    if not files:
        raise ValueError(f"{source} holds no parquet files; download the data set, e.g. `hf download`")
    for file in files:
        try:
            with pq.ParquetFile(file) as table:
                for record_batch in table.iter_batches(batch_size=ROWS_AT_A_TIME):
                    yield from record_batch.to_pylist()
        # None of them names the file, and some are texts on several lines; UnicodeError is of a column's name or text.
        except (pa.ArrowException, OSError, UnicodeError) as error:
            raise ValueError(f"{file}: cannot be read as parquet ({' '.join(str(error).split())[:120]})") from None


def _gedit(row: JsonObject) -> JsonObject:
    return {
        "image": row.get("input_image"),
        "instruction": row.get("instruction"),
        "category": row.get("task_type"),
        "task_name": row["instruction_language"],
        "key": row.get("key"),
        # Mirrors of the table hold the flag as a bool, a number or a word.
        "intersection": str(row.get("Intersection_exist")).lower() in ("true", "1"),
    }


def _written(cell: Any, folder: Path) -> Any:
    """Write the images of a cell, each `{bytes, path}`, into the folder; return the cell with their paths."""
    if isinstance(cell, list):
        return [_written(part, folder) for part in cell]
    if not isinstance(cell, dict) or "bytes" not in cell:
        return cell
    data = cell["bytes"]
    if not data:
        raise ValueError("an image has no bytes")
    # Named by content: the two languages of an edit share one image.
    digits = sha256(data).hexdigest()[:32]
    suffix = next((end for mark, end in MAGIC.items() if data.startswith(mark)), ".img")
    path = folder / "images" / f"{digits}{suffix}"
    if not path.is_file():
        open_image(data)  # raises
        write_atomic(path, data, flush=False)
    return f"images/{path.name}"


def _sharegpt_4o(record: JsonObject, folder: Path) -> JsonObject:
    edit = typed(record, ShareGpt4oRecord)
    # Not opened: there are 46,000.
    for name in edit.input_image:
        existing(folder, name)
    if edit.input_image:
        return {"image": edit.input_image, "instruction": edit.input_prompt}
    return {"prompt": edit.input_prompt}
