"""The manifest of a step, which proves that its work is done, and on which inputs.

A step is done if its manifest names the same inputs (by content), options and seed, and its outputs are unchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel

from pacorl.io.documents import JsonObject, as_read_back, blamed_on, read_object, typed, write_json
from pacorl.io.files import digest, sweep


class Manifest(BaseModel):
    """A step's finished work."""

    plan: JsonObject
    outputs: dict[str, str]
    """File → SHA-256."""
    counts: JsonObject


@dataclass(frozen=True, slots=True)
class DatasetStep:
    """One step's work on one dataset folder.

    Example:
        step = DatasetStep(folder, "pair", inputs=[folder / "prompts.jsonl"])
        if step.counts_if_done() is None:
            step.finish(outputs=[write_pairs()], counts={"pairs": 48})
    """

    folder: Path
    name: str
    inputs: Sequence[Path] = ()
    options: JsonObject = field(default_factory=dict)
    seed: int = 0

    @property
    def path(self) -> Path:
        return self.folder / "manifests" / f"{self.name}.json"

    def counts_if_done(self) -> JsonObject | None:
        """Counts of the finished step, or None if there is work to do."""
        last = self.last()
        if last is None or last.plan != self.plan():
            return None
        # Compare by content: a copied folder has new time stamps.
        for name, sha256 in last.outputs.items():
            path = self.folder / name
            if not path.is_file() or digest(path) != sha256:
                return None
        return last.counts

    def last(self) -> Manifest | None:
        """Manifest of the last finished work; None if there was none."""
        # A damaged manifest must not pass for unfinished work, which would be done over.
        if not self.path.is_file():
            return None
        with blamed_on(f"{self.path} is no manifest; delete it to do the step again"):
            return typed(read_object(self.path), Manifest)

    def finish(self, *, outputs: Sequence[Path], counts: JsonObject) -> JsonObject:
        """Write the manifest and return the counts."""
        # The last act of a step: a killed step has no new manifest, and runs again.
        digests = {self._name(path): digest(path) for path in outputs}
        write_json(self.path, {"step": self.name, "plan": self.plan(), "outputs": digests, "counts": counts})
        sweep(self.folder)
        return counts

    def plan(self) -> JsonObject:
        """Planned work of this step, in the form of the manifest."""
        plan = {
            "inputs": {self._name(path): digest(path) for path in self.inputs},
            "options": dict(self.options),
            "seed": self.seed,
        }
        # Compared with a stored manifest, in which tuples are lists.
        return dict(as_read_back(plan))

    def _name(self, path: Path) -> str:
        if path.is_relative_to(self.folder):
            return path.relative_to(self.folder).as_posix()
        return str(path)
