"""JSON, JSONL and YAML of the whole package: reading names a fault in one line, writing is atomic.

    records = read_jsonl(Path("prompts.jsonl"))     # ValueError: prompts.jsonl:7: not valid JSON at column 3 (…)
    config = read_yaml(Path("run.yaml"))
    write_json(folder / "summary.json", summary)

Readers accept regular files of bounded size and depth in UTF-8. JSON has no NaN. YAML is version 1.2: `no` and `on` are
texts, 1e-4 is a number, and keys of a mapping are unique. Every fault is a ValueError; its message begins with the file
and its line. `fix`, a parameter of some readers, is the caller's advice about a missing file.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from pacorl.io.files import SHARED, append_flushed, make_folder, read_bytes, replacing, write_atomic

Item = TypeVar("Item")
JsonObject = dict[str, Any]
"""JSON object, with values of any kind."""

MAX_BYTES = 2**30
"""Limit of a text file. PaCo-Dataset's largest has a few hundred million."""
MAX_YAML_BYTES = 2**20
"""Limit of a YAML file: people write these by hand, and the parser takes ten seconds for a million characters."""
SHOWN = 300
"""Characters of a refused value that a message shows."""
FAULTS = {
    "missing": "is missing",
    "string_too_short": "is empty",
    "string_type": "must be a text",
    "dict_type": "must be a mapping of keys",
    "list_type": "must be a list",
    "tuple_type": "give a list in brackets, as [1, 2] or [{name: …}]",
    "extra_forbidden": "unknown key; take it out, or correct its spelling",
}
"""Type of a fault of pydantic's → message in place of pydantic's."""
CLASS = re.compile(r"valid dictionary or instance of \w+")
"""Name of a class in pydantic's messages."""
ALTERNATIVE = re.compile(r"constrained-\w+$|literal\[")
"""Name that pydantic adds to a key whose value is a number or a word."""
JSON_FAULT = re.compile(r"(?P<fault>.*) at line (?P<line>\d+) column (?P<column>\d+)")
"""Message of pydantic's parser."""


def read_text(path: Path, *, fix: str = "", limit: int = MAX_BYTES) -> str:
    """Read a UTF-8 file; a byte order mark is dropped."""
    content = read_bytes(path, limit=limit, fix=fix)
    # Accept the line breaks of all systems, as Python's text files do.
    return _decoded(content, path).replace("\r\n", "\n").replace("\r", "\n")


def _decoded(content: bytes, path: Path) -> str:
    try:
        return content.decode("utf-8-sig")  # Windows' editors begin UTF-8 files with a mark
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None


def read_object(path: Path, *, fix: str = "") -> JsonObject:
    """Read a JSON document that must be an object."""
    document = parse_json(read_text(path, fix=fix), name=str(path))
    with blamed_on(path):
        return _checked_object(document)


def read_yaml(path: Path) -> Any:
    """Read a YAML document of any kind; None if it is empty."""
    return parse_yaml(read_text(path, limit=MAX_YAML_BYTES), name=str(path))


def read_jsonl(path: Path) -> list[JsonObject]:
    """Read the objects of a JSONL file; blank lines are passed over."""
    return read_records(path, dict, fix="run the step that makes it first, or name another file")


def read_records(path: Path, parse: Callable[[JsonObject], Item], *, fix: str = "") -> list[Item]:
    """Read the objects of a JSONL file, or of a JSON list, each by `parse`; its ValueError gets file and line in front.

    A record of a list has its number in place of the line.
    """
    items = []
    if path.suffix.lower() == ".json":
        records = parse_json(read_text(path, fix=fix), name=str(path))
        if not isinstance(records, list):
            raise ValueError(f"{path}: must hold a list of records, this is a {type(records).__name__}")
        for number, record in enumerate(records, start=1):
            with blamed_on(f"{path}, record {number}"):
                items.append(parse(_checked_object(record)))
        return items
    return _parsed_lines(read_text(path, fix=fix), path, parse)


def _parsed_lines(text: str, path: Path, parse: Callable[[JsonObject], Item]) -> list[Item]:
    items = []
    for number, line in numbered_lines(text):
        with blamed_on(f"{path}:{number}"):
            items.append(parse(parse_object(line)))
    return items


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (number from 1, line without surrounding space) of a file's text; blank lines are left out."""
    # splitlines() would cut at U+2028 inside a text.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


@contextmanager
def blamed_on(location: object, faults: list[str] | None = None) -> Iterator[None]:
    """Prefix a ValueError's message with `location`, a file and line, or a record; raise it, or add it to `faults`."""
    try:
        yield
    except ValueError as error:
        if faults is None:
            raise ValueError(f"{location}: {error}") from None
        faults.append(f"{location}: {error}")


def typed(document: Any, kind: type[Item]) -> Item:
    """Convert a document to a type of pydantic's: a model, a dataclass, `dict[str, float]`.

    Raises:
        ValueError: it is none, and neither `true` nor "0.5" is a number; the message has the first faults and keys.
    """
    try:
        # As JSON, since strict validation makes tuples and paths of that alone. A date of YAML is a text again.
        return cast(Item, _adapter(kind).validate_json(json.dumps(document, default=str), strict=True))  # type: ignore[arg-type]
    except ValidationError as error:
        raise ValueError(faults_of(error)) from None


def faults_of(error: ValidationError, *, unknown: Callable[[Any], str] | None = None, whole: str = "") -> str:
    """Describe the first faults on one line, each with its key, its message and the value.

    Args:
        unknown: describes an unknown key by its path.
        whole: the key of a fault of the whole document.
    """
    lines = []
    # A list without its faulty entries is too short for pydantic, so that this fault is named only alone.
    errors = error.errors()
    others = [fault for fault in errors if fault["type"] != "too_short"]
    for key, of_key in islice(groupby(others or errors, key=_key_of), 3):
        faults = list(of_key)
        fault = faults[0]
        if unknown and fault["type"] == "extra_forbidden":
            lines.append(unknown(fault["loc"]))
            continue
        message = " or ".join(map(_message_of, faults))
        # A whole section as the value would not help.
        if not isinstance(fault["input"], dict | BaseModel):
            message += f" (got {repr(fault['input'])[:SHOWN]})"
        lines.append(f"{key or whole}: {message}".removeprefix(": "))
    return "; ".join(lines).replace("\n", "\\n")


def _key_of(fault: ErrorDetails) -> str:
    """Return the dotted key of a fault, without the names of a value's alternatives."""
    return ".".join(step for step in map(str, fault["loc"]) if not ALTERNATIVE.match(step))


def _message_of(fault: ErrorDetails) -> str:
    """Return pydantic's message, in words of configs and records."""
    return FAULTS.get(fault["type"]) or CLASS.sub("mapping of keys", fault["msg"].removeprefix("Value error, "))


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)  # costs a hundred times as much as reading one record


def parse_json(text: str, *, name: str = "") -> Any:
    """Parse a JSON document; `name` is the file, to which the message of a fault adds the line.

    Raises:
        ValueError: it is not JSON, nested too deeply, or has NaN or half of a surrogate pair.
    """
    try:
        return from_json(text, allow_inf_nan=False)
    except ValueError as error:
        match = JSON_FAULT.fullmatch(str(error))
        assert match is not None
        line_prefix = f"{name}:{match['line']}: " if name else ""
        raise ValueError(f"{line_prefix}not valid JSON at column {match['column']} ({match['fault']})") from None


def parse_object(line: str) -> JsonObject:
    """Parse one line of JSONL."""
    return _checked_object(parse_json(line))


def _checked_object(document: Any) -> JsonObject:
    if not isinstance(document, dict):
        raise ValueError(f"must hold a JSON object, this is a {type(document).__name__}")
    return document


def object_within(text: str) -> JsonObject:
    """Parse the JSON object in a model's answer, from the first brace behind its thoughts to the last one.

    Raises:
        ValueError: if there is none, or it is malformed; an answer with drafts of the object is.
    """
    answer = text.rpartition("</think>")[2]
    start, end = answer.find("{"), answer.rfind("}") + 1
    if "<think>" in answer or start < 0:
        raise ValueError(f"it holds no JSON object: {text[:60]!r}")
    with blamed_on("its JSON is malformed or breaks off"):
        return parse_object(answer[start:end])


def parse_yaml(text: str, *, name: str) -> Any:
    """Parse a YAML 1.2 document; `name` begins the message of a fault.

    Raises:
        ValueError: it is not YAML, or has a repeated key.
    """
    try:
        return _yaml().load(text)
    # Not YAMLError alone: invalid tags, escapes beyond Unicode and deep nesting raise other types.
    except Exception as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark and "\n" in text else ""
        # A repeated key is quoted with both values, which may have many lines.
        problem = str(getattr(error, "problem", None) or error).partition(" with value ")[0]
        if "duplicate key" in problem:
            problem += "; write it once, with all that it holds"
        raise ValueError(f"{name}{line}: not valid YAML: {' '.join(problem.split())}") from None


def _yaml() -> Any:
    from ruamel.yaml import YAML

    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    return yaml


def dump_json(document: Any, *, indent: int | None = 2) -> str:
    """Format a document as JSON; letters of all scripts stay readable, dates and paths become text, NaN null."""
    style: dict[str, Any] = {"indent": indent, "ensure_ascii": False, "default": str}
    try:
        return json.dumps(document, allow_nan=False, **style)
    except ValueError:  # JSON has no number for infinities and NaN
        return json.dumps(json.loads(json.dumps(document, **style), parse_constant=lambda constant: None), **style)


def as_read_back(document: Any) -> Any:
    """Convert a document to the form that `read_object` would return: tuples are lists, keys are texts."""
    return json.loads(dump_json(document))


def dump_yaml(document: Any) -> str:
    """Format a document as YAML, keys in the order given."""
    buffer = io.StringIO()
    _yaml().dump(document, buffer)
    return buffer.getvalue()


def write_json(path: Path, document: Any, *, indent: int | None = 2, mode: int = SHARED) -> None:
    """Write a JSON document whole, or not at all."""
    write_atomic(path, dump_json(document, indent=indent) + "\n", mode=mode)


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], *, mode: int = SHARED) -> None:
    """Write all rows, or none; they are not held in memory."""
    with replacing(path, mode=mode) as temporary, temporary.open("w", encoding="utf-8", newline="\n") as handle:
        handle.writelines(dump_json(row, indent=None) + "\n" for row in rows)


def append_jsonl(path: Path, *rows: Mapping[str, Any]) -> None:
    """Append rows to a private file by `append_flushed`. Raises OSError."""
    append_flushed(path, "".join([dump_json(row, indent=None) + "\n" for row in rows]).encode())


class Journal:
    """Finished items of a long step, one JSON object a line, safe against a kill at any moment.

    Each line is on the disk before `add` returns. A torn last line, the mark of a kill, is dropped on opening; a later
    line with the same `key` replaces an earlier one.

    Example:
        journal = Journal(out / "results.jsonl")
        for item in items:
            if item.key not in journal:
                journal.add({"key": item.key, "score": measure(item)})
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        make_folder(path.parent)
        self.items = read_journal(path, mends=True)

    def __contains__(self, key: object) -> bool:
        return key in self.items

    def add(self, *items: JsonObject) -> None:
        """Append items, on the disk when this returns: one wait for all of them."""
        append_jsonl(self.path, *items)
        for item in items:
            self.items[item["key"]] = item


def read_journal(path: Path, *, mends: bool = False) -> dict[Any, JsonObject]:
    """Read a journal by `read_log`: an item's `key` → the item."""
    items: dict[Any, JsonObject] = {}

    def keep(row: JsonObject) -> None:
        if not isinstance(row.get("key"), str | int):
            raise ValueError("'key' must be a name or a number; delete the line to go on without it")
        items[row["key"]] = row

    read_log(path, keep, mends=mends)
    return items


def read_log(path: Path, parse: Callable[[JsonObject], Item], *, mends: bool = False) -> list[Item]:
    """Read the objects of a JSONL file that is appended to, each by `parse`; none without a file.

    A half-written last line, the mark of a kill or of another process at work, is passed over.

    Args:
        mends: cut that line off, to which the next one would be appended.
    """
    content = read_bytes(path, limit=MAX_BYTES) if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    items = _parsed_lines(_decoded(whole, path), path, parse)
    if mends and len(whole) < len(content):
        os.truncate(path, len(whole))
    return items
