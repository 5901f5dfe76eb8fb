"""Files appear whole and on the disk, locks hold, and no name leaves its folder."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pacorl.io.documents import append_jsonl
from pacorl.io.files import (
    LockedError,
    check_digests,
    digests,
    inside,
    own_folder,
    replacing,
    safe_name,
    sole_holder,
    sweep,
    weight_write_errors,
    write_atomic,
)


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
    part = f".b.txt.{platform.node()}-{os.getpid()}.part"
    # The new folder's own name first, then content, name, and the name on the disk.
    assert events == [tmp_path.name, part, "rename", "set"]


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


def test_a_run_has_one_writer_who_is_named(tmp_path: Path) -> None:
    hold = HOLD.replace(
        "sole_holder(pathlib.Path(sys.argv[1]), note='process 7')", "own_folder(pathlib.Path(sys.argv[1]))"
    )
    hold = hold.replace("import sole_holder", "import own_folder")
    with subprocess.Popen(
        [sys.executable, "-c", hold, tmp_path / "run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout
        assert other.stdout.readline() == "held\n"
        fault = rf"run is being written by process {other.pid} on {platform.node()}; wait for its end or stop it"
        with pytest.raises(ValueError, match=fault), own_folder(tmp_path / "run"):
            pass
        other.kill()
    with own_folder(tmp_path / "run"):
        pass


def test_half_a_character_is_refused_by_the_name_of_its_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.txt cannot be written: .* half of a surrogate pair"):
        write_atomic(tmp_path / "a.txt", "\ud800")
    assert [*tmp_path.iterdir()] == []


def test_what_killed_processes_left_half_written_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    stays = [f".a.png.{platform.node()}-{os.getpid()}.part", f".a.png.elsewhere-{gone.pid}.part", "a.part", "a.png"]
    (tmp_path / "deep").mkdir()
    for name in [f".a.b.png.{platform.node()}-{gone.pid}.part", *stays]:
        (tmp_path / "deep" / name).write_bytes(b"half")
    sweep(tmp_path)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == sorted(stays)


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as whole:
            write_atomic(tmp_path / "a.json", bytes(9000))
        with pytest.raises(OSError, match="File too large") as line:
            append_jsonl(tmp_path / "a.jsonl", {"text": "x" * 9000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [whole.value.filename, line.value.filename] == [str(tmp_path / "a.json"), str(tmp_path / "a.jsonl")]
    assert not (tmp_path / "a.json").exists()


def test_a_changed_or_missing_file_of_a_folder_is_named(tmp_path: Path) -> None:
    for name in ("a.bin", "deep/b.bin"):
        write_atomic(tmp_path / name, name)
    seen = digests(tmp_path)
    check_digests(tmp_path, seen)
    (tmp_path / "deep/b.bin").write_text("deep/B.bin")
    with pytest.raises(ValueError, match=r"deep/b\.bin is damaged"):
        check_digests(tmp_path, seen)
    (tmp_path / "deep/b.bin").unlink()
    with pytest.raises(ValueError, match=r"deep/b\.bin is missing"):
        check_digests(tmp_path, seen)


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a\\b", "ünder", "x" * 121, "..", "a\0b", "con:1"])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot name a folder"):
        safe_name(name)


@pytest.mark.parametrize("path", ["../up.png", "/etc/passwd", "a/../../up.png", "a\0b", "x" * 300, "a/" * 1500])
def test_paths_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    with pytest.raises(ValueError, match=r"leads out of|is not a path"):
        inside(tmp_path, path)


def test_links_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads out of"):
        inside(tmp_path / "set", "link.png")


def test_a_lock_without_room_for_its_note_names_itself(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as fault, sole_holder(tmp_path / ".lock", note="process 7"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fault.value.filename == str(tmp_path / ".lock")


def test_weights_on_a_full_disk_name_their_file(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    path = tmp_path / "a.safetensors"
    try:
        with pytest.raises(OSError, match="File too large") as fault, weight_write_errors(path):
            save_file({"a": torch.zeros(100)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert fault.value.filename == str(path)
