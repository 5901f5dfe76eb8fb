"""Processes that die before a chosen change of the disk, by kill −9 or by a power cut.

A warm process has imported the heavy libraries and forks every run from there, so that a kill costs the run's own part
of a second. `interpose.c`, which is preloaded into it, calls a hook here before each change: an opening for writing, a
write, fsync, rename, unlink, mkdir, truncation. Linux with a C compiler only.

    with Forks("qa.campaign.stories", library=tmp_path / "interpose.so") as forks:
        whole = forks.run("train-policy", folder)               # whole.operations: what it did, in order
        forks.run("train-policy", other, Fault(at=17))          # killed before its 18th operation
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RUN = "run"
"""What every story calls its folder."""
AT_FDCWD = -100


AT_THE_END = sys.maxsize


@dataclass(frozen=True)
class Fault:
    """What happens to a process, and when."""

    at: int = -1
    """The operation before which it dies, counted from 0; −1 for none, AT_THE_END for a cut after the last."""
    written: float = 0.0
    """The share of a write that still reaches the file."""
    cut: int | None = None
    """The seed of a power cut: what was not flushed is lost, torn or there, as it falls; None for a kill."""
    full: bool = False
    """Whether it lives, and the disk is full from there on."""


NO_FAULT = Fault()


@dataclass(frozen=True)
class Outcome:
    """How a process ended."""

    code: int
    """Its exit code; −9 if it was killed."""
    operations: list[str] = field(default_factory=list)
    """What it did to the disk, if it came to its end."""
    output: str = ""


class Forks:
    """A warm process; use as a context manager."""

    def __init__(self, module: str, *, library: Path, paths: Sequence[Path] = ()) -> None:
        """
        Args:
            module: `run(story)` of it runs a story in the working folder, `warm()` imports what it takes.
            library: where the interposer is built.
            paths: further folders of modules.
        """
        compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
        command = [
            shutil.which(compiler) or "cc",
            "-O1",
            "-shared",
            "-fPIC",
            HERE / "interpose.c",
            "-o",
            library,
            "-ldl",
        ]
        subprocess.run(command, check=True)
        search = os.pathsep.join(map(str, [HERE, *paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
        self._process = subprocess.Popen(
            [sys.executable, __file__, module, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "LD_PRELOAD": str(library),
                "PYTHONPATH": search,
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "",
            },
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *fault: object) -> None:
        self._process.communicate()

    def run(self, story: str, folder: Path, fault: Fault = NO_FAULT) -> Outcome:
        """Run a story of the module in a fork of the warm process, with `folder` as its working folder."""
        folder.mkdir(parents=True, exist_ok=True)
        assert self._process.stdin
        assert self._process.stdout
        job = {"story": story, "folder": str(folder), "fault": asdict(fault)}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        outcome = Outcome(**json.loads(self._process.stdout.readline()))
        codes = {0} | ({1} if fault.full else {-signal.SIGKILL} if fault.at >= 0 else set())
        assert outcome.code in codes, outcome.output
        return outcome


# --- the warm process ------------------------------------------------------------------------------------------


def serve(module: str, library: str) -> None:
    """Run what standard input asks for, one at a time, each in a fork."""
    stories, replies = importlib.import_module(module), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    stories.warm()
    gc.freeze()  # a fork that collects would go through, and so copy, all of it
    for line in sys.stdin:
        job = json.loads(line)
        records = Path(f"{job['folder']}.records")
        process = os.fork()
        if not process:
            _child(stories, job, records, ctypes.CDLL(library))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        listing = records.with_suffix(".operations")
        operations = listing.read_text().splitlines() if listing.exists() else []
        output = records.read_text()[-4000:]
        for path in (records, listing):
            path.unlink(missing_ok=True)
        print(json.dumps(asdict(Outcome(code, operations, output))), file=replies, flush=True)


def _child(stories: Any, job: dict[str, Any], records: Path, library: ctypes.CDLL) -> None:
    code = 1
    try:
        output = os.open(records, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(job["folder"])
        watch = Watch(Path(job["folder"]), Fault(**job["fault"]))
        library.set_hook(watch.hook)
        stories.run(job["story"])
        if watch.disk and watch.fault.at == AT_THE_END:
            watch.disk.observe()
            watch.disk.cut(random.Random(watch.fault.cut))
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        library.set_hook(None)
        records.with_suffix(".operations").write_text("\n".join(watch.operations))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


DONE, LEFT_OUT, DISK_FULL = range(3)
"""Of a hook: what becomes of the change."""
HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_long)


class Watch:
    """Sees each change of a story's disk before it happens, and ends the process at the chosen one."""

    def __init__(self, folder: Path, fault: Fault) -> None:
        self.folder, self.fault = folder.resolve(), fault
        self.operations: list[str] = []
        self.disk = Disk(self.folder) if fault.cut is not None else None
        self.hook = HOOK(self._before)

    def _before(self, what: bytes, descriptor: int, path: bytes | None, content: int | None, count: int) -> int:
        try:
            target = _resolve(descriptor, path)
        except OSError:  # a descriptor that is none
            return DONE
        watched = target == self.folder or target.is_relative_to(self.folder / RUN)
        if not watched or _changes_nothing(what, target):
            return DONE
        if self.disk:
            self.disk.observe()
        if self.fault.full and len(self.operations) >= self.fault.at >= 0:
            return DISK_FULL if what in (b"write", b"pwrite", b"mkdir") else DONE
        if len(self.operations) == self.fault.at:
            if self.fault.written and content:
                os.write(descriptor, ctypes.string_at(content, int(self.fault.written * count)))
            if self.disk:
                self.disk.cut(random.Random(self.fault.cut))
            os.kill(os.getpid(), signal.SIGKILL)
        if self.disk and what in (b"fsync", b"sync"):
            everything = [*self.disk.contents, *self.disk.listings]
            for number in [os.fstat(descriptor).st_ino] if what == b"fsync" else everything:
                self.disk.flush(number)
        self.operations.append(f"{what.decode()} {target.relative_to(self.folder)}")
        # A kill loses nothing that the kernel has, and a cut is made here: neither needs the disk's own time.
        return LEFT_OUT if what in (b"fsync", b"sync") else DONE


def _changes_nothing(what: bytes, target: Path) -> bool:
    """Whether a folder is there already, or a file is gone, which callers try and pass over."""
    return (what == b"mkdir" and target.exists()) or (what in (b"unlink", b"rmdir") and not target.exists())


def _resolve(descriptor: int, path: bytes | None) -> Path:
    if path is None:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    base = os.getcwd() if descriptor == AT_FDCWD else os.readlink(f"/proc/self/fd/{descriptor}")
    return Path(os.path.normpath(os.path.join(base, os.fsdecode(path))))


class Disk:
    """What of a folder a power cut may leave.

    A file's content is one that it has had since its last fsync, or half of one, or one whose end is zeros, since a
    size may reach the disk before the bytes do. A folder's names are those that it has had at one moment since its own
    last fsync. Files and folders fall independently of each other, which is more than a journal allows: a run that
    survives this survives every order in which a file system may write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.contents: dict[int, list[bytes]] = {}
        self.listings: dict[int, list[dict[str, int]]] = {}
        self.stamps: dict[int, tuple[int, int]] = {}
        self._held: list[int] = []  # descriptors, so that no number of a deleted file is given to a new one
        self.observe()
        for number in [*self.contents, *self.listings]:
            self.flush(number)

    def observe(self) -> None:
        """Note what has changed."""
        for folder, _, files in os.walk(self.root):
            status = os.stat(folder)
            if status.st_ino not in self.listings:
                self._hold(folder)
            entries = {entry.name: entry.inode() for entry in os.scandir(folder)}
            listings = self.listings.setdefault(status.st_ino, [{}])
            if listings[-1] != entries:
                listings.append(entries)
            for name in files:
                self._observe_file(os.path.join(folder, name))

    def _observe_file(self, path: str) -> None:
        status = os.stat(path)
        if self.stamps.get(status.st_ino) == (status.st_size, status.st_mtime_ns):
            return
        if status.st_ino not in self.contents:
            self._hold(path)
        self.stamps[status.st_ino] = (status.st_size, status.st_mtime_ns)
        self.contents.setdefault(status.st_ino, [b""]).append(Path(path).read_bytes())

    def _hold(self, path: str) -> None:
        self._held.append(os.open(path, os.O_RDONLY))

    def flush(self, number: int) -> None:
        """An fsync: of a file or a folder only the newest state counts from here on."""
        for states in (self.contents, self.listings):
            if number in states:
                states[number] = states[number][-1:]

    def cut(self, draw: random.Random) -> None:
        """Replace the folder by what is left of it."""
        left = self.root.with_name(f"{self.root.name}.left")
        shutil.rmtree(left, ignore_errors=True)
        self._write(self.root.stat().st_ino, left, draw)
        shutil.rmtree(self.root)
        left.rename(self.root)

    def _write(self, number: int, path: Path, draw: random.Random) -> None:
        if number in self.contents:
            path.write_bytes(_torn(self.contents[number], draw))
            return
        path.mkdir()
        for name, entry in draw.choice(self.listings[number]).items():
            self._write(entry, path / name, draw)


def _torn(contents: list[bytes], draw: random.Random) -> bytes:
    content = draw.choice(contents)
    if len(contents) == 1 or draw.random() < 0.5:
        return content
    half = content[: draw.randrange(len(content) + 1)]
    return half if draw.random() < 0.5 else half.ljust(len(content), b"\0")


if __name__ == "__main__":
    serve(*sys.argv[1:])
