"""What every step of a dataset shares: a manifest that says whether its work is done, and files that are never torn.

A step is done when its manifest names the same inputs (by content), options and seed, and its outputs are still what
it wrote. Versions are recorded and not compared: a new release does not undo finished work.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Progress = Callable[[int, int], None]
"""Hears of (done, total)."""

RECORDED = ("pacorl", "numpy", "pillow", "torch", "transformers", "diffusers")


def silent(done: int, total: int) -> None:
    """Progress for those who do not watch."""


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
        raise ValueError(f"{relative!r} leads out of {folder}; paths must stay inside the dataset's folder")
    return path


@dataclass(frozen=True, slots=True)
class Step:
    """One step's work on one dataset folder."""

    folder: Path
    name: str
    inputs: Sequence[Path] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    @property
    def path(self) -> Path:
        return self.folder / "manifests" / f"{self.name}.json"

    def counts_if_done(self) -> dict[str, Any] | None:
        """The counts of the finished step, or None where there is work to do."""
        if not self.path.is_file():
            return None
        known = json.loads(self.path.read_text(encoding="utf-8"))
        if known["plan"] != self._plan() or not self._outputs_stand(known["outputs"]):
            return None
        return dict(known["counts"])

    def finish(self, *, outputs: Sequence[Path], counts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the manifest; returns the counts."""
        manifest = {
            "step": self.name,
            "plan": self._plan(),
            "outputs": {self._name(path): digest(path) for path in outputs},
            "counts": dict(counts),
            "versions": versions(),
        }
        write_atomic(self.path, json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
        return dict(counts)

    def _plan(self) -> dict[str, Any]:
        plan = {
            "inputs": {self._name(path): digest(path) for path in self.inputs},
            "options": dict(self.options),
            "seed": self.seed,
        }
        return dict(json.loads(json.dumps(plan)))  # tuples become lists, as they do in the file

    def _outputs_stand(self, outputs: Mapping[str, str]) -> bool:
        paths = {self.folder / name: known for name, known in outputs.items()}
        return all(path.is_file() and digest(path) == known for path, known in paths.items())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix() if path.is_relative_to(self.folder) else str(path)


class Journal:
    """Finished items of a long step, one JSON object a line, safe against a kill at any moment.

    Each line is flushed to the disk before `add` returns. A torn last line, the mark of a kill, is dropped on opening;
    a later line with the same key replaces an earlier one.
    """

    def __init__(self, path: Path, *, key: str = "key") -> None:
        self.path, self._key = path, key
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self.items = {row[key]: row for row in read_jsonl(path)}

    def __contains__(self, key: object) -> bool:
        return key in self.items

    def add(self, item: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(item, ensure_ascii=False) + "\n")
            handle.flush()
            os.fsync(handle.fileno())
        self.items[item[self._key]] = item


def _drop_torn_line(path: Path) -> None:
    content = path.read_bytes() if path.is_file() else b""
    whole = content[: content.rfind(b"\n") + 1]
    if not path.is_file() or whole != content:
        write_atomic(path, whole)


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in RECORDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree, or an extra that is not installed
            found[package] = "not installed"
    return found
