"""Untrusted images, decoded in separate processes, so that a malicious file cannot harm this one.

    image = open_upload(data, name="cat.png", max_pixels=25_000_000, caller="192.0.2.7")

There are DECODERS processes (`io.decoder_process`), each with one image at a time. Images are refused if they take too
much CPU time or memory, and dead processes are replaced. Callers take turns, and a caller has one decoder at most, so a
caller's slow images delay no other caller's. Of a caller's images the smallest is next: many people can have one
address, and a small image waits for at most one large one.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import LifoQueue, SimpleQueue
from typing import IO, Any, cast

from PIL import Image

from pacorl.io.children import INHERITED, start_confined
from pacorl.io.decoder_process import receive, send
from pacorl.io.images import MAX_PIXELS, ImageError
from pacorl.types import Size

DECODERS = 2
MAX_CPU_SECONDS = 10
"""CPU time of one image, so that a busy machine refuses no honest one; 64 million pixels of PNG take two."""
MAX_SECONDS = 120.0
"""Wall time of one image, in case a process waits instead of computing."""


def open_upload(data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, caller: str = "") -> Image.Image:
    """Read the content of a file as `open_image` does; `caller` is as of `submit_upload`.

    Raises:
        ImageError: as `open_image`; also if decoding takes too much time or memory.
    """
    return submit_upload(data, name=name, max_pixels=max_pixels, caller=caller).result()


def submit_upload(
    data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, caller: str = "", resized: Size | None = None
) -> Future[Image.Image]:
    """Queue the content of a file for decoding, and return at once.

    Args:
        caller: Who sent it, for instance an address. Images of one caller are decoded one after the other.
        resized: Return the image in this size, by bicubic resampling; its sides are exchanged for an upright image.

    Returns:
        The image, or the error of `open_upload`. Cancelling before its turn skips the decoding.
    """
    job = _Job(name, max_pixels, data, resized)
    _DECODERS.submit(caller, job)
    return job.future


class _Decoders:
    """Processes, and the waiting images by caller."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, list[_Job]] = {}
        """Images of each caller with a turn or a decoder."""
        self._turns: SimpleQueue[str] = SimpleQueue()
        """Callers with a waiting image and no decoder, each once."""
        self.processes = [_Process() for _ in range(DECODERS)]
        # The last one used is the next one used: a second process starts only if two are needed.
        self._idle: LifoQueue[_Process] = LifoQueue()
        for process in self.processes:
            self._idle.put(process)
        self._has_threads = False

    def submit(self, caller: str, job: _Job) -> None:
        with self._lock:
            # With the first image, since most processes decode none.
            if not self._has_threads:
                self._has_threads = True
                for _ in self.processes:
                    threading.Thread(target=self._work, name="decoder", daemon=True).start()
            if caller not in self._waiting:
                self._turns.put(caller)
            self._waiting.setdefault(caller, []).append(job)

    def _work(self) -> None:
        """Decode the smallest image of each caller in turn, for ever."""
        while True:
            caller = self._turns.get()
            with self._lock:
                waiting = self._waiting[caller]
                # None is left if `close` has cancelled this caller's images.
                job = min(waiting, key=lambda job: job.max_pixels, default=None)
                if job is not None:
                    waiting.remove(job)
            process = self._idle.get()
            if job is not None:
                job.run(process)
            self._idle.put(process)
            # A caller with further images goes to the end of the queue.
            with self._lock:
                if waiting:
                    self._turns.put(caller)
                else:
                    del self._waiting[caller]

    def close(self) -> None:
        """End all processes, and start no other."""
        with self._lock:
            for waiting in self._waiting.values():
                for job in waiting:
                    job.future.cancel()
                waiting.clear()
        for process in self.processes:
            process.close()
        # Once more when idle, and held: a worker may have started its process anew meanwhile.
        for _ in self.processes:
            self._idle.get().close()


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A waiting image."""

    name: str
    max_pixels: int
    data: bytes
    resized: Size | None
    future: Future[Image.Image] = field(default_factory=Future)

    def run(self, process: _Process) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            image = process.open(self.data, name=self.name, max_pixels=self.max_pixels, resized=self.resized)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(image)


class _Process:
    """A decoding process, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def open(self, data: bytes, *, name: str, max_pixels: int, resized: Size | None) -> Image.Image:
        """Decode one image; raises ImageError."""
        process = self._running(name)
        question: dict[str, Any] = {"name": name, "max_pixels": max_pixels, "cpu_seconds": MAX_CPU_SECONDS}
        if resized is not None:
            question["resized"] = (resized.width, resized.height)
        alarm = threading.Timer(MAX_SECONDS, process.kill)
        alarm.start()
        try:
            send(cast(IO[bytes], process.stdin), question, data)
            answer, pixels = receive(cast(IO[bytes], process.stdout), most=3 * max_pixels)
            image = None if "fault" in answer else Image.frombytes("RGB", tuple(answer["size"]), pixels)
        except Exception:  # the process is gone, perhaps within a message, or an image has made it answer anything
            self.close()
            raise ImageError(f"{name}: decoding it takes too much time or memory; save it anew as PNG") from None
        finally:
            alarm.cancel()
        if image is None:
            raise ImageError(str(answer["fault"]))
        return image

    def _running(self, name: str) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = start_confined("pacorl.io.decoder_process:serve")
            try:
                receive(cast(IO[bytes], self._process.stdout))
            except (EOFError, ValueError):
                self.close()
                raise ImageError(
                    f"{name}: not decoded, since the decoder does not start; `python -I -c 'import PIL'` "
                    f"must work with {', '.join(INHERITED)} alone"
                ) from None
        return self._process

    def close(self) -> None:
        """End the process."""
        process = self._process
        self._process = None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # bytes that a dead process did not read
                    cast(IO[bytes], pipe).close()


_DECODERS = _Decoders()
_PARENTS: list[_Decoders] = []
"""Decoders of the processes that this one was forked from, held so that they are not closed here."""


def _after_fork() -> None:
    # Threads do not survive a fork, and two processes would read each other's answers.
    global _DECODERS  # noqa: PLW0603
    _PARENTS.append(_DECODERS)
    _DECODERS = _Decoders()


@atexit.register
def _close() -> None:
    _DECODERS.close()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
