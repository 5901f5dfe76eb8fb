"""What every step of a dataset shares: a manifest that says whether its work is done, and files that are never torn.

A step is done when its manifest names the same inputs (by content), options and seed, and its outputs are still what
it wrote. Versions are recorded and not compared: a new release does not undo finished work.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pacorl.data.files import digest, write_atomic

Progress = Callable[[int, int], None]
"""Hears of (done, total)."""

RECORDED = ("pacorl", "numpy", "pillow", "torch", "transformers", "diffusers")


def silent(done: int, total: int) -> None:
    """Progress for those who do not watch."""


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


def versions() -> dict[str, str]:
    """The versions that a result may depend on."""
    found = {"python": platform.python_version()}
    for package in RECORDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a source tree, or an extra that is not installed
            found[package] = "not installed"
    return found
