"""One record out of a T2IS file, by its `idx` or its line."""

from __future__ import annotations

from pathlib import Path

from pacorl.data.records import load_prompts
from pacorl.io.documents import read_jsonl, text_lines
from pacorl.types import Prompt


def find_record(named: str) -> Prompt:
    """`FILE:ID`, where ID is a record's `idx`, else the number of its line, from 1.

    Raises ValueError where there is no such record, naming some that are there.
    """
    name, colon, wanted = named.rpartition(":")
    if not colon or not name or not wanted:
        raise ValueError(f"{named!r} is not of the form FILE:ID, e.g. prompts.jsonl:0001")
    path = Path(name)
    prompts = load_prompts(path)
    names = _names(path)
    if wanted in names:
        return prompts[names.index(wanted)]
    if wanted.isascii() and wanted.isdigit() and 1 <= int(wanted) <= len(prompts):
        return prompts[int(wanted) - 1]
    told = ", ".join(name for name in names[:5] if name) or "none"
    raise ValueError(
        f"{path} has no record {wanted!r}; the first of its {len(prompts)} are {told} (or give a line, from 1)"
    )


def _names(path: Path) -> list[str]:
    """The records' `idx`, empty where one has none, in the order of `load_prompts`."""
    if path.suffix.lower() != ".jsonl":
        return [""] * sum(1 for _ in text_lines(path))
    return [str(record.get("idx", "")) for record in read_jsonl(path)]
