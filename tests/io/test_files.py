"""Files appear whole and on the disk, locks hold, and no name leaves its folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacorl.io.files import LockedError, inside, replacing, safe_name, sole_holder, write_atomic


def test_atomic_write_leaves_no_parts(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a" / "b.txt", "x")
    write_atomic(tmp_path / "a" / "b.txt", "y")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]
    assert (tmp_path / "a" / "b.txt").read_text() == "y"


def test_content_is_on_the_disk_before_its_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append("rename"), replace(old, new)))
    monkeypatch.setattr(
        os, "fsync", lambda handle: (events.append(Path(f"/proc/self/fd/{handle}").readlink().name), fsync(handle))
    )
    write_atomic(tmp_path / "set" / "b.txt", "x")
    assert events == [f".b.txt.{os.getpid()}.part", "rename", "set"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_atomic(path, "old")

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("ne")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"


HOLD = "import sys, pathlib\nfrom pacorl.io.files import sole_holder\n"
HOLD += "with sole_holder(pathlib.Path(sys.argv[1]), note='process 7'): print('held', flush=True); sys.stdin.read()"


def test_a_lock_ends_with_its_process_and_names_its_holder(tmp_path: Path) -> None:
    lock = tmp_path / "set" / ".lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        with pytest.raises(LockedError) as fault, sole_holder(lock):
            pass
        assert fault.value.holder == "process 7"
        other.kill()
    with sole_holder(lock):
        pass


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a\\b", "ünder", "x" * 121, "..", "a\0b", "con:1"])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        safe_name(name)


@pytest.mark.parametrize("path", ["../up.png", "/etc/passwd", "a/../../up.png", "a\0b"])
def test_paths_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"leads out of|is not a path"):
        inside(tmp_path, path)


def test_links_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads out of"):
        inside(tmp_path / "set", "link.png")
