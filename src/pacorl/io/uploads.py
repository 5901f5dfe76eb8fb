"""Images from strangers: PNG, JPEG and WebP, measured by their headers and decoded in one confined process.

    size = upload_size(data, name="cat.png")
    image = open_upload(data, name="cat.png", max_pixels=25_000_000)

Pixels do not bound a decoder's time: a repeated scan of a JPEG takes 95 bytes and decodes the whole image once more,
and Pillow reads the chunks of a PNG in Python. So scans and chunks are counted first, with limits far above the numbers
of cameras and programs. The process decodes one image at a time, under limits of memory and CPU time. It is isolated
from the environment, and started again when it is gone.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import IO, Any, Literal, cast

from PIL import Image

from pacorl.io.children import end_with_parent, start_python
from pacorl.io.images import MAX_PIXELS, ImageError, open_image
from pacorl.types import Size

MAX_SCANS = 100
"""Scans of a JPEG; programs write about ten."""
MAX_BLOCKS = 500
"""Segments of a JPEG and chunks of a PNG besides the pixels; a colour profile has up to 255."""
MAX_PIXEL_CHUNKS = 2**17
"""Chunks of pixels of a PNG; the largest accepted file has half as many of libpng's usual 8 KiB."""
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


# --- headers -----------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"
JPEG = b"\xff\xd8\xff"
PNG_DATA = (b"IDAT", b"fdAT", b"fcTL")
"""Chunks of pixels; the last two are frames of an animation."""
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""In entropy-coded data, FF is followed by 00 or a restart marker (D0 to D7). FF may be repeated before a marker."""
SOI, EOI, SOS, TEM = 0xD8, 0xD9, 0xDA, 0x01
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
ARITHMETIC = range(0xC9, 0xCC)


def upload_size(data: bytes, *, name: str = "the image") -> Size:
    """Read height and width as stored from a file's first bytes, in microseconds.

    The header may contradict the pixels, so decode with `max_pixels` of this size.

    Raises:
        ImageError: it is no PNG, JPEG or WebP, or is cut off before its size.
    """
    sides = (0, 0)
    if data.startswith(PNG + b"\0\0\0\rIHDR"):
        sides = _number(data[16:20]), _number(data[20:24])
    elif data.startswith(JPEG):
        sides = _jpeg_sides(data)
    elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        sides = _webp_sides(data)
    if 0 in sides:
        raise ImageError(f"{name}: {'not a PNG, JPEG or WebP image' if data else 'empty'}")
    width, height = sides
    return Size(height, width)


def check_blocks(data: bytes, *, name: str = "the image") -> None:
    """Raise ImageError if decoding a file would take too long."""
    fault = ""
    if data.startswith(PNG):
        fault = _png_excess(data)
    elif data.startswith(JPEG):
        fault = _jpeg_excess(data)
    if fault:
        raise ImageError(f"{name}: {fault}; save it anew as PNG")


def _png_excess(data: bytes) -> str:
    pixel_chunks = others = 0
    position = len(PNG)
    while position + 8 <= len(data):
        name = data[position + 4 : position + 8]
        pixel_chunks += name in PNG_DATA
        others += name not in PNG_DATA
        if others > MAX_BLOCKS or pixel_chunks > MAX_PIXEL_CHUNKS:
            return f"has more than {MAX_PIXEL_CHUNKS:,} chunks of pixels, or {MAX_BLOCKS} others"
        if name == b"IEND":
            break
        position += 12 + _number(data[position : position + 4])
    return ""


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, position of the content, and the number of bytes skipped before the marker, as libjpeg finds them."""
    position = 2
    while (match := MARKER.search(data, position)) is not None:
        start = match.end()
        marker = data[start - 1]
        yield marker, start, match.start() - position
        position = start
        if marker not in (SOI, EOI, TEM):
            position += _number(data[start : start + 2])


def _jpeg_sides(data: bytes) -> tuple[int, int]:
    for count, (marker, start, skipped) in enumerate(_jpeg_segments(data)):
        if marker in FRAMES:
            return _number(data[start + 5 : start + 7]), _number(data[start + 3 : start + 5])
        if marker == SOS or count + skipped > MAX_BLOCKS:
            break
    return 0, 0


def _jpeg_excess(data: bytes) -> str:
    scans = blocks = 0
    for marker, _, skipped in _jpeg_segments(data):
        if marker == EOI and scans:
            break
        if marker in ARITHMETIC:  # scans of no bytes at all took 0.2 s each
            return "is coded arithmetically, which takes too long to decode"
        # Before the first scan, Pillow reads the bytes between the segments one by one.
        blocks += 1 if scans else 1 + skipped
        scans += marker == SOS
        if scans > MAX_SCANS or blocks - scans > MAX_BLOCKS:
            return f"has more than {MAX_SCANS} scans, or {MAX_BLOCKS} segments"
    return ""


def _webp_sides(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":
        return _number(data[24:27], "little") + 1, _number(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = _number(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return _number(data[26:28], "little") & 0x3FFF, _number(data[28:30], "little") & 0x3FFF
    return 0, 0


def _number(field: bytes, order: Literal["big", "little"] = "big") -> int:
    return int.from_bytes(field, order)


# --- this side ---------------------------------------------------------------------------------------------------


def open_upload(data: bytes, *, name: str, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Read the content of a file as `open_image` does.

    Raises:
        ImageError: as `open_image`; also if it has another format, or decoding takes too much time or memory.
    """
    return submit_upload(data, name=name, max_pixels=max_pixels).result()


def submit_upload(
    data: bytes, *, name: str, max_pixels: int = MAX_PIXELS, resized: Size | None = None
) -> Future[Image.Image]:
    """Queue the content of a file for decoding, and return at once.

    Args:
        resized: Return the image in this size, by bicubic resampling; its sides are exchanged for an upright image.

    Returns:
        The image, or the error of `open_upload`. Cancelling before its turn skips the decoding.
    """
    return _QUEUE.submit(_DECODER.decode, data, name=name, max_pixels=max_pixels, resized=resized)


class _Decoder:
    """The decoding process, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes, *, name: str, max_pixels: int, resized: Size | None) -> Image.Image:
        """Decode one image; raises ImageError."""
        process = self._running(name)
        question: dict[str, Any] = {"name": name, "max_pixels": max_pixels}
        if resized is not None:
            question["resized"] = (resized.width, resized.height)
        alarm = threading.Timer(MAX_SECONDS, process.kill)
        alarm.start()
        try:
            _send(cast(IO[bytes], process.stdin), question, data)
            answer, pixels = _receive(cast(IO[bytes], process.stdout), most=3 * max_pixels)
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
            self._process = start_python(
                *("-m", "pacorl.io.uploads"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # Ctrl-C reaches it too, and its traceback would be noise
                env={name: os.environ[name] for name in INHERITED if name in os.environ},
            )
            try:
                _receive(cast(IO[bytes], self._process.stdout))
            except (EOFError, ValueError):
                self.close()
                raise ImageError(
                    f"{name}: not decoded, since the decoder does not start; `python -P -m pacorl.io.uploads` "
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
    _send(answers, {"ready": True})
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
            check_blocks(data, name=name)
            image = open_image(data, name=name, max_pixels=max_pixels)
        except ImageError as error:
            _send(answers, {"fault": str(error)})
        else:
            if "resized" in question:
                # The size was computed from the file's header, and the image may have been turned since.
                width, height = question["resized"]
                if (image.width > image.height) != (width > height):
                    width, height = height, width
                image = image.resize((width, height), Image.Resampling.BICUBIC)
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
