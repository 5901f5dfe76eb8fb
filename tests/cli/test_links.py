"""A file that a command writes is there already, and is a link, a pipe or a folder: nothing outside is written.

Each command runs once in an empty folder, which shows what it writes. Then something else stands in the place of one of
these files, before the command runs there for the first time, or again.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from stories import STORIES, draw_images
from toy_world import toy_world

from pacorl.cli import app, exit_code

COMMANDS = {
    "split": ["data", "tiny:train:40", "--out", "run", "--test", "10"],
    "check": STORIES["check"][0],
    "train-policy": STORIES["train-policy"][0],
}
SECRET = b"a key that no command may change\n"
KINDS = ("link", "copy", "dangling", "pipe", "folder", "temporary", "loop")


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.chdir(tmp_path)
    draw_images()
    with toy_world() if request.param == "train-policy" else contextlib.nullcontext():
        yield request.param


def run(command: str) -> int:
    return exit_code(lambda: app(COMMANDS[command], standalone_mode=False))


def plant(path: Path, kind: str, content: bytes) -> None:
    """Put a link, a pipe or a folder where a file is or will be; links lead to the folder `elsewhere`."""
    key = Path("elsewhere", "key").absolute()
    key.write_bytes(content if kind == "copy" else SECRET)
    if kind == "temporary":
        path = path.with_name(f".{path.name}.{platform.node()}-{os.getpid()}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
        (path / "kept.txt").write_bytes(SECRET)
    else:
        path.symlink_to({"dangling": key.with_name("new"), "loop": path}.get(kind, key))


def strangers() -> dict[str, tuple[int, bytes]]:
    """Mode and content of every file that is not the command's own."""
    files = [*Path("elsewhere").rglob("*"), *Path("run").rglob("kept.txt")]
    return {str(path): (path.stat().st_mode, path.read_bytes()) for path in files}


@pytest.mark.filterwarnings("ignore")
def test_no_command_writes_through_a_link(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 0
    Path("run").rename("done")
    # A hundred images count as one.
    files = {re.sub(r"\d+", "0", str(path)): path for path in sorted(Path("done").rglob("*")) if path.is_file()}
    draw = random.Random(3)
    for kind in KINDS:
        for folder in ("run", "elsewhere"):
            shutil.rmtree(folder, ignore_errors=True)
        Path("elsewhere").mkdir()
        if draw.random() < 0.5:  # again, in a folder of its own files
            shutil.copytree("done", "run")
        done = draw.choice(list(files.values()))
        plant(Path("run") / done.relative_to("done"), kind, done.read_bytes())
        before = strangers()
        capsys.readouterr()
        code, said = run(command), capsys.readouterr().err
        assert code == 0 or (code in (1, 2) and "run" in said), (kind, done, said)
        assert strangers() == before, (kind, done)
