"""The process that decodes untrusted images: one after the other, each under limits of memory and CPU time.

It imports as little as it can. `io.decoder` starts it, and both sides speak by `send` and `receive`: a line of JSON,
which contains the length of the content that follows it.
"""

from __future__ import annotations

import json
import math
import sys
import time
from typing import IO, Any

from PIL.Image import Resampling

from pacorl.io.children import limit
from pacorl.io.images import ImageError, open_image

BASE_BYTES = 2**29
"""Address space of the process without an image."""
BYTES_PER_PIXEL = 16
"""Address space per permitted pixel: transparent images are four buffers of four channels before they are three."""
LONGEST_LINE = 2**16


def serve() -> None:
    """Decode images from stdin until it is closed."""
    questions = sys.stdin.buffer
    answers = sys.stdout.buffer
    send(answers, {"ready": True})
    while True:
        try:
            question, data = receive(questions)
        except EOFError:
            return
        limit("RLIMIT_AS", BASE_BYTES + BYTES_PER_PIXEL * question["max_pixels"])
        # The limit counts from the start of the process, in whole seconds.
        limit("RLIMIT_CPU", math.ceil(time.process_time() + question["cpu_seconds"]))
        try:
            image = open_image(data, name=question["name"], max_pixels=question["max_pixels"])
        except ImageError as error:
            send(answers, {"fault": str(error)})
        else:
            if "resized" in question:
                # The size was computed from the file's header, and the image may have been turned since.
                width, height = question["resized"]
                if (image.width > image.height) != (width > height):
                    width, height = height, width
                image = image.resize((width, height), Resampling.BICUBIC)
            send(answers, {"size": image.size}, image.tobytes())


def send(pipe: IO[bytes], header: dict[str, Any], content: bytes = b"") -> None:
    """Write one message."""
    pipe.write(json.dumps({**header, "bytes": len(content)}).encode() + b"\n")
    pipe.write(content)
    pipe.flush()


def receive(pipe: IO[bytes], *, most: int = sys.maxsize) -> tuple[dict[str, Any], bytes]:
    """Read one message.

    Args:
        most: Bytes of its content.

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
