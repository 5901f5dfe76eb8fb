"""Images from strangers: PNG, JPEG and WebP, decoded in one confined process.

    size = upload_size(data, name="cat.png")
    image = submit_upload(data, name="cat.png", max_pixels=25_000_000).result()

Pixels do not bound a decoder's time: a repeated scan of a JPEG takes 95 bytes and decodes the whole image once more. So
the process decodes one image at a time, under limits of memory and CPU time. It is isolated from the environment, and
started again when it is gone.
"""

from __future__ import annotations

import atexit
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, cast

from PIL import Image

from pacorl.io.children import end_with_parent, start_python
from pacorl.io.images import MAX_PIXELS, ImageError, decoder_errors, open_image
from pacorl.types import Size

MAX_CPU_SECONDS = 10
"""CPU time of one image, so that a busy machine refuses no honest one; 64 million pixels of PNG take two."""
MAX_SECONDS = 120.0
"""Wall time of one image, in case the process waits instead of computing."""
BASE_BYTES = 2**29
"""Address space of the process without an image."""
BYTES_PER_PIXEL = 16
"""Address space per permitted pixel: transparent images are four buffers of four channels before they are three."""
LONGEST_LINE = 2**16
INHERITED = ("PATH", "LANG", "PYTHONPATH", "SYSTEMROOT" if sys.platform == "win32" else "LD_LIBRARY_PATH")
"""Environment variables of the process; some Python installations do not start without the last one."""


def upload_size(data: bytes, *, name: str = "the image") -> Size:
    """Read height and width as stored from a file's header.

    The header may contradict the pixels, so decode with `max_pixels` of this size. Pillow reads the chunks before the
    pixels in Python, so call it in a thread.

    Raises:
        ImageError: it is no PNG, JPEG or WebP, or is cut off before its size.
    """
    with decoder_errors(name, data, MAX_PIXELS), Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
        return Size(image.height, image.width)


# --- this side ---------------------------------------------------------------------------------------------------


def submit_upload(data: bytes, *, name: str, max_pixels: int = MAX_PIXELS) -> Future[Image.Image]:
    """Queue the content of a file for decoding, and return at once.

    Returns:
        The image as `open_image` reads it, or its ImageError; also one for an image of another format, or that takes
        too much time or memory. Cancelling before its turn skips the decoding.
    """
    return _QUEUE.submit(_DECODER.decode, data, name=name, max_pixels=max_pixels)


class _Decoder:
    """The decoding process, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes, *, name: str, max_pixels: int) -> Image.Image:
        """Decode one image; raises ImageError."""
        process = self._running()
        alarm = threading.Timer(MAX_SECONDS, process.kill)
        alarm.start()
        try:
            _send(cast(IO[bytes], process.stdin), {"name": name, "max_pixels": max_pixels}, data)
            answer, pixels = _receive(cast(IO[bytes], process.stdout), most=3 * max_pixels)
            image = None if "fault" in answer else Image.frombytes("RGB", tuple(answer["size"]), pixels)
        except Exception:  # the process is gone, perhaps within a message, or an image has made it answer anything
            self.close()
            raise ImageError(
                f"{name}: decoding it takes too much time or memory, or the decoder ended; save it anew as PNG"
            ) from None
        finally:
            alarm.cancel()
        if image is None:
            raise ImageError(str(answer["fault"]))
        return image

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = start_python(
                *("-m", "pacorl.io.uploads"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Ctrl-C reaches it too, and its traceback would be noise
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
            )
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


_QUEUE = ThreadPoolExecutor(1, thread_name_prefix="decoder")
_DECODER = _Decoder()
atexit.register(_DECODER.close)


# --- the process -------------------------------------------------------------------------------------------------


def serve() -> None:
    """Decode images from stdin until it is closed."""
    end_with_parent(signal.SIGKILL)
    _limit("RLIMIT_FSIZE", 0)
    _limit("RLIMIT_NPROC", 0)
    questions = sys.stdin.buffer
    answers = sys.stdout.buffer
    while True:
        try:
            question, data = _receive(questions)
        except EOFError:
            return
        name, max_pixels = question["name"], question["max_pixels"]
        _limit("RLIMIT_AS", BASE_BYTES + BYTES_PER_PIXEL * max_pixels)
        # The limit counts from the start of the process, in whole seconds.
        _limit("RLIMIT_CPU", math.ceil(time.process_time() + MAX_CPU_SECONDS))
        try:
            upload_size(data, name=name)
            image = open_image(data, name=name, max_pixels=max_pixels)
        except ImageError as error:
            _send(answers, {"fault": str(error)})
        else:
            _send(answers, {"size": image.size}, image.tobytes())


def _limit(resource_name: str, most: int) -> None:
    """Lower a resource limit of this process. Windows has none."""
    try:
        import resource
    except ImportError:
        return
    # The hard limit stays: another call may still choose a lower soft limit.
    kind = getattr(resource, resource_name)
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(pipe: IO[bytes], header: dict[str, Any], content: bytes = b"") -> None:
    """Write a message: a line of JSON with the length of the content that follows it."""
    pipe.write(json.dumps({**header, "bytes": len(content)}).encode() + b"\n")
    pipe.write(content)
    pipe.flush()


def _receive(pipe: IO[bytes], *, most: int = sys.maxsize) -> tuple[dict[str, Any], bytes]:
    """Read a message with a content of `most` bytes.

    Raises:
        EOFError: The other side has closed the pipe, perhaps within a message.
        ValueError: It is no message, or too long.
    """
    line = pipe.readline(LONGEST_LINE)
    if not line:
        raise EOFError
    header = json.loads(line)
    if not 0 <= header["bytes"] <= most:
        raise ValueError(f"a message of {header['bytes']} bytes")
    content = pipe.read(header["bytes"])
    if len(content) < header["bytes"]:
        raise EOFError
    return header, content


if __name__ == "__main__":
    serve()
