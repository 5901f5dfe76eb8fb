"""Edits and prompts as two published collections hold them: GEdit-Bench's parquet and ShareGPT-4o-Image's JSON.

    load_gedit(Path("GEdit-Bench/data"))                       a file, or a folder of them; language="en" for one half
    load_sharegpt_4o(Path("text_and_image_to_image.json"))     images lie beside it, as its archives unpack

GEdit-Bench keeps its images inside the parquet; they are written once into a folder beside it. Only the columns
that are needed are read. A fault names file and row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pacorl.io.documents import read_json
from pacorl.io.files import inside, write_atomic
from pacorl.io.images import open_image
from pacorl.types import Prompt

LANGUAGES = ("en", "cn")
INSTRUCTION = ("instruction", "prompt")
"""GEdit-Bench's name, and the one that the released preprocessing gives the column."""
PICTURE = ("input_image", "image")
ROWS_PER_BATCH = 64
"""So many rows are in memory at a time, images included."""
SUFFIX_OF = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}


def load_gedit(path: Path, *, language: str = "", images: Path | None = None) -> list[Prompt]:
    """Every edit of one language, or of both; `id` is the row's place among those returned.

    images: the folder of the input images, by the hash of their bytes; `<name>_pictures` beside the file if
    None. Raises ValueError naming file and row, or what to install.
    """
    if language not in ("", *LANGUAGES):
        raise ValueError(f"{path}: language {language!r} is none of {', '.join(LANGUAGES)}")
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: holds no .parquet files")
    folder = images or path.parent / f"{path.stem}_pictures"
    prompts: list[Prompt] = []
    for file in files:
        for number, row in enumerate(_rows(file), start=1):
            if language in ("", row.get("instruction_language")):
                prompts.append(_gedit_prompt(row, len(prompts), location=f"{file}, row {number}", folder=folder))
    if not prompts:
        raise ValueError(f"{path}: holds no edits" + (f" in {language}" if language else ""))
    return prompts


def load_sharegpt_4o(path: Path) -> list[Prompt]:
    """Every record of `text_and_image_to_image.json`, or of `text_to_image.json`, which has no images to edit.

    `id` is the record's place. Images are looked for and not opened (there are 46,000). Raises ValueError naming
    file and record.
    """
    records = read_json(path)
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path}: ShareGPT-4o-Image is a JSON list of records, this is none, or empty")
    return [_sharegpt_prompt(record, number, path=path) for number, record in enumerate(records)]


# --- GEdit-Bench -----------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        import pyarrow as pa  # type: ignore[import-untyped]
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("parquet files need pyarrow; install it with `pip install 'pacorl[data]'`") from None
    try:
        with pq.ParquetFile(path) as file:
            columns = _columns(path, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=list(columns)):
                for row in batch.to_pylist():
                    yield {columns[name]: value for name, value in row.items()}
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"{path}: cannot be read as parquet ({' '.join(str(error).split())[:120]})") from None


def _columns(path: Path, names: Sequence[str]) -> dict[str, str]:
    """The file's columns that are read → our names for them."""
    columns = {}
    for choices in (INSTRUCTION, PICTURE):
        column = next((name for name in choices if name in names), None)
        if column is None:
            raise ValueError(f"{path}: has no column {' or '.join(choices)}; it has {', '.join(names)}")
        columns[column] = choices[0]
    return columns | {name: name for name in ("instruction_language", "task_type") if name in names}


def _gedit_prompt(row: Mapping[str, Any], number: int, *, location: str, folder: Path) -> Prompt:
    text, image = row["instruction"], row["input_image"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{location}: the instruction is missing or empty")
    data = image.get("bytes") if isinstance(image, Mapping) else None
    if not data:
        raise ValueError(f"{location}: the image has no bytes")
    open_image(data, name=f"{location}, its image")
    return Prompt(
        id=number,
        text=text.strip(),
        sources=(_written(data, folder),),
        category=row.get("task_type") or "",
        task=row.get("instruction_language") or "",
    )


def _written(data: bytes, folder: Path) -> Path:
    """The image as a file of its own, named by its content; written if it is not there yet."""
    suffix = next((suffix for mark, suffix in SUFFIX_OF.items() if data.startswith(mark)), ".img")
    path = folder / f"{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
    if not path.exists():
        write_atomic(path, data)
    return path


# --- ShareGPT-4o-Image -----------------------------------------------------------------------------------------


def _sharegpt_prompt(record: Any, number: int, *, path: Path) -> Prompt:
    location = f"{path}, record {number + 1}"
    text = record.get("input_prompt") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{location}: 'input_prompt' is missing or empty")
    names = record.get("input_image") or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{location}: 'input_image' must be a path or a list of paths, got {names!r}")
    return Prompt(id=number, text=text.strip(), sources=tuple(_source_beside(path, name, location) for name in names))


def _source_beside(path: Path, name: str, location: str) -> Path:
    try:
        source = inside(path.parent, name)
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None
    if not source.is_file():
        raise ValueError(f"{location}: {source} is missing; unpack the collection's archives beside {path.name}")
    return source
