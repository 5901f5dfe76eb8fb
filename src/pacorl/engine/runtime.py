"""Processes and survival: accelerate's devices and ranks, gathering, checkpoints, signals."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CHECKPOINT = re.compile(r"step-(\d{6})")


class Interrupted(RuntimeError):
    """The run was asked to stop."""


class Runtime:
    """What a loop needs of the machine, whatever the number of processes."""

    def __init__(self) -> None:
        self.accelerator = Accelerator()
        self.stop_requested = False

    @property
    def device(self) -> torch.device:
        return torch.device(self.accelerator.device)

    @property
    def world(self) -> int:
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        return bool(self.accelerator.is_main_process)

    def gather_rows(self, rows: Mapping[int, Any]) -> dict[int, Any]:
        """Global row → value from every rank, on every rank, in the order of rows."""
        parts: list[dict[int, Any]] = gather_object([dict(rows)])
        return dict(sorted(item for part in parts for item in part.items()))

    def check_stop(self) -> None:
        """Raises Interrupted, on all ranks alike, where any of them was told to stop."""
        flag = torch.tensor([self.stop_requested], device=self.device, dtype=torch.int32)
        if self.accelerator.reduce(flag, "sum").item():
            raise Interrupted("told to stop")

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every rank."""
        return broadcast_object_list([value])[0]

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Within the block SIGTERM and SIGINT ask for a stop instead of dying; a second one kills."""

        def ask(number: int, frame: FrameType | None) -> None:
            if self.stop_requested:
                raise KeyboardInterrupt
            self.stop_requested = True

        before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


# --- checkpoints -----------------------------------------------------------------------------------------------


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    optimizer: dict[str, Any],
    state: dict[str, Any],
) -> Path:
    """Writes a checkpoint aside and renames it, so that one that exists is whole.

    Raises OSError with the fix where the disk is full; what was there stays as it was.
    """
    target, aside = folder / f"step-{step:06d}", folder / f".step-{step:06d}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for name, part in tensors.items():
            save_file({key: value.contiguous().cpu() for key, value in part.items()}, aside / f"{name}.safetensors")
        torch.save(optimizer, aside / "optimizer.pt")
        (aside / "state.json").write_text(json.dumps(state, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise OSError(
            error.errno,
            f"checkpoint {target} could not be written ({error.strerror}); earlier checkpoints are untouched, "
            "make room and resume",
        ) from error
    return target


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any], dict[str, Any]]:
    """(tensors by name, optimizer state, state) of a checkpoint.

    Raises ValueError where the folder is none.
    """
    if not (path / "state.json").exists():
        raise ValueError(f"{path} is not a checkpoint (no state.json)")
    tensors = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    optimizer = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True)
    return tensors, optimizer, json.loads((path / "state.json").read_text())


def checkpoints(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name))


def prune(folder: Path, *, keep: int) -> None:
    """Deletes all but the newest `keep`."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def all_finite(parameters: list[nn.Parameter]) -> bool:
    """Whether every gradient is finite."""
    return all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
