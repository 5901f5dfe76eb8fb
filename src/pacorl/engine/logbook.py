"""What a run writes down: metrics.jsonl, sample pictures, and the curves of its trackers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pacorl.engine.trackers import start_trackers
from pacorl.io.documents import append_jsonl, parse_object, write_jsonl
from pacorl.io.files import write_atomic

if TYPE_CHECKING:
    from PIL.Image import Image

TIME = "seconds/"
"""Prefix of the only series that two equal runs may differ in."""


class Logbook:
    """A run's folder, written by the main process only (give `folder=None` on the others)."""

    def __init__(
        self,
        folder: Path | None,
        *,
        trackers: Sequence[str] = (),
        axis: Literal["epoch", "step"] = "epoch",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`trackers`: names of `engine.trackers`; `settings`: the run's config, which they show."""
        self.folder, self.axis = folder, axis
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        self._trackers = start_trackers(trackers, folder, settings=settings or {}) if folder else []

    def cut_back(self, last: int) -> None:
        """Forgets what was written after `last` epochs (steps, where those are the axis): a resumed run writes it
        again."""
        if not self.folder or not (self.folder / "metrics.jsonl").exists():
            return
        path = self.folder / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _place_of(line, self.axis) <= last]
        write_atomic(path, "".join(f"{line}\n" for line in kept))

    def lines(self) -> int:
        """How many lines metrics.jsonl has."""
        path = self.folder / "metrics.jsonl" if self.folder else None
        return len(path.read_text().splitlines()) if path and path.exists() else 0

    def cut_to(self, count: int) -> None:
        """Forgets all but the first `count` lines."""
        path = self.folder / "metrics.jsonl" if self.folder else None
        if path and path.exists():
            write_atomic(path, "".join(f"{line}\n" for line in path.read_text().splitlines()[:count]))

    def write(self, kind: str, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """One line: `kind` is "epoch" (or "train") or "evaluation"; `epoch` counts finished epochs.

        A value that is not finite is written as null.
        """
        if not self.folder:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        line = {"kind": kind, "epoch": epoch, "step": step, **dict.fromkeys(values), **finite}
        append_jsonl(self.folder / "metrics.jsonl", line)
        named = finite if kind == "epoch" else {f"{kind}/{name}": value for name, value in finite.items()}
        for tracker in self._trackers:
            tracker.log(named, step={"epoch": epoch, "step": step}[self.axis])

    def image(self, name: str, image: Image) -> None:
        """Keep an image as samples/<name>.png."""
        if self.folder:
            path = self.folder / "samples" / f"{name}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)

    def records(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Writes samples/<name>.jsonl anew."""
        if self.folder:
            path = self.folder / "samples" / f"{name}.jsonl"
            write_jsonl(path, lines)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def _place_of(line: str, axis: str) -> int:
    try:
        return int(parse_object(line)[axis])
    except ValueError:  # a line that a crash cut short
        return 2**31
