"""Records of a run in its folder: metrics.jsonl, images, curves of trackers; and its progress in the terminal."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.config.base import dump
from pacorl.config.public import public
from pacorl.core.metric_names import SECONDS
from pacorl.io.documents import JsonObject, append_jsonl, parse_object, read_jsonl, read_text, write_jsonl
from pacorl.io.files import PRIVATE, disk_errors, make_folder, write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.terminal import printable

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from PIL.Image import Image

logger = logging.getLogger(__name__)

LOG = "metrics.jsonl"
"""Name of the log in a run's folder."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Output of a finished training; `pacorl report FOLDER` writes its page."""

    folder: Path
    """The run's folder."""
    metrics: JsonObject
    """Line of the last evaluation in metrics.jsonl: `kind`, `epoch`, `step`, and a number per metric, None if it was
    not finite."""
    before: JsonObject
    """Line of the first evaluation, before training, in the same form."""
    history: Sequence[JsonObject] = field(repr=False)
    """All lines of metrics.jsonl in their order; `kind` is `epoch` or `evaluation`."""

    @classmethod
    def of(cls, folder: Path) -> TrainResult:
        """Read the result of a run's folder."""
        history = log_lines(folder)
        evaluations = [line for line in history if line["kind"] == "evaluation"]
        return cls(folder, evaluations[-1], evaluations[0], history)

    @property
    def adapter(self) -> Path:
        """Folder of the trained LoRA, for `Generator.from_pretrained(…, adapter=…)`, diffusers and PEFT."""
        return self.folder / "adapter"


def log_lines(folder: Path) -> list[JsonObject]:
    """Read the lines of a run's metrics.jsonl; none if it has not begun."""
    return read_jsonl(folder / LOG) if (folder / LOG).exists() else []


class Logbook:
    """Writer of a run's records, on the main process only."""

    def __init__(self, config: Any, *, step: int = -1, epoch: float = math.inf, main: bool = True) -> None:
        """Open the log of a run, new or resumed, start its trackers, and write its config.

        Args:
            step: of the checkpoint that a run goes on from: later lines are written again. By default no line stays.
            epoch: of the checkpoint, to distinguish epochs that took no step.
            main: whether this is the main process; another one writes nothing.
        """
        self.folder: Path | None = config.out if main else None
        self._trackers: list[GeneralTracker] = []
        if not self.folder:
            return
        make_folder(self.folder)

        # Curves.
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        for name in config.trackers:
            # TensorBoard's name is its folder next to the log; a service's name is a project, and keys are masked.
            project, options = "pacorl", {"config": public(config.model_dump(mode="json"))}
            if name == "tensorboard":
                project, options = name, {"logging_dir": self.folder}
            self._trackers.append(LOGGER_TYPE_TO_CLASS[name](project, **options))
            self._trackers[-1].start()

        # The log up to the checkpoint. Not splitlines, which would cut at U+2028 within a reward's name.
        log = self.folder / LOG
        if log.exists():
            kept = []
            for line in read_text(log).split("\n"):
                with suppress(ValueError):  # cut short by a crash
                    record = parse_object(line)
                    if record["step"] <= step and record["epoch"] <= epoch:
                        kept.append(f"{line}\n")
            write_atomic(log, "".join(kept), mode=PRIVATE)
        write_atomic(self.folder / "config.yaml", dump(config), mode=PRIVATE)

    def write(self, kind: str, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Append one line, and log its values to the trackers; values that are not finite become null."""
        if not self.folder:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        # Nulls first: `finite` overwrites its names in place, which preserves the order of `values`.
        line = {"kind": kind, "epoch": epoch, "step": step, **dict.fromkeys(values), **finite}
        append_jsonl(self.folder / LOG, line)
        series = finite if kind == "epoch" else {f"{kind}/{name}": value for name, value in finite.items()}
        with disk_errors(self.folder):
            for tracker in self._trackers:
                tracker.log(series, step=step)

    def image(self, name: str, image: Image) -> None:
        """Write an image to samples/<name>.png."""
        if self.folder:
            write_atomic(self.folder / "samples" / f"{name}.png", png_bytes(image))

    def records(self, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Rewrite samples/<name>.jsonl."""
        if self.folder:
            write_jsonl(self.folder / "samples" / f"{name}.jsonl", lines, mode=PRIVATE)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()


class Progress:
    """Progress of a run, shown by the main process: lines of epochs, bars of phases on a terminal; and the seconds of
    the phases, the only metrics that differ between two equal runs."""

    def __init__(self, *, epochs: int, shown: bool = False) -> None:
        self.epochs = epochs
        self.shown = shown
        self._seconds: dict[str, float] = {}

    def say(self, text: str) -> None:
        """Write a line."""
        if self.shown:
            try:
                print(printable(text), flush=True)
            except OSError:
                self.shown = False  # a pipe whose reader is gone must not end a run

    def epoch(self, done: int, *, note: str = "") -> None:
        """Write that so many epochs are finished."""
        self.say(f"epoch {done} of {self.epochs}  {note}".rstrip())

    @contextmanager
    def phase(self, name: str, *, total: int) -> Iterator[Callable[[int], object]]:
        """Show a phase of `total` items during the block; call the yielded function with the number of finished items.

        A line names the phase the first time.
        """
        from tqdm import tqdm  # type: ignore[import-untyped]

        if name not in self._seconds:
            self.say(f"{name}: {total}")
        started = time.perf_counter()
        # None disables a bar away from a terminal.
        with tqdm(desc=name, total=total, leave=False, disable=None if self.shown else True) as bar:
            yield bar.update
        self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds to a phase."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def lap(self) -> dict[str, float]:
        """Return the seconds by phase as metrics, and reset them."""
        seconds = {f"{SECONDS}{phase}": total for phase, total in self._seconds.items() if total}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return seconds
