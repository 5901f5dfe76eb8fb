"""Images from strangers, decoded in a process of its own: what a file does to a decoder, it does there.

    image = open_upload(data, name="cat.png", max_pixels=25_000_000)

One process takes one image at a time, under a limit of memory. If an image takes too long, or the process dies of it,
that image is refused, and the next one gets a new process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from typing import IO, Any

from PIL import Image

from pacorl.io.documents import parse_object
from pacorl.io.images import MAX_PIXELS, ImageError, open_image

MAX_SECONDS = 20.0
"""For one image; 64 million pixels of PNG take two."""
BASE_BYTES, BYTES_PER_PIXEL = 2**29, 16
"""Address space of the process without an image, and for each pixel that one may have: transparent images are four
buffers of four channels before they are three."""


def open_upload(data: bytes, *, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the content of a file as `open_image` does.

    Raises:
        ImageError: as `open_image`; also if decoding takes too much time or memory.
    """
    return _DECODER.open(data, name=name, max_pixels=max_pixels)


class _Decoder:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def open(self, data: bytes, *, name: str, max_pixels: int) -> Image.Image:
        with self._lock:
            process = self._running()
            alarm = threading.Timer(MAX_SECONDS, process.kill)
            alarm.start()
            try:
                answer, pixels = _asked(process, data, name=name, max_pixels=max_pixels)
            except (OSError, ValueError, EOFError):  # the process is gone, in the middle of whatever it said
                self.close()
                raise ImageError(f"{name}: decoding it takes too much time or memory; save it anew as PNG") from None
            finally:
                alarm.cancel()
        if "fault" in answer:
            raise ImageError(answer["fault"])
        return Image.frombytes("RGB", tuple(answer["size"]), pixels)

    def _running(self) -> subprocess.Popen[bytes]:
        # After a fork two processes would read each other's answers.
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            self.close()
            self._owner = os.getpid()
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from pacorl.io.decoder import serve; serve()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Ctrl-C reaches it too, and its traceback would say nothing
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        return self._process

    def close(self) -> None:
        """End the process, if it is this one's."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what a dead process did not read
                        pipe.close()


_DECODER = _Decoder()
atexit.register(_DECODER.close)


def _asked(process: subprocess.Popen[bytes], data: bytes, **question: Any) -> tuple[dict[str, Any], bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    _send(process.stdin, question, data)
    return _received(process.stdout)


# --- what the two processes say to each other: a line of JSON that has the length of what follows it --------------


def _send(pipe: IO[bytes], header: dict[str, Any], content: bytes) -> None:
    pipe.write(json.dumps({**header, "bytes": len(content)}).encode() + b"\n")
    pipe.write(content)
    pipe.flush()


def _received(pipe: IO[bytes]) -> tuple[dict[str, Any], bytes]:
    line = pipe.readline()
    if not line:
        raise EOFError
    header = parse_object(line)
    content = pipe.read(header["bytes"])
    if len(content) < header["bytes"]:
        raise EOFError
    return header, content


def serve() -> None:
    """Decode what comes until the other process is gone."""
    while True:
        try:
            question, data = _received(sys.stdin.buffer)
        except EOFError:
            return
        _limit_memory(BASE_BYTES + BYTES_PER_PIXEL * question["max_pixels"])
        try:
            image = open_image(data, name=question["name"], max_pixels=question["max_pixels"])
        except ImageError as error:
            _send(sys.stdout.buffer, {"fault": str(error)}, b"")
        else:
            _send(sys.stdout.buffer, {"size": image.size}, image.tobytes())


def _limit_memory(most: int) -> None:
    try:
        import resource
    except ImportError:  # Windows
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
