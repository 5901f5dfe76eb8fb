"""The trainer of the studio: at most one at a time, in a process of its own.

It can be stopped at any time, and goes on from its last checkpoint. It executes no file that a config names, since the
studio's folder may be somebody else's.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pacorl.config.user_files import NO_USER_FILES
from pacorl.io.children import start_python
from pacorl.io.files import check_no_link, open_regular, read_bytes
from pacorl.runtime.stopping import Interrupted
from pacorl.web.guard import RefusedError

PATIENCE = 10.0
"""Seconds for a stopping trainer to save; a kill afterwards loses what came after its last checkpoint."""
LOG = "log.txt"


class TrainerProcess:
    """Process of the run that trains, identified by its folder, whose `log.txt` has the output."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None
        self._announced: Path | None = None
        self._faults: dict[Path, str] = {}
        """Announced runs that could not be launched."""

    def announce(self, folder: Path) -> None:
        """Reserve the machine for a run whose launch waits for the studio's jobs."""
        self._faults.pop(folder, None)
        self._announced = folder

    @contextmanager
    def reservation(self) -> Iterator[None]:
        """End the reservation if the block raises: the machine would stay reserved for a run that never starts."""
        try:
            yield
        except Exception as error:
            if self._announced:
                self._faults[self._announced] = str(error)
            self._announced = None
            raise

    def launch(self, folder: Path, *command: str) -> None:
        """Start `pacorl COMMAND` for an announced run, or let it go on from its last checkpoint."""
        check_no_link(folder)
        # A killed studio cannot end its trainer, which therefore watches its standard input.
        arguments = ["-m", "pacorl", *command, "--resume", "auto", "--stop-with-stdin"]
        with self._lock, open(open_regular(folder / LOG, os.O_WRONLY | os.O_TRUNC), "wb") as log:
            if self._announced == folder:  # else it was stopped while it waited for the studio's jobs
                self._let_go()
                pipes: Any = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
                pipes["env"] = os.environ | {NO_USER_FILES: "1"}
                self._process = start_python(*arguments, **pipes)
                self._folder = folder
                self._announced = None  # last: a run that is neither announced nor running seems to be stopped

    @property
    def busy_with(self) -> str:
        """Name of the run that trains, or is about to; empty without one."""
        busy = self._announced or (self._folder if self._is_alive else None)
        return busy.name if busy else ""

    def check_idle(self) -> None:
        """Raise RefusedError while a trainer runs, or is about to."""
        name = self.busy_with
        if name:
            message = f"{name} is being taught and has the machine; stop it, it can go on later"
            raise RefusedError(message, status=409)

    @property
    def _is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def runs(self, folder: Path) -> bool:
        """Whether the run of this folder trains now."""
        return self._is_alive and self._folder == folder

    def waits(self, folder: Path) -> bool:
        """Whether the run of this folder is announced."""
        return self._announced == folder

    def fault(self, folder: Path) -> str:
        """Return the reason or the last line of a run that failed; empty for other runs."""
        if folder in self._faults:
            return self._faults[folder]
        # A negative code is a signal's, and ours.
        code = self._process.poll() if self._process and self._folder == folder else None
        if code is None or code <= 0 or code == Interrupted.exit_code:
            return ""
        lines = read_bytes(folder / LOG).decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("pacorl: ") if lines else "the trainer ended without a word"

    def stop(self) -> None:
        """End the trainer; its run can go on later."""
        with self._lock:
            self._announced = None
            if self._process and self._is_alive:
                self._process.terminate()
                try:
                    self._process.wait(PATIENCE)
                except subprocess.TimeoutExpired:  # it still loads, or learns
                    self._process.kill()
                    self._process.wait()
            self._let_go()

    def _let_go(self) -> None:
        """Close the pipe of an ended trainer."""
        if self._process and self._process.stdin:
            self._process.stdin.close()


def sample_image(run: Path, when: str, number: int) -> bytes | None:
    """Read an image of a run's first ("before") or newest evaluation; None if it is missing."""
    folders = sorted((run / "samples").glob("evaluation-*/"))
    path = folders[0 if when == "before" else -1] / f"{number:04d}.png" if folders else None
    return path.read_bytes() if path and path.is_file() else None


def lora_of(run: Path) -> Path | None:
    """Return the folder of a run's LoRA, the one with the lowest held-out loss if there is one; None without a LoRA."""
    for name in ("best", "adapter"):
        if (run / name).is_dir():
            return run / name
    return None


def loras_in(folder: Path) -> dict[str, str]:
    """Map the names of the LoRAs that were trained in the studio's folder to their folders."""
    found = {}
    for run in sorted(folder.glob("loras/*/run")):
        lora = lora_of(run)
        if lora:
            found[run.parent.relative_to(folder).as_posix()] = str(lora)
    return found
