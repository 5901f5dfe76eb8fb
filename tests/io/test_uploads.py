"""Images from strangers are measured by their headers, and decoded elsewhere: the same image, the same refusals."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from pacorl.io import uploads
from pacorl.io.images import ImageError, open_image
from pacorl.io.uploads import (
    MAX_BLOCKS,
    MAX_PIXEL_CHUNKS,
    MAX_SCANS,
    check_blocks,
    open_upload,
    submit_upload,
    upload_size,
)
from pacorl.types import Size

MODES = {"PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"), "JPEG": ("L", "RGB", "CMYK"), "WEBP": ("RGB", "RGBA")}
SIDE = 24


def saved(kind: str, mode: str = "RGB", side: int = SIDE, **options: Any) -> bytes:
    image = Image.linear_gradient("L").resize((side + 8, side))
    buffer = io.BytesIO()
    image.convert(mode).save(buffer, format=kind, **options)
    return buffer.getvalue()


def chunk(name: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def png(*, before: bytes = b"", pixels: bytes = b"", after: bytes = b"") -> bytes:
    """A PNG with further chunks before, within and behind its pixels."""
    data = saved("PNG")
    start, end = data.index(b"IDAT") - 4, data.index(b"IEND") - 4
    return data[:start] + before + pixels + data[start:end] + after + data[end:]


def jpeg(*, front: bytes = b"", scans: int = 0, behind: bytes = b"", **options: Any) -> bytes:
    """A JPEG with further bytes behind its first marker, repetitions of its last scan, and bytes behind its end."""
    data = saved("JPEG", progressive=True, **options)
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:2] + front + data[2:-2] + last * scans + data[-2:] + behind


# --- headers -----------------------------------------------------------------------------------------------------

EXCESSIVE: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans": (lambda: jpeg(scans=MAX_SCANS), "more than 100 scans"),
    "arithmetic": (lambda: jpeg().replace(b"\xff\xc2", b"\xff\xca"), "is coded arithmetically"),
    "comments": (lambda: jpeg(front=b"\xff\xfe\0\2" * (MAX_BLOCKS + 1)), "500 segments"),
    "fill bytes": (lambda: jpeg(front=b"\xff" * (MAX_BLOCKS + 1)), "500 segments"),
    "zeros": (lambda: jpeg(front=b"\xff" + bytes(MAX_BLOCKS + 1)), "500 segments"),
    "restarts": (lambda: jpeg(front=b"\xff\xd0" * MAX_BLOCKS), "500 segments"),
    "ends": (lambda: jpeg(front=b"\xff\xd9" * (MAX_BLOCKS + 1)), "500 segments"),
    "chunks": (lambda: png(before=chunk(b"teSt") * MAX_BLOCKS), "500 others"),
    "chunks behind": (lambda: png(after=chunk(b"teSt") * MAX_BLOCKS), "500 others"),
    "pixels": (lambda: png(pixels=chunk(b"IDAT") * (MAX_PIXEL_CHUNKS + 1)), "more than 131,072 chunks of pixels"),
}


@pytest.mark.parametrize("name", EXCESSIVE)
def test_a_file_that_keeps_a_decoder_busy_is_refused(name: str) -> None:
    make, reason = EXCESSIVE[name]
    with pytest.raises(ImageError, match=f"^it: .*{reason}.*; save it anew as PNG$"):
        check_blocks(make(), name="it")


@pytest.mark.parametrize(
    "data",
    [
        jpeg(scans=MAX_SCANS - 20),
        # SOS within a segment, and behind the end, is none.
        jpeg(front=b"\xff\xe4\x01\x00" + b"\xff\xda" * 127),
        jpeg(behind=b"\xff\xda\0\2" * 200),
        saved("JPEG", restart_marker_blocks=1, side=200),
        jpeg(front=b"\xff\xe2\0\x14ICC_PROFILE\0\1\1zz\0\0" * 255),
        png(before=chunk(b"teSt") * (MAX_BLOCKS - 10)),
        png(pixels=chunk(b"IDAT") * 1000),
    ],
    ids=["scans", "SOS in a segment", "behind the end", "restarts", "profile", "PNG", "IDAT"],
)
def test_a_file_within_the_bounds_is_read(data: bytes) -> None:
    assert open_upload(data, name="a").width in (SIDE + 8, 208)


def test_the_walk_ends_in_every_damaged_file() -> None:
    draw = np.random.default_rng(0)
    for kind, modes in MODES.items():
        for mode in modes:
            whole = saved(kind, mode)
            for _ in range(50):
                data = bytearray(whole[: draw.integers(len(whole) + 1)])
                for position in draw.integers(len(data), size=5) if data else ():
                    data[position] = draw.integers(256)
                for read in (check_blocks, upload_size):
                    with contextlib.suppress(ImageError):
                        read(bytes(data))


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_the_size_is_the_decoded_one(kind: str, mode: str) -> None:
    assert upload_size(saved(kind, mode)) == Size(SIDE, SIDE + 8)


@pytest.mark.parametrize(
    ("data", "reason"),
    [(b"", "empty"), (b"text", "not a PNG"), (b"RIFFxxxxWEBP", "not a PNG"), (saved("GIF", "L"), "not a PNG, JPEG or")],
)
def test_another_format_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=f"^image 2: {reason}"):
        upload_size(data, name="image 2")
    with pytest.raises(ImageError, match=f"^image 2: {reason}"):
        open_upload(data, name="image 2")


# --- the process -------------------------------------------------------------------------------------------------


def child() -> subprocess.Popen[bytes]:
    """The process that decodes."""
    open_upload(saved("PNG"), name="a")
    assert uploads._DECODER._process is not None
    return uploads._DECODER._process


@pytest.fixture(autouse=True)
def fresh_decoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    decoder = uploads._Decoder()
    monkeypatch.setattr(uploads, "_DECODER", decoder)
    yield
    decoder.close()


def test_an_upload_is_the_image_that_a_file_is() -> None:
    data = saved("PNG", "RGBA", side=40)
    assert open_upload(data, name="a").tobytes() == open_image(data).tobytes()
    with pytest.raises(ImageError, match=r"^b: 48x40 is too large; an image may have 99 pixels"):
        open_upload(data, name="b", max_pixels=99)
    with pytest.raises(ImageError, match=r"^c: has more than 100 scans"):
        open_upload(jpeg(scans=MAX_SCANS), name="c")
    assert open_upload(data, name="d").size == (48, 40)


@pytest.mark.parametrize("quarter_turns", [False, True])
def test_an_image_is_resized_where_it_is_decoded(quarter_turns: bool) -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6 if quarter_turns else 1
    Image.linear_gradient("L").resize((60, 40)).save(buffer, format="PNG", exif=exif)
    whole = open_image(buffer.getvalue())

    small = submit_upload(buffer.getvalue(), name="a", resized=Size(height=20, width=30)).result(timeout=120)
    assert small.size == ((20, 30) if quarter_turns else (30, 20))
    assert small.tobytes() == whole.resize(small.size, Image.Resampling.BICUBIC).tobytes()


def test_the_process_is_another_one_and_a_dead_one_is_replaced() -> None:
    first = child()
    assert first.pid != os.getpid()
    first.kill()
    first.wait()
    assert child() != first


@pytest.mark.slow
def test_an_image_that_takes_too_much_cpu_time_is_refused_and_the_next_one_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of few blocks: 90 scans of 64 million pixels."""
    slow = jpeg(scans=90, side=7900)
    original = uploads.start_python

    def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
        code = "from pacorl.io import uploads; uploads.MAX_CPU_SECONDS = 0; uploads.serve()"
        return original("-c", code, **options)

    monkeypatch.setattr(uploads, "start_python", start)  # up to the process' next whole second
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(slow, name="slow")
    monkeypatch.undo()
    assert open_upload(saved("PNG"), name="a").size == (32, 24)


def test_a_process_that_waits_for_ever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child()
    monkeypatch.setattr(uploads, "MAX_SECONDS", 0.2)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(ImageError, match=r"^slow: decoding it takes too much time or memory"):
        open_upload(saved("PNG"), name="slow")


@pytest.mark.parametrize(
    "answer",
    ['{"size": [8, 8], "bytes": 1000000000000}', '{"size": [9, 9], "bytes": 0}', '{"bytes": 0}', "[]", "[" * 60_000],
)
def test_no_answer_of_a_taken_over_process_is_believed(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"import sys; print('{{\"bytes\": 0}}', flush=True); sys.stdin.buffer.readline(); print({answer!r})"
    original = uploads.start_python
    monkeypatch.setattr(uploads, "start_python", lambda *_, **options: original("-c", code, **options))
    with pytest.raises(ImageError, match=r"^a: decoding it takes too much time or memory"):
        open_upload(saved("PNG"), name="a")


def test_the_memory_is_bounded() -> None:
    pytest.importorskip("resource")
    code = "from pacorl.io.uploads import _limit; _limit('RLIMIT_AS', 2**29); bytes(2**29)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "MemoryError" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_inherits_no_key_and_ends_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    process = Path(f"/proc/{child().pid}")
    variables = {line.partition("=")[0] for line in (process / "environ").read_text().split("\0") if line}
    assert variables <= {*uploads.INHERITED}
    code = (
        "import io, os; from PIL import Image; from pacorl.io import uploads; b = io.BytesIO(); "
        "Image.new('L', (8, 8)).save(b, 'PNG'); uploads.open_upload(b.getvalue(), name='a'); "
        "print(uploads._DECODER._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gone = Path(f"/proc/{int(killed.stdout)}/stat")
    deadline = time.monotonic() + 60
    while gone.exists() and gone.read_text().rpartition(") ")[2][0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.05)
