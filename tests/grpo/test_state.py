"""What a run keeps, where it ends, and how it goes on."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from threading import Lock
from unittest.mock import Mock

import pytest
from tiny_runs import tiny_run, train_policy

from pacorl.grpo.start import CHECKPOINT, checkpoints
from pacorl.io.files import own_folder
from pacorl.report import page


class Disk:
    """What of a folder would be there after a power cut: flushed contents under flushed names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.contents, self.names, self.lost_at = folder, {}, {}, {}
        flush, rename, in_turn = os.fsync, Path.rename, Lock()

        def watched_flush(handle: int) -> None:
            with in_turn:  # images are written by threads: an older list of names must not replace a newer one
                flush(handle)
                status = os.fstat(handle)
                if stat.S_ISDIR(status.st_mode):
                    self.names[status.st_ino] = set(os.listdir(f"/proc/self/fd/{handle}"))
                else:
                    self.contents[status.st_ino] = (status.st_size, status.st_mtime_ns)

        def watched_rename(path: Path, target: Path) -> Path:
            if CHECKPOINT.fullmatch(target.name):
                # The name that the rename takes away need not be on the disk.
                self.lost_at[target.name] = [name for name in self.lost() if self.folder / name != path]
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", watched_flush)
        monkeypatch.setattr(Path, "rename", watched_rename)

    def lost(self) -> list[str]:
        """The files and folders that would be missing, or not what they are."""
        lost = []
        for path in self.folder.rglob("*"):
            status = path.stat()
            whole = path.is_dir() or self.contents.get(status.st_ino) == (status.st_size, status.st_mtime_ns)
            if not whole or path.name not in self.names.get(path.parent.stat().st_ino, ()):
                lost.append(path.relative_to(self.folder).as_posix())
        return [name for name in lost if name != ".lock"]


@pytest.mark.usefixtures("toy")
def test_a_power_cut_after_a_checkpoint_takes_nothing_that_it_counts(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_run([*small, "save_every=1", "trackers=[]"])
    disk = Disk(config.out, monkeypatch)
    train_policy(config)
    assert disk.lost_at == {path.name: [] for path in checkpoints(config.out / "checkpoints")}
    assert disk.lost() == []


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_a_resumed_run_says_what_changed_and_a_new_one_may_start_from_its_adapter(
    small: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_run(small)
    train_policy(config)
    longer = [*small, f"out={config.out}", f"epochs={config.epochs + 1}"]
    train_policy(tiny_run(longer), resume=True)
    assert f"epochs was {config.epochs} and is now {config.epochs + 1}" in caplog.text
    start = f"adapter.start={config.out / 'adapter'}"
    train_policy(tiny_run([*small, f"out={config.out}-2", "optimizer.lr=0.5", "epochs=1", start]))


def test_a_run_that_is_being_written_is_left_alone(small: list[str]) -> None:
    config = tiny_run(small)
    with own_folder(config.out), pytest.raises(ValueError, match=rf"is being written by process {os.getpid()} on "):
        train_policy(config, resume=True)


@pytest.mark.usefixtures("toy")
def test_a_page_that_cannot_be_built_does_not_end_the_run(
    small: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page, "write_report", Mock(side_effect=OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING):
        out = train_policy(tiny_run(small))
    assert sum("report.html was not built" in message for message in caplog.messages) == 2
    assert (out / "adapter" / "adapter_model.safetensors").exists()
