"""Records and displays of a run: metrics.jsonl, sample images, seconds, trackers' curves, progress bars."""

from __future__ import annotations

import logging
import math
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from pacorl.config.base import described, dump
from pacorl.config.public import public
from pacorl.io.documents import JsonObject, append_jsonl, dump_json, parse_object, read_jsonl, read_text, write_jsonl
from pacorl.io.files import PRIVATE, disk_errors, make_folder, write_atomic
from pacorl.io.images import png_bytes
from pacorl.io.terminal import print_line, printable
from pacorl.io.versions import install_command

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker
    from PIL.Image import Image

logger = logging.getLogger(__name__)

TIME = "seconds/"
"""Prefix of the only metrics that differ between two equal runs."""
PROJECT = "pacorl"
"""Project in the services, unless WANDB_PROJECT or SWANLAB_PROJECT is set."""
ID_FILE = "tracker_id"
# SwanLab accepts ids of this length only; W&B any.
ID_LETTERS = 21
EPOCH_LINES = 20
"""Fewest lines about epochs in the log of a whole run."""


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult:
    """Output of a finished training; `pacorl report FOLDER` writes its page."""

    folder: Path
    """The run's folder."""
    adapter: Path
    """Folder of the trained LoRA, for `Generator.from_pretrained(…, adapter=…)`, diffusers and PEFT."""
    metrics: JsonObject
    """Line of the last evaluation in metrics.jsonl: `kind`, `epoch`, `step`, and a number per metric, None if it was
    not finite."""
    before: JsonObject
    """Line of the first evaluation, before training, in the same form."""
    history: Sequence[JsonObject]
    """All lines of metrics.jsonl in their order; `kind` is `epoch` or `evaluation`."""

    @classmethod
    def of(cls, folder: Path, *, adapter: Path) -> TrainResult:
        """Read the result of a run's folder."""
        history = read_jsonl(folder / "metrics.jsonl")
        evaluations = [line for line in history if line["kind"] == "evaluation"]
        return cls(folder, adapter, evaluations[-1], evaluations[0], history)

    def __repr__(self) -> str:
        """Return each measure before and after, and the adapter."""
        lines = []
        for name, after in self.metrics.items():
            before = self.before.get(name)
            if isinstance(before, float) and isinstance(after, float) and "/" not in name:
                lines.append(f"{name}: {before:.3f} before, {after:.3f} after")
        return "\n".join([*lines, f"adapter: {self.adapter}"])


class Logbook:
    """Writer of a run's records, on the main process only (`folder=None` on other ranks)."""

    def __init__(
        self,
        folder: Path | None,
        *,
        trackers: Sequence[str] = (),
        axis: Literal["epoch", "step"] = "epoch",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            folder: folder of the run, created if missing.
            settings: config of the run, shown by the services with masked keys.

        Raises:
            ValueError: if a service rejects the run, without an account or network.
        """
        self.folder = folder
        self.axis = axis
        if folder:
            make_folder(folder)
        self._trackers = open_trackers(trackers, folder, settings or {}) if folder else []

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        axis: Literal["epoch", "step"],
        changes: Mapping[str, Sequence[Any]],
        epoch: int = 0,
        step: int = 0,
        lines: int | None = None,
        main: bool = True,
    ) -> Logbook:
        """Open the log of a run, new or resumed, and write its config.

        Args:
            lines: number of lines that stay, by default those up to `step`: what a stop left after the checkpoint is
                written again.
            main: whether this is the main process; another one writes nothing.
        """
        settings = config.model_dump(mode="json")
        book = cls(config.out if main else None, trackers=config.trackers, axis=axis, settings=settings)
        if lines is None:
            book.rewind(step)
        else:
            book.truncate(lines)
        book.note_changes(changes, epoch=epoch, step=step)
        if main:
            for change in described(changes):
                logger.warning("resumed with another setting: %s", change)
            write_atomic(config.out / "config.yaml", dump(config), mode=PRIVATE)
        return book

    def rewind(self, last: int) -> None:
        """Drop the lines after epoch (or step, by the axis) `last`: a resumed run writes them again."""
        self._rewrite([line for line in self._lines() if _position(line, self.axis) <= last])

    def truncate(self, count: int) -> None:
        """Drop all but the first `count` lines."""
        self._rewrite(self._lines()[:count])

    def count_lines(self) -> int:
        """Count the lines of metrics.jsonl."""
        return len(self._lines())

    def _lines(self) -> list[str]:
        path = self.folder / "metrics.jsonl" if self.folder else None
        # Not splitlines, which would cut at U+2028 within a reward's name.
        return [line for line in read_text(path).split("\n") if line] if path and path.exists() else []

    def _rewrite(self, lines: Sequence[str]) -> None:
        if self.folder and (self.folder / "metrics.jsonl").exists():
            write_atomic(self.folder / "metrics.jsonl", "".join(f"{line}\n" for line in lines), mode=PRIVATE)

    def write(self, kind: str, *, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Append one line, and log its values to the trackers; values that are not finite become null."""
        if not self.folder:
            return
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        # Nulls first: `finite` overwrites its names in place, which preserves the order of `values`.
        line = {"kind": kind, "epoch": epoch, "step": step, **dict.fromkeys(values), **finite}
        append_jsonl(self.folder / "metrics.jsonl", line)
        series = finite if kind == "epoch" else {f"{kind}/{name}": value for name, value in finite.items()}
        with disk_errors(self.folder):
            for tracker in self._trackers:
                tracker.log(series, step={"epoch": epoch, "step": step}[self.axis])

    def note_changes(self, changes: Mapping[str, Sequence[Any]], *, epoch: int, step: int) -> None:
        """Append one line of kind "changes": config key → earlier and new value."""
        line = {"kind": "changes", "epoch": epoch, "step": step, "changes": changes}
        # A second resume from the same step adds no line.
        if self.folder and changes and dump_json(line, indent=None) != next(iter(self._lines()[::-1]), ""):
            append_jsonl(self.folder / "metrics.jsonl", line)

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


def _position(line: str, axis: str) -> int:
    try:
        return int(parse_object(line)[axis])
    except ValueError:  # cut short by a crash: beyond every step, so it is dropped
        return 2**31


class PhaseClock:
    """Seconds by phase since the start, or since `lap`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def lap(self) -> dict[str, float]:
        """Return the seconds by phase as metrics, and begin anew."""
        seconds = {f"{TIME}{phase}": total for phase, total in self.seconds.items()}
        self.seconds.clear()
        return seconds


# --- trackers --------------------------------------------------------------------------------------------------


def open_trackers(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> list[GeneralTracker]:
    """Start accelerate's trackers of a run, whose files are in its folder.

    Raises:
        ValueError: if a service rejects the run, without an account or network.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # Services get a masked config, since they show it, and an id, so that a resumed run continues its curves.
    services = [name for name in names if name != "tensorboard"]
    shown = {"id": tracker_id(folder) if services else "", "resume": "allow", "config": public(settings)}
    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"logging_dir": folder},
        "wandb": {**shown, "name": folder.name, "dir": str(folder)},
        "swanlab": {**shown, "experiment_name": folder.name, "logdir": str(folder / "swanlog")},
    }
    trackers = []
    for name in names:
        project = name if name == "tensorboard" else os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
        tracker = LOGGER_TYPE_TO_CLASS[name](project, **options[name])
        try:
            tracker.start()
        except Exception as error:  # the services raise kinds of their own
            raise ValueError(
                f"trackers: {name} did not start ({error}); log in with `{name} login`, or set {name.upper()}_MODE="
                f"offline, or leave {name} out"
            ) from error
        trackers.append(tracker)
    return trackers


def check_trackers(names: Sequence[str]) -> None:
    """Check that trackers can start.

    Raises:
        ValueError: if the package of one is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ValueError(
                f"trackers: the package {name} is not installed; `{install_command('trackers')}`, or leave {name} out"
            )


def tracker_id(folder: Path) -> str:
    """Read or create a run's id for the services, stored in its folder, so that a resumed run continues its curves."""
    path = folder / ID_FILE
    if not path.exists():
        write_atomic(path, uuid.uuid4().hex[:ID_LETTERS] + "\n", mode=PRIVATE)
    return read_text(path).strip()


# --- progress --------------------------------------------------------------------------------------------------


class ProgressBars:
    """Progress of a run, shown by the main process. Use as a context manager.

    A terminal has bars of the epochs and of the phase that is going on. Elsewhere, in a log or a pipe, there is a line
    per stage and every few epochs.
    """

    def __init__(self, *, epochs: int, shown: bool) -> None:
        columns = (
            TextColumn("[bold]{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}", markup=False),
        )
        on_terminal = get_console().is_terminal
        self._progress = Progress(*columns, disable=not (shown and on_terminal))
        self._epochs = self._progress.add_task("epochs", total=epochs, note="")
        self._count = epochs
        self._is_log = shown and not on_terminal
        self._writes_lines = False
        self._begun: set[str] = set()
        """Phases that have had their line."""

    def __enter__(self) -> ProgressBars:
        self._progress.start()
        self._writes_lines = self._is_log
        return self

    def __exit__(self, *fault: object) -> None:
        self._progress.stop()
        self._writes_lines = False

    def say(self, text: str) -> None:
        """Write a line, above the bars of a terminal."""
        if self._progress.disable:
            self._write_line(text)
        else:
            self._progress.console.print(printable(text), markup=False, highlight=False)

    def epoch(self, done: int, *, note: str) -> None:
        """Show that so many epochs are finished."""
        self._progress.update(self._epochs, completed=done, note=printable(note))
        if done in {1, self._count} or done % max(1, self._count // EPOCH_LINES) == 0:
            self._write_line(f"epoch {done} of {self._count}  {note}".rstrip())

    @contextmanager
    def phase(self, name: str, *, total: int, stage: bool = False) -> Iterator[Callable[[int], None]]:
        """Show a phase during the block; call the yielded function with the number of finished items.

        Args:
            total: number of items.
            stage: log a line each time instead of the first time only.
        """
        if stage or name not in self._begun:
            self._begun.add(name)
            self._write_line(f"{name}: {total}")
        task = self._progress.add_task(name, total=total, note="")
        try:
            yield lambda count: self._progress.advance(task, count)
        finally:
            self._progress.remove_task(task)

    def _write_line(self, text: str) -> None:
        if not self._writes_lines:
            return
        try:
            print_line(text)
        except OSError:
            self._writes_lines = False  # a pipe whose reader is gone must not end a run
