"""Large inputs: the worst form of so many bytes, for readers of files and for servers."""

from __future__ import annotations

import io
import itertools
import json
import random
import struct
import zlib
from collections.abc import Callable
from functools import cache
from typing import Any

from PIL import Image
from qa.attack.images import chunk, png

MIB = 2**20
JSON: dict[str, Callable[[int], bytes]] = {}
"""Name → JSON values of about so many bytes, or what looks like one."""
IMAGES: dict[str, Callable[[int], bytes]] = {}
"""Name → files of at most about so many bytes that a decoder works hard for."""


def shape(table: dict[str, Callable[[int], bytes]]) -> Callable[[Callable[[int], bytes]], Callable[[int], bytes]]:
    def enter(make: Callable[[int], bytes]) -> Callable[[int], bytes]:
        table[make.__name__] = make
        return make

    return enter


def size(draw: random.Random, *, most: float = 64) -> int:
    """Bytes from 1 MiB to `most` MiB; half of the draws are below 4 MiB, since seconds grow with bytes."""
    return int(MIB * most ** (draw.random() ** 2))


def below_a_limit(draw: random.Random) -> int:
    """Half of the time a size that some limit of a server lets through, or the list in it, and else any size."""
    sizes = (4000, 60_000, 120_000, 250_000, 1_000_000, 4_100_000)
    return draw.choice(sizes) if draw.random() < 0.5 else size(draw)


def repeated(unit: bytes, count: int, *, head: bytes = b"[", tail: bytes = b"]") -> bytes:
    """The unit with commas between, in brackets; `count` is of bytes."""
    times = max(1, count // (len(unit) + 1))
    return head + (unit + b",") * (times - 1) + unit + tail


# --- JSON ------------------------------------------------------------------------------------------------------


@shape(JSON)
def zeros(count: int) -> bytes:
    return repeated(b"0", count)


@shape(JSON)
def empty_lists(count: int) -> bytes:
    return repeated(b"[]", count)


@shape(JSON)
def empty_objects(count: int) -> bytes:
    return repeated(b"{}", count)


@shape(JSON)
def texts(count: int) -> bytes:
    return repeated(b'""', count)


@shape(JSON)
def floats(count: int) -> bytes:
    return repeated(b"1e308", count)


@shape(JSON)
def keys(count: int) -> bytes:
    numbers = range(max(1, min(count, 8 * MIB) // 11))  # more would take the attack seconds to write
    return b"{" + ",".join([f'"{number:07d}":0' for number in numbers]).encode() + b"}"


@shape(JSON)
def one_key(count: int) -> bytes:
    return repeated(b'"a":0', count, head=b"{", tail=b"}")


@shape(JSON)
def deep_lists(count: int) -> bytes:
    return b"[" * (count // 2) + b"]" * (count // 2)


@shape(JSON)
def deep_objects(count: int) -> bytes:
    return b'{"a":' * (count // 6) + b"0" + b"}" * (count // 6)


@shape(JSON)
def open_lists(count: int) -> bytes:
    return b"[" * count


@shape(JSON)
def shallow_lists(count: int) -> bytes:
    """As deep as readers allow, again and again."""
    return repeated(b"[" * 60 + b"]" * 60, count)


@shape(JSON)
def digits(count: int) -> bytes:
    return b"9" * count


@shape(JSON)
def decimals(count: int) -> bytes:
    return b"0." + b"1" * count


@shape(JSON)
def long_text(count: int) -> bytes:
    return b'"' + b"a" * count + b'"'


@shape(JSON)
def long_texts(count: int) -> bytes:
    """No more of them than servers take items."""
    length = max(0, count // 60_000 - 3)
    return repeated(b'"' + b"a" * length + b'"', count)


@shape(JSON)
def long_keys(count: int) -> bytes:
    length, numbers = max(1, count // 60_000 - 11), range(min(60_000, count // 12))
    return b"{" + ",".join([f'"{number:06d}{"a" * length}":0' for number in numbers]).encode() + b"}"


@shape(JSON)
def escapes(count: int) -> bytes:
    return b'"' + rb"\u00e9" * (count // 6) + b'"'


@shape(JSON)
def half_pairs(count: int) -> bytes:
    return b'"' + rb"\ud800x" * (count // 7) + b'"'


@shape(JSON)
def wide_letters(count: int) -> bytes:
    """Four bytes each in UTF-8, and in Python's texts."""
    return b'"' + "\U0001f600".encode() * (count // 4) + b'"'


@shape(JSON)
def blanks(count: int) -> bytes:
    return b" " * count + b"{}"


@shape(JSON)
def quotes(count: int) -> bytes:
    return b'"' * count


@shape(JSON)
def backslashes(count: int) -> bytes:
    return b'"' + b"\\" * count


@shape(JSON)
def nulls(count: int) -> bytes:
    return b"\0" * count


def inside(document: Any, value: bytes, draw: random.Random) -> bytes:
    """The document with one value of its first level, or below one of them, replaced by a value in JSON.

    An empty document is replaced as a whole.
    """
    if not document:
        return value
    mark = "\x01"
    changed: Any = json.loads(json.dumps(document))
    section = changed
    while True:
        key = draw.choice(list(section) if isinstance(section, dict) else range(len(section)))
        if isinstance(section[key], dict | list) and section[key] and draw.random() < 0.5:
            section = section[key]
            continue
        section[key] = mark
        return json.dumps(changed).encode().replace(json.dumps(mark).encode(), value, 1)


# --- images ----------------------------------------------------------------------------------------------------


@cache
def _progressive(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (side, side), 99).save(buffer, "JPEG", progressive=True)
    return buffer.getvalue()


def jpeg_of_scans(scans: int, *, side: int) -> bytes:
    """A progressive JPEG that refines its last scan again and again: a hundred bytes cost what the whole does."""
    content = _progressive(side)
    last = content.rindex(b"\xff\xda")
    return content[:last] + content[last:-2] * (1 + scans) + content[-2:]


@shape(IMAGES)
def scans_of_a_small_jpeg(count: int) -> bytes:
    unit = len(jpeg_of_scans(1, side=256)) - len(jpeg_of_scans(0, side=256))
    return jpeg_of_scans(min(count // unit, 50_000), side=256)


@shape(IMAGES)
def scans_of_a_large_jpeg(count: int) -> bytes:
    unit = len(jpeg_of_scans(1, side=4900)) - len(jpeg_of_scans(0, side=4900))
    return jpeg_of_scans(min(count // unit, 3000), side=4900)


@shape(IMAGES)
@cache
def png_of_64_megapixels(count: int = 0) -> bytes:
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * 7900)
    data = b"".join([packer.compress(row) for _ in range(8000)]) + packer.flush()
    return png(7900, 8000, data=data)


@shape(IMAGES)
@cache
def png_of_25_megapixels(count: int = 0) -> bytes:
    return png(5000, 4999, data=zlib.compress(bytes(15_001 * 4999), 9))


@shape(IMAGES)
def png_with_text_bombs(count: int) -> bytes:
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000), 9))
    return png(64, 64, *[text] * min(count // len(text), 20_000))


@shape(IMAGES)
def png_of_tiny_chunks(count: int) -> bytes:
    return png(64, 64, chunk(b"tEXt", b"a\0b") * (count // 15))


@shape(IMAGES)
def png_of_tiny_data(count: int) -> bytes:
    """Its pixels in chunks of one byte."""
    data = zlib.compress(random.Random(0).randbytes((3 * 512 + 1) * 512), 0)[: count // 13]
    header = png(512, 512, data=b"")
    pixels = b"".join([chunk(b"IDAT", data[at : at + 1]) for at in range(len(data))])
    return header[:33] + pixels + chunk(b"IEND", b"")


@shape(IMAGES)
def gif_of_frames(count: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HH", 64, 64) + b"\0\0\0"
    frame = b",\0\0\0\0" + struct.pack("<HH", 64, 64) + b"\0\x02\x01\x44\0"
    return head + frame * (count // len(frame)) + b";"


@shape(IMAGES)
def gif_of_comments(count: int) -> bytes:
    head = b"GIF89a" + struct.pack("<HH", 64, 64) + b"\0\0\0"
    return head + b"!\xfe\x01a\0" * (count // 5) + b";"


@shape(IMAGES)
def tiff_of_entries(count: int) -> bytes:
    entries = min(count // 12, 65_535)
    body = b"".join([struct.pack("<HHII", 256 + number % 500, 4, 1, 64) for number in range(entries)])
    return b"II*\0" + struct.pack("<IH", 8, entries) + body + bytes(4)


@shape(IMAGES)
def tiff_of_directories(count: int) -> bytes:
    """Pages without anything in them, each behind the one before."""
    pages = count // 6
    places = itertools.count(8, 6)
    body = b"".join([struct.pack("<HI", 0, place + 6) for place, _ in zip(places, range(pages), strict=False)])
    return b"II*\0" + struct.pack("<I", 8) + body


@shape(IMAGES)
def jpeg_of_markers(count: int) -> bytes:
    return b"\xff\xd8" + b"\xff\xfe\x00\x03a" * (count // 5) + _progressive(64)[2:]


@shape(IMAGES)
def jpeg_of_padding(count: int) -> bytes:
    return b"\xff\xd8" + b"\xff" * count + _progressive(64)[3:]


@shape(IMAGES)
def webp_of_chunks(count: int) -> bytes:
    body = b"WEBP" + b"XXXX\0\0\0\0" * (count // 8)
    return b"RIFF" + struct.pack("<I", len(body)) + body


@shape(IMAGES)
def noise(count: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + random.Random(0).randbytes(count)
