"""What every step of a dataset shares: a manifest that says whether its work is done, and files that are never torn.

A step is done when its manifest names the same inputs (by content), options and seed, and its outputs are still what
it wrote. Versions are recorded and not compared: a new release does not undo finished work.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pacorl.io.documents import as_read_back, read_json, write_json
from pacorl.io.files import digest

Progress = Callable[[int, int], None]
"""Hears of (done, total)."""

RECORDED = ("pacorl", "numpy", "pillow", "torch", "transformers", "diffusers")


def silent(done: int, total: int) -> None:
    """Progress for those who do not watch."""


@dataclass(frozen=True, slots=True)
class DatasetStep:
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
        known = self._known()
        if known is None or known["plan"] != self.plan() or not self._outputs_stand(known["outputs"]):
            return None
        return dict(known["counts"])

    def known_plan(self) -> dict[str, Any] | None:
        """What the step's last finished work was: inputs by SHA-256, options and seed; None where there was none."""
        known = self._known()
        return None if known is None else dict(known["plan"])

    def known_outputs(self) -> list[Path]:
        """The files that the step's last finished work wrote, whether they are still there or not."""
        known = self._known()
        return [] if known is None else [self.folder / name for name in known["outputs"]]

    def finish(self, *, outputs: Sequence[Path], counts: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the manifest; returns the counts."""
        manifest = {
            "step": self.name,
            "plan": self.plan(),
            "outputs": {self._name(path): digest(path) for path in outputs},
            "counts": dict(counts),
            "versions": versions(),
        }
        write_json(self.path, manifest)
        return dict(counts)

    def plan(self) -> dict[str, Any]:
        """What is wanted, in the form of the manifest."""
        plan = {
            "inputs": {self._name(path): digest(path) for path in self.inputs},
            "options": dict(self.options),
            "seed": self.seed,
        }
        return dict(as_read_back(plan))

    def _known(self) -> dict[str, Any] | None:
        """The manifest on the disk. Raises ValueError where it is none, naming the file."""
        if not self.path.is_file():
            return None
        try:
            found = read_json(self.path)
        except ValueError as error:
            raise ValueError(f"{self.path} is no manifest ({error}); delete it to do the step again") from None
        if not isinstance(found, dict) or not {"plan", "outputs", "counts"} <= found.keys():
            raise ValueError(f"{self.path} is no manifest; delete it to do the step again")
        return found

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
