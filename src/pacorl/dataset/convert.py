"""Published collections of edits → JSONL of edits, once (`pacorl data FILE`).

GEdit-Bench, its parquet files            edits.jsonl, en.jsonl and cn.jsonl, images in `images/`
ShareGPT-4o-Image, its JSON               NAME.jsonl beside it, images in its folder, as its archives unpack
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from pacorl.io.documents import JsonObject, blamed_on, read_json, typed, write_jsonl
from pacorl.io.files import existing, flush_all, write_atomic
from pacorl.io.images import open_image
from pacorl.records.tables import open_rows

MAGIC = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}
LANGUAGES = ("en", "cn")


class ShareGpt4oRecord(BaseModel):
    """A record of ShareGPT-4o-Image; without input images it is a plain prompt."""

    input_prompt: Annotated[str, Field(pattern=r"\S")]
    input_image: str | list[str] | None = None


def convert(source: Path) -> list[Path]:
    """Convert a collection, and return the written files.

    Raises:
        ValueError: it is none of the two, or a row cannot be used; the message names it.
    """
    if source.suffix == ".json":
        return [_sharegpt_4o(source)]
    return _gedit(source)


def _gedit(source: Path) -> list[Path]:
    folder = source if source.is_dir() else source.parent
    edits = []
    for number, row in enumerate(open_rows(source), 1):
        with blamed_on(f"{source}, row {number}"):
            edits.append(_edit(row, folder))
    flush_all(folder / "images")

    # All edits, and those of each language.
    written = []
    for name in ("edits", *LANGUAGES):
        rows = [edit for edit in edits if name in ("edits", edit["task_name"])]
        if rows:
            written.append(folder / f"{name}.jsonl")
            write_jsonl(written[-1], rows)
    return written


def _edit(row: JsonObject, folder: Path) -> JsonObject:
    # The released preprocessing has other names.
    instruction = row.get("instruction") or row.get("prompt")
    image = row.get("input_image") or row.get("image")
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError("its instruction is missing or empty")
    data = image.get("bytes") if isinstance(image, Mapping) else None
    if not isinstance(data, bytes):
        raise ValueError("its image has no bytes")
    # Named by content: the two languages of an edit share one image.
    digits = sha256(data).hexdigest()[:32]
    path = next((folder / "images").glob(f"{digits}.*"), None)
    if path is None:
        open_image(data, name="its image")  # raises
        suffix = next((end for mark, end in MAGIC.items() if data.startswith(mark)), ".img")
        path = folder / "images" / f"{digits}{suffix}"
        write_atomic(path, data, flush=False)
    edit = {"image": f"images/{path.name}", "instruction": instruction.strip()}
    edit |= {"category": row.get("task_type") or "", "task_name": row.get("instruction_language") or ""}
    # For the benchmark. Mirrors of the table hold the flag as a bool, a number or a word.
    flag = str(row.get("Intersection_exist")).lower() in ("true", "1")
    return edit | {"key": str(row.get("key") or ""), "intersection": flag}


def _sharegpt_4o(source: Path) -> Path:
    records = read_json(source)
    if not isinstance(records, list) or not records:
        raise ValueError(f"{source}: ShareGPT-4o-Image is a JSON list of records, this is none, or empty")
    rows: list[JsonObject] = []
    for number, record in enumerate(records, 1):
        with blamed_on(f"{source}, record {number}"):
            given = typed(record, ShareGpt4oRecord)
            images = [given.input_image] if isinstance(given.input_image, str) else given.input_image
            # Not opened: there are 46,000.
            for name in images or []:
                existing(source.parent, name)
        text = given.input_prompt.strip()
        rows.append({"image": images, "instruction": text} if images else {"prompt": text})
    path = source.with_suffix(".jsonl")
    write_jsonl(path, rows)
    return path
