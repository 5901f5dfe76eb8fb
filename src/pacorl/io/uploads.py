"""Images from strangers: PNG, JPEG and WebP, decoded in one confined process.

    image = submit_upload(data, name="cat.png", max_pixels=25_000_000).result()

Pixels do not bound a decoder's time: a repeated scan of a JPEG takes 95 bytes and decodes the whole image once more. So
the process decodes one image at a time, under limits of memory and CPU time. It is isolated from the environment, and
started again when it is gone.
"""

import atexit
import json
import math
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, cast

from PIL import Image

from pacorl.io.children import start_python
from pacorl.io.images import MAX_PIXELS, ImageError, open_image

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_CPU_SECONDS = 10
"""CPU time of one image, so that a busy machine refuses no honest one; 64 million pixels of PNG take two."""
BASE_BYTES = 2**29
"""Address space of the process without an image."""
BYTES_PER_PIXEL = 16
"""Address space per permitted pixel: transparent images are four buffers of four channels before they are three."""
INHERITED = ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH")
"""Environment variables of the process; some Python installations do not start without the last one."""


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
        self.process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes, *, name: str, max_pixels: int) -> Image.Image:
        """Decode one image; raises ImageError."""
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = start_python(
                *("-m", "pacorl.io.uploads"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Ctrl-C reaches it too, and its traceback would be noise
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
            )
        try:
            question = {"name": name, "max_pixels": max_pixels, "bytes": len(data)}
            _send(cast(IO[bytes], self.process.stdin), question, data)
            answers = cast(IO[bytes], self.process.stdout)
            answer = json.loads(answers.readline(2**16))
            if "fault" not in answer:
                width, height = answer["size"]
                if not 0 < width * height <= max_pixels:
                    raise ValueError(f"{width}x{height}")
                return Image.frombytes("RGB", (width, height), answers.read(3 * width * height))
        except Exception:  # the process is gone, perhaps within a message, or an image has made it answer anything
            self.close()
            raise ImageError(
                f"{name}: decoding it takes too much time or memory, or the decoder ended; save it anew as PNG"
            ) from None
        raise ImageError(str(answer["fault"]))

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            with suppress(OSError):  # bytes that a dead process did not read
                self.process.communicate()
            self.process = None


_QUEUE = ThreadPoolExecutor(1, thread_name_prefix="decoder")
_DECODER = _Decoder()
atexit.register(_DECODER.close)


def serve() -> None:
    """Decode images from stdin until it is closed, as it is when the parent is gone."""
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    while line := sys.stdin.buffer.readline():
        question = json.loads(line)
        data = sys.stdin.buffer.read(question["bytes"])
        _limit(resource.RLIMIT_AS, BASE_BYTES + BYTES_PER_PIXEL * question["max_pixels"])
        # The limit counts from the start of the process, in whole seconds.
        _limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + MAX_CPU_SECONDS))
        try:
            image = open_image(data, name=question["name"], max_pixels=question["max_pixels"], formats=FORMATS)
        except ImageError as error:
            _send(sys.stdout.buffer, {"fault": str(error)})
        else:
            _send(sys.stdout.buffer, {"size": image.size}, image.tobytes())


def _limit(kind: int, most: int) -> None:
    """Lower a soft limit of this process; the hard limit stays, since another call may choose a higher one."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _send(pipe: IO[bytes], header: dict[str, Any], content: bytes = b"") -> None:
    """Write a message: a line of JSON, then its content."""
    pipe.write(json.dumps(header).encode() + b"\n" + content)
    pipe.flush()


if __name__ == "__main__":
    serve()
