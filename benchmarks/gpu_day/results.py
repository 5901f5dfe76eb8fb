"""Records in a JSONL file that survives a kill at any moment. The standard library alone is imported here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FINISHED = ("done", "skipped")
"""Outcomes after which a part is not run again."""


class Results:
    """The JSONL file of a day. Several processes may append to it, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, on a line of its own, and sync it to disk."""
        with open(self.path, "a+b") as handle:
            handle.write(b"" if self._is_whole() else b"\n")
            handle.write(json.dumps(record).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())

    def _is_whole(self) -> bool:
        """Whether the last line is complete; a killed process may leave part of one."""
        content = self.path.read_bytes()
        return not content or content.endswith(b"\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """All complete records, in their order."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Part → its last outcome."""
        return {record["part"]: record for record in self.records() if "outcome" in record}

    def spent(self) -> float:
        """Seconds of all parts that have ended, whatever their outcome."""
        return sum(float(record["seconds"]) for record in self.records() if "outcome" in record)
