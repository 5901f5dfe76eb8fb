"""Files appear whole and on the disk, locks hold, and no name leaves its folder."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pacorl.io.documents import Journal, append_jsonl
from pacorl.io.files import (
    PRIVATE,
    check_made,
    claim_folder,
    inside,
    own_folder,
    replacing,
    safe_name,
    sole_holder,
    sweep,
    weight_write_errors,
    write_atomic,
)


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
    # The new folder's own name first, then content, name, and the name on the disk.
    part = events.pop(1)
    assert re.fullmatch(rf"\.b\.txt\.{re.escape(platform.node())}-{os.getpid()}-[0-9a-f]{{8}}\.part", part)
    assert events == [tmp_path.name, "rename", "set"]


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
        with pytest.raises(ValueError, match="process 7"), sole_holder(lock):
            pass
        other.kill()
    with sole_holder(lock):
        pass


def test_what_killed_processes_left_half_written_is_swept(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    here, random = platform.node(), "0123abcd"
    stays = [f".a.png.{here}-{os.getpid()}-{random}.part", f".a.png.elsewhere-{gone.pid}-{random}.part"]
    stays += ["a.part", "a.png", f".a.png.{here}-{gone.pid}-notes.part"]
    (tmp_path / "deep").mkdir()
    for name in [f".a.b.png.{here}-{gone.pid}-{random}.part", *stays]:
        (tmp_path / "deep" / name).write_bytes(b"half")
    link, folder = f".link.{here}-{gone.pid}-{random}.part", f".folder.{here}-{gone.pid}-{random}.part"
    (tmp_path / "deep" / link).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "deep" / folder).mkdir()
    sweep(tmp_path)
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == sorted([*stays, link, folder])


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user, to which hostile names lead; it must stay as it is."""
    path = tmp_path / "key"
    path.write_text("secret\n")
    yield path
    assert path.read_text() == "secret\n"


def test_nothing_is_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / "run").mkdir()
    lock, log = tmp_path / "run" / ".lock", tmp_path / "run" / "metrics.jsonl"
    lock.symlink_to(victim)
    log.symlink_to(victim)
    with pytest.raises(OSError, match=r"\.lock"):
        own_folder(tmp_path / "run").__enter__()
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        append_jsonl(log, {"epoch": 1})


@pytest.fixture
def no_mask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_mask")
def test_files_are_for_their_owner_to_write_and_logs_to_read(tmp_path: Path) -> None:
    write_atomic(tmp_path / "deep" / "page.html", "x")
    write_atomic(tmp_path / "config.yaml", "x", mode=PRIVATE)
    append_jsonl(tmp_path / "metrics.jsonl", {})
    Journal(tmp_path / "journal.jsonl").add({"key": 1})
    with sole_holder(tmp_path / ".lock"):
        pass
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    private = dict.fromkeys(("config.yaml", "metrics.jsonl", "journal.jsonl", ".lock"), 0o600)
    assert modes == {"deep": 0o777, "page.html": 0o644} | private


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a\\b", "ünder", "x" * 121, "..", "a\0b", "con:1"])
def test_hostile_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name"):
        safe_name(name)


@pytest.mark.parametrize("path", ["../up", "/etc/passwd", "a/../../up", "link", "a\0b", "x" * 300, "a/" * 3000])
def test_paths_and_links_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"leads out of|is not a path"):
        inside(tmp_path / "set", path)


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


def test_only_own_folders_and_files_with_the_mark_are_written(tmp_path: Path) -> None:
    theirs, page = tmp_path / "theirs", tmp_path / "theirs" / "a.html"
    claim_folder(tmp_path / "new")
    write_atomic(tmp_path / "new" / "a.txt", "")
    claim_folder(tmp_path / "new")
    killed = tmp_path / "killed" / ".a.png.host-1-0123abcd.part"
    write_atomic(killed, "")
    claim_folder(killed.parent)
    check_made(page)
    write_atomic(page, '<a class="brand" href="#top">pacorl</a>')
    check_made(page)
    page.write_text("a page about pacorl")
    with pytest.raises(ValueError, match=r"a\.html was not made by pacorl"):
        check_made(page)
    with pytest.raises(ValueError, match="theirs holds files"):
        claim_folder(theirs)
