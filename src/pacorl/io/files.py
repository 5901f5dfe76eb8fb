"""Files that are never torn, JSONL, journals of long work, and paths that stay inside their folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def digest(path: Path) -> str:
    """SHA-256 of a file's content. Raises ValueError where it is missing, naming the file."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; run the step that makes it first, or name another file")
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes beside `path`, flushes to the disk and renames: readers see the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes all rows, or none."""
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises ValueError with file and line where one is not a JSON object."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; run the step that makes it first, or name another file")
    rows = []
    # splitlines() would cut at U+2028 inside a text.
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            rows.append(_object(line, where=f"{path}:{number}"))
    return rows


def read_keyed(path: Path, *, key: str) -> dict[str, dict[str, Any]]:
    """The objects of a JSONL file by their `key`, as text. Raises ValueError where it is missing or taken."""
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        if key not in row:
            raise ValueError(f"{path}, record {number}: {key!r} is missing")
        name = str(row[key])
        if rows.setdefault(name, row) != row:
            raise ValueError(f"{path}, record {number}: {key} {name!r} is already taken by another record")
    return rows


def _object(line: str, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a record is a JSON object, this is a {type(row).__name__}")
    return row


def safe_name(name: str) -> str:
    """`name` where it can be a folder's name on any system, else ValueError."""
    allowed = name.replace("-", "").replace("_", "").replace(".", "")
    if not (allowed.isascii() and allowed.isalnum()) or name.startswith(".") or len(name) > 120:
        raise ValueError(f"{name[:140]!r} cannot name a folder; use at most 120 letters, digits, '-', '_' and '.'")
    return name


def inside(folder: Path, relative: str) -> Path:
    """`folder/relative`, links resolved. Raises ValueError where that lies outside of `folder`."""
    root = folder.resolve()
    if "\0" in relative:
        raise ValueError(f"{relative!r} is not a path")
    path = (root / relative).resolve()
    if not path.is_relative_to(root) or Path(relative).is_absolute():
        raise ValueError(f"{relative!r} leads out of {folder}; paths must stay inside the folder")
    return path


class Journal:
    """Finished items of a long step, one JSON object a line, safe against a kill at any moment.

    Each line is flushed to the disk before `add` returns. A torn last line, the mark of a kill, is dropped on opening;
    a later line with the same key replaces an earlier one.
    """

    def __init__(self, path: Path, *, key: str = "key") -> None:
        self.path, self._key = path, key
        path.parent.mkdir(parents=True, exist_ok=True)
        self.torn = _drop_torn_line(path)
        """What was dropped on opening; empty where the file was whole."""
        self.items = journalled(path, key=key)

    def __contains__(self, key: object) -> bool:
        return key in self.items

    def add(self, item: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(item, ensure_ascii=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self.items[item[self._key]] = item


def journalled(path: Path, *, key: str = "key") -> dict[Any, dict[str, Any]]:
    """key → item of a journal as it lies on the disk, none where there is no file; nothing is written."""
    items: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(_whole_lines(path).decode().split("\n"), 1):
        if not line.strip():
            continue
        row = _object(line, where=f"{path}:{number}")
        if key not in row:
            raise ValueError(f"{path}, record {number}: it has no {key!r}; delete the line to go on without it")
        items[row[key]] = row
    return items


def _whole_lines(path: Path) -> bytes:
    content = path.read_bytes() if path.is_file() else b""
    return content[: content.rfind(b"\n") + 1]


def _drop_torn_line(path: Path) -> str:
    content, whole = path.read_bytes() if path.is_file() else b"", _whole_lines(path)
    if not path.is_file() or whole != content:
        write_atomic(path, whole)
    return content[len(whole) :].decode(errors="replace")
