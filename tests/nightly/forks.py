"""Runs that are killed, stopped or out of disk space before a chosen change of the disk.

A warm process has imported the heavy libraries and forks each run, so that a trial costs a run's own part of a second.
`interpose.c`, preloaded into it, calls `Watch` before each change. Linux with a C compiler only.

    with Forks(tmp_path) as forks:
        whole = forks.run("train-policy", folder)                   # whole.operations: its changes, in order
        forks.run("train-policy", other, at=17, how="SIGKILL")      # killed before the 18th
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
DONE, LEFT_OUT, DISK_FULL = range(3)
"""What a hook returns: what becomes of the change."""
HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_long)
AT_FDCWD = -100


@dataclass(frozen=True)
class Outcome:
    """How a run ended; with SIGSTOP `second` is how another ended that began in its folder meanwhile."""

    code: int
    operations: list[str]
    output: str
    second: dict[str, Any] | None = None


class Forks:
    """The warm process, as a context manager."""

    def __init__(self, scratch: Path) -> None:
        library = scratch / "interpose.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", HERE / "interpose.c", "-o", library, "-ldl"], check=True)
        search = [HERE.parents[1], HERE.parents[1] / "src", HERE.parent / "helpers"]
        self._process = subprocess.Popen(
            [sys.executable, __file__, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ
            | {"LD_PRELOAD": str(library), "PYTHONPATH": os.pathsep.join(map(str, search)), "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *fault: object) -> None:
        self._process.communicate()

    def run(self, story: str, folder: Path, *, at: int = -1, how: str = "", written: float = 0.0) -> Outcome:
        """Run a story in `folder`; before change `at` it gets the signal `how`, or the disk is "full" from there on.

        `written`: share of the write `at` that still reaches the file.
        """
        assert self._process.stdin
        assert self._process.stdout
        folder.mkdir(parents=True, exist_ok=True)
        job = {"story": story, "folder": str(folder), "at": at, "how": how, "written": written}
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return Outcome(**json.loads(self._process.stdout.readline()))


# --- the warm process -------------------------------------------------------------------------------------------


def serve(library: str) -> None:
    """Run what standard input asks for, one at a time, each in a fork."""
    import tempfile

    from stories import STORIES

    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for story in STORIES:  # imports, compiled templates
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run_story(story)
    gc.freeze()  # a fork that collects would go through, and so copy, all of it
    for line in sys.stdin:
        print(json.dumps(asdict(_forked(json.loads(line), library))), file=replies, flush=True)


def _forked(job: dict[str, Any], library: str, name: str = "first") -> Outcome:
    records = Path(f"{job['folder']}.{name}")
    process, second = os.fork(), None
    if not process:
        _child(job, records, ctypes.CDLL(library))
    _, status = os.waitpid(process, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        second = asdict(_forked({**job, "at": -1}, library, "second"))
        os.kill(process, signal.SIGCONT)
        _, status = os.waitpid(process, 0)
    listing = records.with_suffix(f".{name}-operations")
    operations = listing.read_text().splitlines() if listing.exists() else []
    return Outcome(os.waitstatus_to_exitcode(status), operations, records.read_text()[-4000:], second)


def _child(job: dict[str, Any], records: Path, library: ctypes.CDLL) -> None:
    code = 1
    watch = Watch(job)
    try:
        output = os.open(records, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(job["folder"])
        library.set_hook(watch.hook)
        run_story(job["story"])
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        library.set_hook(None)
        records.with_suffix(f"{records.suffix}-operations").write_text("\n".join(watch.operations))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Watch:
    """Sees each change of a run's folder before it happens, and acts at the chosen one."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.folder = job, Path(job["folder"]).resolve()
        self.operations: list[str] = []
        self.hook = HOOK(self._before)

    def _before(self, what: bytes, descriptor: int, path: bytes | None, content: int | None, count: int) -> int:
        try:
            target = _resolve(descriptor, path)
        except OSError:  # no descriptor of an open file
            return DONE
        is_noop = (what == b"mkdir" and target.exists()) or (what in (b"unlink", b"rmdir") and not target.exists())
        if is_noop or not target.is_relative_to(self.folder / "run"):
            return DONE
        at, how = len(self.operations), self.job["how"]
        self.operations.append(f"{what.decode()} {target.relative_to(self.folder)}")
        if how == "full" and at >= self.job["at"]:
            return DISK_FULL if what in (b"write", b"mkdir") else DONE
        if how and at == self.job["at"]:
            if self.job["written"] and content:
                os.write(descriptor, ctypes.string_at(content, int(self.job["written"] * count)))
            os.kill(os.getpid(), getattr(signal, how))
        return LEFT_OUT if what == b"fsync" else DONE  # a kill loses nothing that the kernel has


def _resolve(descriptor: int, path: bytes | None) -> Path:
    if path is None:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    base = os.getcwd() if descriptor == AT_FDCWD else os.readlink(f"/proc/self/fd/{descriptor}")
    return Path(os.path.normpath(os.path.join(base, os.fsdecode(path))))


def run_story(story: str) -> None:
    """Run the commands of a story in the working folder, up to one that fails."""
    import toy_world
    from stories import STORIES, draw_images

    from pacorl import cli

    draw_images()
    with toy_world.toy_world() if story == "train-policy" else bits_by_batch():
        for words in STORIES[story]:
            sys.argv = ["pacorl", *words]
            try:
                cli.main()
            except SystemExit as ended:
                if ended.code:
                    raise


def bits_by_batch() -> contextlib.AbstractContextManager[Any]:
    """Let a pixel of each image depend on its position in the batch and on its other seeds, as last bits may."""
    from pacorl.generate import generator

    def sampled(policy: Any, prompts: Sequence[Any], *, seeds: Sequence[int], **options: Any) -> list[Any]:
        images = sample(policy, prompts, seeds=seeds, **options)
        for position, image in enumerate(images):
            image.putpixel((0, 0), (sum(seeds) % 256, position, len(seeds)))
        return images

    sample = generator.sample_images
    return patch.object(generator, "sample_images", sampled)


if __name__ == "__main__":
    serve(sys.argv[1])
