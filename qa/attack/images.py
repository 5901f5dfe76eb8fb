"""Images that somebody else made: formats and modes of every kind, damaged, cut, and bombs."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin
from qa.attack.damage import damage_file, put
from qa.attack.harness import Target, WrongError

from pacorl.io.files import read_bytes
from pacorl.io.images import MAX_PIXELS, open_image, png_texts, upright_size
from pacorl.io.uploads import open_upload, upload_size

MODES = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr", "LAB"),
    **dict.fromkeys(("PPM", "TGA", "JPEG2000", "EPS", "PDF"), ("RGB",)),
}
TURNED = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
EXTRA: dict[str, dict[str, object]] = {
    "JPEG": {"progressive": True, "comment": b"x" * 100, "exif": TURNED},
    "TIFF": {"compression": "tiff_lzw"},
}
SIDES = struct.pack("<HH", 65_535, 65_535)
TAGS = [(256, 4, 60_000), (257, 4, 60_000), (258, 3, 8), (259, 3, 5), (262, 3, 1), (273, 4, 8), (277, 3, 1)]
TAGS += [(278, 4, 60_000), (279, 4, 10)]


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes, data: bytes | None = None) -> bytes:
    """A PNG of zeros, or of the `data` given, with further chunks before the pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    pixels = zlib.compress(bytes((width * 3 + 1) * height)) if data is None else data
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def jpeg(*, front: bytes = b"", scans: int = 0) -> bytes:
    """A JPEG with further bytes behind its first marker, and repetitions of its last scan."""
    data = saved([Image.linear_gradient("L").resize((64, 64))], "JPEG")
    return data[:2] + front + data[2:-2] + data[data.rindex(b"\xff\xda") : -2] * scans + data[-2:]


def frames(mode: str, kind: str, count: int) -> bytes:
    return saved([Image.new(mode, (16, 16), (n,) * len(mode)) for n in range(count)], kind)


BOMBS: dict[str, Callable[[], bytes]] = {
    "PNG of gigapixels": lambda: png(60_000, 60_000, data=zlib.compress(bytes(100_000))),
    "PNG beyond the limit": lambda: png(8_001, 8_001, data=zlib.compress(bytes(24_004 * 8_001), 1)),
    "PNG of the largest sides": lambda: png(2**31 - 1, 2**31 - 1, data=b""),
    "GIF of gigapixels": lambda: b"GIF89a" + SIDES + b"\0\0\0,\0\0\0\0" + SIDES + b"\0\x02\0;",
    "BMP of gigapixels": lambda: (
        b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, 60_000, 60_000, 1, 24, 0, 0, 0, 0, 0, 0)
    ),
    "TIFF of gigapixels": lambda: (
        struct.pack("<2sHIH", b"II", 42, 8, len(TAGS)) + b"".join(struct.pack("<HHII", t, k, 1, v) for t, k, v in TAGS)
    ),
    "GIF of many frames": lambda: frames("L", "GIF", 200),
    "TIFF of many pages": lambda: frames("L", "TIFF", 200),
    "WebP of many frames": lambda: frames("RGB", "WEBP", 20),
    "a strip": lambda: png(10_000, 4),
    "one pixel": lambda: png(1, 1),
    "Ghostscript": lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n",
}
"""Files that are small and would be large: each must be refused."""
SLOW: dict[str, Callable[[], bytes]] = {
    "JPEG of many scans": lambda: jpeg(scans=3000),
    "JPEG of many segments": lambda: jpeg(front=b"\xff\xfe\0\2" * 100_000),
    "PNG of many profiles": lambda: png(64, 64, *[chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**6)))] * 1000),
}
"""Files that would keep a decoder busy: each must be refused where strangers send it."""


def saved(frames: list[Image.Image], kind: str) -> bytes:
    buffer = io.BytesIO()
    more: dict[str, object] = (
        {"save_all": True, "append_images": frames[1:]} if len(frames) > 1 else EXTRA.get(kind, {})
    )
    frames[0].save(buffer, format=kind, **more)  # type: ignore[arg-type]
    return buffer.getvalue()


def corpus() -> Iterator[tuple[str, bytes]]:
    """Small images of every format and mode; formats that are not read, too."""
    values = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    colours = Image.fromarray(values)
    for kind, modes in MODES.items():
        for mode in modes:
            image = colours.convert("L").convert(mode) if mode in ("I;16", "I", "F") else _converted(colours, mode)
            yield f"{kind}-{mode.replace(';', '')}", saved([image], kind)
    texts = PngImagePlugin.PngInfo()
    texts.add_text("a", "x" * 1000, zip=True)
    texts.add_itxt("b", "ü" * 1000, zip=True)
    buffer = io.BytesIO()
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    colours.save(buffer, "PNG", pnginfo=texts, icc_profile=profile, transparency=(0, 0, 0))
    yield "PNG-texts", buffer.getvalue()
    # Bombs in what stands beside the pixels, which may be read or passed over.
    yield "PNG-ztxt", png(8, 8, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000))))
    yield "PNG-iccp", png(8, 8, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(50_000_000))))


def _converted(image: Image.Image, mode: str) -> Image.Image:
    if mode == "LAB":
        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(image, srgb, lab, outputMode="LAB") or image
    return image.convert(mode)


def mutate(folder: Path, draw: random.Random, bombs: dict[str, Callable[[], bytes]]) -> str:
    """Puts one image of the corpus into x.png, damaged."""
    path = folder / "x.png"
    what = draw.choices(["damage", "header", "bomb", "file", "whole"], [70, 15, 6, 3, 6])[0]
    if what == "file":
        return damage_file(path, draw)
    if what == "bomb":
        name = draw.choice(list(bombs))
        put(path, bombs[name]())
        return f"must refuse {name}"
    name, original = draw.choice(corpora())
    content = bytearray(original)
    if what != "whole":
        for _ in range(draw.choice([1, 1, 2, 5, 30])):
            _damage(content, draw, reach=64 if what == "header" else len(content))
    put(path, content)
    return f"{what} of {name}"


def _damage(content: bytearray, draw: random.Random, *, reach: int) -> None:
    at = draw.randrange(max(1, min(reach, len(content))))
    match draw.choice(["flip", "flip", "set", "cut", "drop", "double", "number"]):
        case "flip" if content:
            content[at] ^= 1 << draw.randrange(8)
        case "set" if content:
            content[at] = draw.choice([0, 255, 127, 128, draw.randrange(256)])
        case "cut" if draw.random() < 0.3:
            del content[at:]
        case "drop":
            del content[at : at + draw.randrange(1, 20)]
        case "double":
            content[at:at] = content[at : at + draw.randrange(1, 60)]
        case "number":
            numbers = [0, 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 10**5]
            content[at : at + 4] = struct.pack(draw.choice("<>") + "I", draw.choice(numbers))


def opened(folder: Path, *, by: str) -> None:
    """Opens the image as a command does, or as a server does. Raises WrongError if it is then no image of ours."""
    path = folder / "x.png"
    if by == "upload":
        data = read_bytes(path, limit=20_000_000)
        size = upload_size(data, name="x.png")
        image = open_upload(data, name="x.png", max_pixels=size.height * size.width)
    else:
        image = open_image(path)
        png_texts(path)
        upright_size.cache_clear()
        size = upright_size(path)
        if (size.height, size.width) != (image.height, image.width):
            raise WrongError("wrong", f"{image.size}, and its header says {size}")
    if image.mode != "RGB" or image.width * image.height > MAX_PIXELS or min(image.size) < 4:
        raise WrongError("wrong", f"{image.mode} {image.size}")


def prepare(folder: Path) -> None:
    (folder / "x.png").write_bytes(png(8, 8))


@cache
def corpora() -> list[tuple[str, bytes]]:
    """Images to damage, by name; a process makes them once."""
    return list(corpus())


def targets() -> list[Target]:
    def target(by: str, bombs: dict[str, Callable[[], bytes]]) -> Target:
        def damage(folder: Path, draw: random.Random) -> str:
            return mutate(folder, draw, bombs)

        run = partial(opened, by=by)
        return Target(name=f"images/{by}", prepare=prepare, mutate=damage, run=run, names=("x.png",))

    return [target("file", BOMBS), target("upload", BOMBS | SLOW)]
