"""A run's folder and its checkpoints. Imports no heavy module, so that a mistake is reported at once."""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

SUMMARY = "summary.json"
"""File written at the end of a run."""
CHECKPOINT = re.compile(r"step-(\d{6,})")


def check_unfinished(out: Path) -> None:
    """Raise ValueError unless a folder is free for a new run or holds an unfinished run."""
    if (out / SUMMARY).exists():
        raise ValueError(f"{out} holds a finished run, which is not replaced; name another folder with out=…")
    begun = (out / ".lock").exists() or (out / "config.yaml").exists()
    if not begun and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} holds files that no run wrote; name another folder with out=…")


def free_folder(out: Path) -> Path:
    """Find the first of OUT, OUT-2, OUT-3 … that is free or holds an unfinished run."""
    folder = out
    for number in count(2):
        try:
            check_unfinished(folder)
        except ValueError:
            folder = out.with_name(f"{out.name}-{number}")
        else:
            break
    return folder


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first."""
    folders = []
    for path in folder.glob("step-*"):
        if CHECKPOINT.fullmatch(path.name) and (path / "state.json").exists():
            folders.append(path)
    return sorted(folders, key=step_of)


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return int(path.name.removeprefix("step-"))  # as text "step-1000000" would sort before "step-999999"
