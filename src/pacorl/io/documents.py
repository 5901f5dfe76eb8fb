"""The one door for JSON, JSONL and YAML: what is read names its fault in one line, what is written appears whole.

    records = read_jsonl(Path("prompts.jsonl"))     # ValueError: prompts.jsonl:7: not valid JSON at column 3 (…)
    config = read_yaml(Path("run.yaml"))
    write_json(folder / "summary.json", summary)

Every fault is a ValueError that begins with the file and its line. `fix`, if a reader takes it, ends the message:
only the caller knows what the user should do about a file that cannot be used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from pacorl.io.files import write_atomic

Item = TypeVar("Item")


def read_text(path: Path, *, fix: str = "") -> str:
    """Read a UTF-8 file; a byte order mark is dropped."""
    try:
        return path.read_text(encoding="utf-8-sig")  # Windows' editors begin UTF-8 files with a mark
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}){_ending(fix)}") from None


def read_json(path: Path, *, fix: str = "") -> Any:
    """Read a JSON document of any kind."""
    return parse_json(read_text(path, fix=fix), name=str(path), fix=fix)


def read_object(path: Path, *, fix: str = "") -> dict[str, Any]:
    """Read a JSON document that must be an object."""
    return _checked_object(read_json(path, fix=fix), f"{path}: it must hold a JSON object", fix)


def read_yaml(path: Path) -> Any:
    """Read a YAML document of any kind; None if it is empty."""
    return parse_yaml(read_text(path), name=str(path))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; blank lines are passed over."""
    return read_records(path, dict, fix="run the step that makes it first, or name another file")


def read_records(
    path: Path, parse: Callable[[dict[str, Any]], Item], *, kind: str = "record", fix: str = ""
) -> list[Item]:
    """Read a JSONL file, one parsed object a line; a ValueError of `parse` gets file and line in front.

    Messages call an object `kind`.
    """
    items = []
    for number, line in text_lines(path, fix=fix):
        with blamed_on(f"{path}:{number}"):
            items.append(parse(parse_object(line, kind=kind)))
    return items


def text_lines(path: Path, *, fix: str = "") -> Iterator[tuple[int, str]]:
    """(number from 1, text without surrounding space) of every line of a file that is not blank."""
    # splitlines() would cut at U+2028 inside a text.
    for number, line in enumerate(read_text(path, fix=fix).split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def read_keyed(path: Path, *, key: str) -> dict[str, dict[str, Any]]:
    """Read the objects of a JSONL file by their `key`, as text; two that have one key must be equal."""
    rows: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        if key not in row:
            raise ValueError(f"{path}, record {number}: {key!r} is missing")
        name = str(row[key])
        if rows.setdefault(name, row) != row:
            raise ValueError(f"{path}, record {number}: {key} {name!r} is already taken by another record")
    return rows


def text_field(record: Mapping[str, Any], key: str) -> str:
    """A record's text; empty if it is absent or null, a ValueError if it is of another type."""
    value = record.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key!r} must be a text, got {value!r}")
    return value or ""


@contextmanager
def blamed_on(location: object) -> Iterator[None]:
    """Within the block, a ValueError's message begins with `location`: a file and line, or a record."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None


def parse_json(text: str | bytes, *, name: str = "", fix: str = "") -> Any:
    """Parse a JSON document; `name` is the file, to which the message of a fault adds the line."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        location = f"{name}:{error.lineno}: " if name else ""
        raise ValueError(f"{location}not valid JSON at column {error.colno} ({error.msg}){_ending(fix)}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not UTF-8 text{_ending(fix)}" if name else "not UTF-8 text") from None


def parse_object(line: str | bytes, *, kind: str = "record", fix: str = "") -> dict[str, Any]:
    """Parse one line of JSONL; `kind` is what messages call it."""
    document = parse_json(line, fix=fix or f"a {kind} is one JSON object a line")
    return _checked_object(document, f"a {kind} is a JSON object", "")


def parse_yaml(text: str, *, name: str) -> Any:
    """Parse a YAML document; `name` begins the message of a fault."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def _checked_object(document: Any, demand: str, fix: str) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError(f"{demand}, this is a {type(document).__name__}{_ending(fix)}")
    return document


def _ending(fix: str) -> str:
    return f"; {fix}" if fix else ""


def dump_json(document: Any, *, indent: int | None = 2) -> str:
    """A document as JSON; letters of all scripts stay readable, dates and paths become text."""
    return json.dumps(document, indent=indent, ensure_ascii=False, default=str)


def as_read_back(document: Any) -> Any:
    """A document as `read_json` will return it: tuples are lists, keys are texts."""
    return json.loads(dump_json(document))


def dump_yaml(document: Any) -> str:
    """A document as YAML, keys in the order given."""
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def write_json(path: Path, document: Any, *, indent: int | None = 2) -> None:
    """Write a JSON document whole, or not at all."""
    write_atomic(path, dump_json(document, indent=indent) + "\n")


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write all rows, or none."""
    write_atomic(path, "".join(_line(row) for row in rows))


def append_jsonl(path: Path, row: Mapping[str, Any]) -> None:
    """Append one row, which is on the disk when this returns."""
    with path.open("a", encoding="utf-8") as handle:
        handle.write(_line(row))
        handle.flush()
        os.fsync(handle.fileno())  # without it a power cut takes rows that were reported as done


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


class Journal:
    """Finished items of a long step, one JSON object a line, safe against a kill at any moment.

    Each line is on the disk before `add` returns. A torn last line, the mark of a kill, is dropped on opening; a later
    line with the same key replaces an earlier one.

    Example:
        journal = Journal(out / "results.jsonl")
        for item in items:
            if item.key not in journal:
                journal.add({"key": item.key, "score": measure(item)})
    """

    def __init__(self, path: Path, *, key: str = "key") -> None:
        self.path, self._key = path, key
        whole, torn = _whole_lines(path)
        if torn or not path.is_file():
            write_atomic(path, whole)  # else the next item would be appended to half a line
        self.torn = torn.decode(errors="replace")
        """What was dropped on opening; empty if the file was whole."""
        self.items = read_journal(path, key=key)

    def __contains__(self, key: object) -> bool:
        return key in self.items

    def add(self, item: dict[str, Any]) -> None:
        """Append an item, on the disk when this returns."""
        append_jsonl(self.path, item)
        self.items[item[self._key]] = item


def read_journal(path: Path, *, key: str = "key") -> dict[Any, dict[str, Any]]:
    """Read a journal as it lies on the disk: key → item, empty without a file. Nothing is written.

    A half-written last line may be another process at work, so it is passed over.
    """
    items: dict[Any, dict[str, Any]] = {}
    for number, line in enumerate(_whole_lines(path)[0].decode().split("\n"), start=1):
        if line.strip():
            with blamed_on(f"{path}:{number}"):
                row = parse_object(line, fix="delete the line to go on without it")
                if key not in row:
                    raise ValueError(f"it has no {key!r}; delete the line to go on without it")
            items[row[key]] = row
    return items


def _whole_lines(path: Path) -> tuple[bytes, bytes]:
    """The lines that end, and what comes after them."""
    content = path.read_bytes() if path.is_file() else b""
    end = content.rfind(b"\n") + 1
    return content[:end], content[end:]
