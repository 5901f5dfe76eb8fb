"""One record out of a T2IS file, by its `idx` or its line."""

from __future__ import annotations

from pathlib import Path

from pacorl.data.records import load_prompts
from pacorl.io.documents import read_jsonl, text_lines
from pacorl.types import Prompt


def find_record(address: str) -> Prompt:
    """The record of an address `FILE:ID`; the ID is its `idx`, else the number of its line, from 1.

    Raises:
        ValueError: if there is no such record; it names some that are there.
    """
    file, _, name = address.rpartition(":")
    if not file or not name:
        raise ValueError(f"{address!r} is not of the form FILE:ID, e.g. prompts.jsonl:0001")
    path = Path(file)
    prompts = load_prompts(path)
    names = _names(path)
    if name in names:
        return prompts[names.index(name)]
    if name.isascii() and name.isdigit() and 1 <= int(name) <= len(prompts):
        return prompts[int(name) - 1]
    first = ", ".join(filter(None, names[:5])) or "none"
    raise ValueError(
        f"{path} has no record {name!r}; the first of its {len(prompts)} are {first} (or give a line, from 1)"
    )


def _names(path: Path) -> list[str]:
    """The records' `idx`, empty for one without, in the order of `load_prompts`."""
    if path.suffix.lower() != ".jsonl":
        return [""] * sum(1 for _ in text_lines(path))
    return [str(record.get("idx", "")) for record in read_jsonl(path)]
