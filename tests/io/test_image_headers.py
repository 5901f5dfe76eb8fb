"""Image files are walked before they are decoded: their size, and blocks that would only keep a decoder busy."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pacorl.io import image_headers
from pacorl.io.image_headers import MAX_BLOCKS, MAX_DATA_BLOCKS, MAX_PIXEL_CHUNKS, MAX_RUN_BYTES, MAX_SCANS, excess_of
from pacorl.io.images import ImageError, check_readable, image_size, open_image, png_texts, upright_size
from pacorl.types import Size

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("L", "P"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16"),
}
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


def gif(*, front: bytes = b"", after: bytes = b"") -> bytes:
    """A GIF with further blocks before and behind its frame."""
    data = saved("GIF", "L")
    start = 13 + (3 << (data[10] & 7) + 1)
    return data[:start] + front + data[start:-1] + after + data[-1:]


def tiff(*, tags: int = 0, values: int = 1, big: bool = False) -> bytes:
    """A TIFF, or BigTIFF, with further tags, the last of which has so many values."""
    width, height = SIDE + 8, SIDE
    entries = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 4, 1, 16), (277, 3, 1, 1), (278, 4, 1, height), (279, 4, 1, width * height)]
    entries += [(40_000 + number, 4, values if number == tags - 1 else 1, 1) for number in range(tags)]
    position = 16 + width * height
    form, count = ("<HHQQ", "<Q") if big else ("<HHII", "<H")
    head = b"II+\0\x08\0\0\0" + struct.pack("<Q", position) if big else b"II*\0" + struct.pack("<Ixxxxxxxx", position)
    directory = struct.pack(count, len(entries)) + b"".join(struct.pack(form, *entry) for entry in entries)
    return head + bytes(width * height) + directory + bytes(8)


def bmp(runs: bytes) -> bytes:
    """A BMP in run-length coding."""
    header = struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 54 + 1024, 40, SIDE + 8, SIDE, 1, 8, 1, 0, 0, 0, 0, 0)
    return b"BM" + header + bytes(1024) + runs


def arithmetic() -> bytes:
    """A JPEG whose frame is announced as coded arithmetically."""
    return jpeg().replace(b"\xff\xc2", b"\xff\xca")


EXCESSIVE: dict[str, tuple[Callable[[], bytes], str]] = {
    "scans": (lambda: jpeg(scans=MAX_SCANS), "more than 100 scans"),
    "arithmetic": (arithmetic, "is coded arithmetically"),
    "comments": (lambda: jpeg(front=b"\xff\xfe\0\2" * (MAX_BLOCKS + 1)), "more than 500 segments"),
    "tables": (lambda: jpeg(front=b"\xff\xdb\0\2" * (MAX_BLOCKS + 1)), "more than 500 segments"),
    "fill bytes": (lambda: jpeg(front=b"\xff" * (MAX_BLOCKS + 1)), "more than 500 segments"),
    "zeros": (lambda: jpeg(front=b"\xff" + bytes(MAX_BLOCKS + 1)), "more than 500 segments"),
    "restarts": (lambda: jpeg(front=b"\xff\xd0" * MAX_BLOCKS), "more than 500 segments"),
    "ends": (lambda: jpeg(front=b"\xff\xd9" * (MAX_BLOCKS + 1)), "more than 500 segments"),
    "chunks": (lambda: png(before=chunk(b"teSt") * MAX_BLOCKS), "more than 500 chunks"),
    "chunks behind": (lambda: png(after=chunk(b"teSt") * MAX_BLOCKS), "more than 500 chunks"),
    "profiles": (
        lambda: png(before=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1000))) * (MAX_BLOCKS + 1)),
        "more than 500 chunks",
    ),
    "pixels": (lambda: png(pixels=chunk(b"IDAT") * (MAX_PIXEL_CHUNKS + 1)), "more than 131,072 chunks of pixels"),
    "extensions": (lambda: gif(front=b"!\xf0\1x\0" * MAX_DATA_BLOCKS), "more than 1,048,576 blocks"),
    "comment": (lambda: gif(front=b"!\xfe" + b"\1x" * MAX_DATA_BLOCKS + b"\0"), "more than 1,048,576 blocks"),
    "no blocks": (lambda: gif(front=b"\1" * MAX_DATA_BLOCKS), "more than 1,048,576 blocks"),
    "behind the frame": (lambda: gif(after=b"!\xf0\1x\0" * MAX_DATA_BLOCKS), "more than 1,048,576 blocks"),
    "tags": (lambda: tiff(tags=MAX_BLOCKS), "more than 500 tags"),
    "tags of BigTIFF": (lambda: tiff(tags=MAX_BLOCKS, big=True), "more than 500 tags"),
    "values": (lambda: tiff(tags=1, values=MAX_DATA_BLOCKS + 1), "more than 1,048,576 values"),
    "runs": (lambda: bmp(b"\0\2\0\0" * (MAX_RUN_BYTES // 4)), "more than 4,194,304 bytes in run-length coding"),
}


@pytest.mark.parametrize("name", EXCESSIVE)
def test_a_file_that_keeps_a_decoder_busy_is_refused(name: str) -> None:
    make, reason = EXCESSIVE[name]
    with pytest.raises(ImageError, match=f"^it: .*{reason}.*; save it anew as PNG$"):
        open_image(make(), name="it")


def test_every_reader_of_files_refuses_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(scans=MAX_SCANS))
    with pytest.raises(ImageError, match=r"a\.jpg: has more than 100 scans"):
        open_image(path)
    with pytest.raises(ImageError, match=r"a\.jpg: has more than 100 scans"):
        upright_size(path)
    with pytest.raises(ImageError, match=r"a\.jpg: has more than 100 scans"):
        check_readable([path])
    path.write_bytes(png(before=chunk(b"tEXt", b"a\0b") * (MAX_BLOCKS + 1)))
    assert png_texts(path) == {}


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
        gif(front=b"!\xfe" + b"\1x" * 1000 + b"\0"),
        tiff(tags=100),
        tiff(big=True),
    ],
    ids=["scans", "SOS in a segment", "behind the end", "restarts", "profile", "PNG", "IDAT", "GIF", "TIFF", "BigTIFF"],
)
def test_a_file_within_the_bounds_is_read(data: bytes) -> None:
    assert open_image(data).width in (SIDE + 8, 208)


def test_the_walk_ends_in_every_damaged_file() -> None:
    draw = np.random.default_rng(0)
    for kind, modes in MODES.items():
        for mode in modes:
            whole = saved(kind, mode)
            for _ in range(50):
                data = bytearray(whole[: draw.integers(len(whole) + 1)])
                for position in draw.integers(len(data), size=5) if data else ():
                    data[position] = draw.integers(256)
                excess_of(bytes(data))
                image_headers.size_of(bytes(data))


# --- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in MODES.items() for mode in modes])
def test_the_size_is_the_decoded_one(kind: str, mode: str) -> None:
    assert image_size(saved(kind, mode)) == Size(SIDE, SIDE + 8)


@pytest.mark.parametrize(
    "data",
    [
        saved("WEBP", lossless=True),
        saved("WEBP", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\0"),
        saved("JPEG", progressive=True),
        saved("TIFF", compression="tiff_lzw"),
        saved("TIFF", big_tiff=True),
        tiff(),
        tiff(big=True),
        bmp(b"\0\1"),
        b"BM" + struct.pack("<IHHI", 0, 0, 0, 26) + struct.pack("<IHHHH", 12, SIDE + 8, SIDE, 1, 24),
        b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + struct.pack("<Iii", 40, SIDE + 8, -SIDE),
        # The first frame is larger than the screen.
        b"GIF89a" + struct.pack("<HH", 8, 8) + b"\0\0\0," + struct.pack("<HHHH", 0, 4, SIDE + 8, SIDE - 4) + b"\0",
    ],
)
def test_the_size_of_other_forms(data: bytes) -> None:
    assert image_size(data) == Size(SIDE, SIDE + 8)


def test_a_size_is_read_without_the_pixels() -> None:
    header = struct.pack(">IIBBBBB", 2**31 - 1, 2**31 - 1, 8, 2, 0, 0, 0)
    assert image_size(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)) == Size(2**31 - 1, 2**31 - 1)


def test_the_last_of_several_headers_counts_as_it_does_for_the_decoder() -> None:
    data = saved("PNG")
    larger = struct.pack(">IIBBBBB", 1000, 2000, 8, 2, 0, 0, 0)
    twice = data[:33] + chunk(b"IHDR", larger) + data[33:]
    assert image_size(twice) == Size(2000, 1000)
    with Image.open(io.BytesIO(twice)) as image:
        assert image.size == (1000, 2000)


@pytest.mark.parametrize(
    ("data", "reason"), [(b"", "empty"), (b"text", "not an image of a known format"), (b"RIFFxxxxWEBP", "not an image")]
)
def test_what_has_no_size_is_named(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=f"^image 2: {reason}"):
        image_size(data, name="image 2")
