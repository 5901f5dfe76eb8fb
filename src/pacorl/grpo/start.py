"""Starting point of a run by `--resume`. Imports no heavy module, so that a mistake is reported at once."""

from __future__ import annotations

import re
from pathlib import Path

from pacorl.io.files import check_no_run, numbered

Resume = bool | str | Path
"""False or "" for a new run, True or "auto" for the newest checkpoint if there is one, or a checkpoint's folder."""

SUMMARY = "summary.json"
"""File written at the end of a run."""
CHECKPOINT = re.compile(r"step-(\d{6,})")


def named_start(out: Path, resume: Resume) -> Path | None:
    """Find the checkpoint named by `resume`; None for the newest, or for a new run in `out`.

    Raises:
        ValueError: `out` holds a run but `resume` is false, or no checkpoint has the name.
    """
    folder = (out / "checkpoints").resolve()
    start = None if resume is True or str(resume) == "auto" or not resume else Path(str(resume)).resolve()
    if not resume or (start and start.parent != folder):
        check_no_run(out)
    if start and not (start / "state.json").is_file():
        names = ", ".join(path.name for path in checkpoints(folder))
        raise ValueError(f"--resume {resume} is not a checkpoint (no state.json); the run has {names or 'none'}")
    return start


def check_unfinished(out: Path) -> None:
    """Raise ValueError unless a folder is free for a new run or holds an unfinished run."""
    if (out / SUMMARY).exists():
        raise ValueError(f"{out} holds a finished run, which is not replaced; name another folder with out=…")
    begun = any((out / name).exists() for name in (".lock", "config.yaml"))
    if not begun and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} holds files that no run wrote; name another folder with out=…")


def free_folder(out: Path) -> Path:
    """Find the first of OUT, OUT-2, OUT-3 … that is free or holds an unfinished run."""
    for folder in numbered(out):
        try:
            check_unfinished(folder)
        except ValueError:
            continue
        return folder
    raise AssertionError("there is always a next number")


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, oldest first."""
    folders = [path for path in folder.glob("step-*") if CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in folders if (path / "state.json").exists()), key=step_of)


def step_of(path: Path) -> int:
    """Return the optimizer step of a checkpoint."""
    return int(path.name.removeprefix("step-"))  # as text "step-1000000" would sort before "step-999999"
