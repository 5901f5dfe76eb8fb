"""Size and complexity of image files, from their blocks and without decoding.

The pixels of an image do not bound a decoder's time. A repeated scan of a JPEG takes 95 bytes and decodes the whole
image once more, and Pillow reads the blocks before the pixels in Python. So the number of blocks is bounded here, far
above the numbers of cameras and programs. A scan of the blocks is linear, and ends at damage, which Pillow names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from pacorl.types import Size

MAX_SCANS = 100
"""Scans of a JPEG; programs write about ten. libtiff has the same limit for JPEGs within a TIFF."""
MAX_BLOCKS = 500
"""Segments of a JPEG, chunks of a PNG and tags of a TIFF besides the pixels; a colour profile has up to 255."""
MAX_PIXEL_CHUNKS = 2**17
"""Chunks of pixels of a PNG; the largest accepted file has half as many of libpng's usual 8 KiB."""
MAX_DATA_BLOCKS = 2**20
"""Sub-blocks of a GIF, values of a tag of a TIFF; 64 million pixels take 400,000."""
MAX_RUN_BYTES = 2**22
"""Size of a BMP with run-length coding, of which Pillow decodes two million bytes a second."""


def size_of(data: bytes) -> Size | None:
    """Read height and width as stored from the header, which may contradict the pixels; None without a header."""
    kind = _kind_of(data)
    return kind.size(data) if kind else None


def excess_of(data: bytes) -> str:
    """Return the reason why decoding a file would take too long; empty if there is none."""
    kind = _kind_of(data)
    return kind.excess(data) if kind else ""


@dataclass(frozen=True, slots=True)
class _Kind:
    """A file format."""

    signatures: tuple[bytes, ...]
    size: Callable[[bytes], Size | None]
    excess: Callable[[bytes], str]


def _kind_of(data: bytes) -> _Kind | None:
    for kind in _KINDS:
        if data.startswith(kind.signatures):
            return kind
    return None


def _too_many(blocks: str, most: int) -> str:
    return f"has more than {most:,} {blocks}"


# --- PNG ----------------------------------------------------------------------------------------------------------

PNG = b"\x89PNG\r\n\x1a\n"
PNG_DATA = (b"IDAT", b"fdAT", b"fcTL")
"""Chunks of pixels; the last two are frames of an animation."""


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name and first eight bytes of each chunk."""
    position = len(PNG)
    while position + 8 <= len(data):
        length = int.from_bytes(data[position : position + 4], "big")
        yield data[position + 4 : position + 8], data[position + 8 : position + 16]
        position += 12 + length


def _png_size(data: bytes) -> Size | None:
    size = None
    for count, (name, content) in enumerate(_png_chunks(data)):
        if name == b"IHDR":  # of several, Pillow takes the last one
            size = Size(int.from_bytes(content[4:], "big"), int.from_bytes(content[:4], "big"))
        if name in PNG_DATA or count > MAX_BLOCKS:
            break
    return size


def _png_excess(data: bytes) -> str:
    data_blocks = blocks = 0
    for name, _ in _png_chunks(data):
        data_blocks += name in PNG_DATA
        blocks += name not in PNG_DATA
        if blocks > MAX_BLOCKS:
            return _too_many("chunks besides its pixels", MAX_BLOCKS)
        if data_blocks > MAX_PIXEL_CHUNKS:
            return _too_many("chunks of pixels", MAX_PIXEL_CHUNKS)
        if name == b"IEND":
            break
    return ""


# --- JPEG ---------------------------------------------------------------------------------------------------------

MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""In entropy-coded data, FF is followed by 00 or a restart marker (D0 to D7). FF may be repeated before a marker."""
SOI = 0xD8
EOI = 0xD9
SOS = 0xDA
TEM = 0x01
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
ARITHMETIC = range(0xC9, 0xCC)


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, position of the content, and the number of bytes skipped before the marker, as libjpeg finds them."""
    position = 2
    while (match := MARKER.search(data, position)) is not None:
        start = match.end()
        marker = data[start - 1]
        yield marker, start, match.start() - position
        position = start
        if marker not in (SOI, EOI, TEM):
            position += int.from_bytes(data[start : start + 2], "big")


def _jpeg_size(data: bytes) -> Size | None:
    size = None
    for count, (marker, start, skipped) in enumerate(_jpeg_segments(data)):
        if marker in FRAMES:
            height = int.from_bytes(data[start + 3 : start + 5], "big")
            width = int.from_bytes(data[start + 5 : start + 7], "big")
            size = Size(height, width)
        if marker == SOS or count + skipped > MAX_BLOCKS:
            break
    return size


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
        if scans > MAX_SCANS:
            return _too_many("scans", MAX_SCANS)
        if blocks - scans > MAX_BLOCKS:
            return _too_many("segments", MAX_BLOCKS)
    return ""


# --- GIF ----------------------------------------------------------------------------------------------------------

GIF_EXTENSION = 0x21
GIF_FRAME = 0x2C
GIF_END = 0x3B


def _gif_blocks(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the first byte and position of each block; 0 and the position of each sub-block."""
    position = 13 + _colour_bytes(data[10:11])
    while position < len(data):
        block = data[position]
        yield block, position
        if block == GIF_EXTENSION:
            position += 2
        elif block == GIF_FRAME:
            position += 11 + _colour_bytes(data[position + 9 : position + 10])
        else:
            position += 1  # Pillow skips bytes that begin no block
            continue
        while position < len(data) and data[position]:
            yield 0, position
            position += 1 + data[position]
        position += 1


def _colour_bytes(flags: bytes) -> int:
    """Size of the colour table that follows."""
    if flags and flags[0] & 0x80:
        return 3 << ((flags[0] & 7) + 1)
    return 0


def _gif_size(data: bytes) -> Size | None:
    frame: Sequence[int] = (0, 0, 0, 0)
    for count, (block, position) in enumerate(_gif_blocks(data)):
        if block == GIF_FRAME:
            frame = _words(data[position + 1 : position + 9])
        if block in (GIF_FRAME, GIF_END) or count > MAX_BLOCKS:
            break
    if len(data) < 10:
        return None
    screen_width, screen_height = _words(data[6:14])[:2]
    left, top, width, height = frame
    # A first frame beyond the screen enlarges the image.
    return Size(max(screen_height, top + height), max(screen_width, left + width))


def _gif_excess(data: bytes) -> str:
    frames = 0
    for count, (block, _) in enumerate(_gif_blocks(data)):
        frames += block == GIF_FRAME
        if frames > 1 or block == GIF_END:  # Pillow looks no further
            break
        if count > MAX_DATA_BLOCKS:
            return _too_many("blocks", MAX_DATA_BLOCKS)
    return ""


# --- TIFF ---------------------------------------------------------------------------------------------------------

TIFF = (b"II*\0", b"MM\0*", b"MM*\0", b"II\0*", b"II+\0", b"MM\0+")
"""Pillow reads the third and fourth too, which are wrong. The last two are BigTIFF."""
TIFF_WIDTH = 256
TIFF_HEIGHT = 257
TEXTS = (1, 2, 6, 7)
"""Types of single bytes, which Pillow reads at once."""


def _tiff_tags(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Tag, type, number of values, and the value (or its position) of each entry of the first directory."""
    order: Literal["little", "big"] = "little" if data[:1] == b"I" else "big"

    def number(position: int, size: int) -> int:
        return int.from_bytes(data[position : position + size], order)

    # BigTIFF has longer positions and counts.
    is_big = b"+" in data[2:4]
    word = 8 if is_big else 4  # bytes of a position
    directory = number(8 if is_big else 4, word)
    count_bytes = 8 if is_big else 2
    for index in range(number(directory, count_bytes)):
        entry = directory + count_bytes + index * (4 + 2 * word)
        if entry >= len(data):
            return
        kind = number(entry + 2, 2)
        values = number(entry + 4, word)
        # A short value is at the front of its field.
        size = {3: 2, 4: 4}.get(kind, word) if values == 1 else word
        yield number(entry, 2), kind, values, number(entry + 4 + word, size)


def _tiff_size(data: bytes) -> Size | None:
    sides = {}
    for count, (tag, _, _, value) in enumerate(_tiff_tags(data)):
        if tag in (TIFF_WIDTH, TIFF_HEIGHT):
            sides[tag] = value
        if count > MAX_BLOCKS:
            break
    if len(sides) == 2:
        return Size(sides[TIFF_HEIGHT], sides[TIFF_WIDTH])
    return None


def _tiff_excess(data: bytes) -> str:
    for count, (_, kind, values, _) in enumerate(_tiff_tags(data)):
        if count > MAX_BLOCKS:
            return _too_many("tags", MAX_BLOCKS)
        if kind not in TEXTS and values > MAX_DATA_BLOCKS:
            return _too_many("values in a tag", MAX_DATA_BLOCKS)
    return ""


# --- BMP and WebP -------------------------------------------------------------------------------------------------

BMP_RUNS = (1, 2)


def _bmp_size(data: bytes) -> Size | None:
    if len(data) < 26:
        return None
    if data[14:18] == b"\x0c\0\0\0":  # OS/2
        width, height = _words(data[18:26])[:2]
        return Size(height, width)
    width, height = struct.unpack("<ii", data[18:26])
    return Size(abs(height), abs(width))  # a negative height counts from the top


def _bmp_excess(data: bytes) -> str:
    if int.from_bytes(data[30:34], "little") in BMP_RUNS and len(data) > MAX_RUN_BYTES:
        return _too_many("bytes in run-length coding", MAX_RUN_BYTES)
    return ""


def _webp_size(data: bytes) -> Size | None:
    if len(data) < 30 or data[8:12] != b"WEBP":
        return None
    match data[12:16]:
        case b"VP8X":
            return Size(int.from_bytes(data[27:30], "little") + 1, int.from_bytes(data[24:27], "little") + 1)
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            return Size((bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1)
        case b"VP8 ":
            width, height = _words(data[26:34])[:2]
            return Size(height & 0x3FFF, width & 0x3FFF)
    return None


def _words(data: bytes) -> Sequence[int]:
    """Four numbers of 16 bits, the low byte first; 0 where a file is cut off."""
    return struct.unpack("<4H", data.ljust(8, b"\0"))


_KINDS = (
    _Kind((PNG,), _png_size, _png_excess),
    _Kind((b"\xff\xd8\xff",), _jpeg_size, _jpeg_excess),
    _Kind((b"GIF87a", b"GIF89a"), _gif_size, _gif_excess),
    _Kind(TIFF, _tiff_size, _tiff_excess),
    _Kind((b"BM",), _bmp_size, _bmp_excess),
    _Kind((b"RIFF",), _webp_size, lambda data: ""),
)
