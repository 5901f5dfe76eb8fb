from __future__ import annotations

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageCms

from pacorl.io.images import ImageError, as_rgb, images_in, open_image, upright_size

GRADIENT = Image.linear_gradient("L").resize((40, 30)).convert("RGB")


def written(image: Image.Image, kind: str = "png", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of a few bytes that claims side² pixels."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK", "RGBA", "LA", "YCbCr", "I;16"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    kind = "tiff" if mode in ("CMYK", "YCbCr") else "png"
    image = Image.new("RGB", (8, 8), (250, 250, 250))
    image = Image.new("I;16", (8, 8), 257 * 250) if mode == "I;16" else image.convert(mode)
    read = open_image(written(image, kind))
    assert read.mode == "RGB"
    assert read.getpixel((4, 4)) == pytest.approx((250, 250, 250), abs=6)


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_transparency_lies_on_white(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert open_image(written(image.convert(mode))).getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("orientation", [0, 1, 5, 6, 7, 8, 99])
@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_the_size_of_a_header_is_the_decoded_one_at_every_orientation(
    kind: str, orientation: int, tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a"
    path.write_bytes(written(GRADIENT, kind, exif=exif))
    image, size = open_image(path), upright_size(path)
    assert (size.width, size.height) == image.size
    assert (image.width > image.height) == (orientation not in (5, 6, 7, 8))


@pytest.mark.parametrize("kind", ["gif", "png", "tiff", "webp"])
def test_several_frames_are_refused_but_a_phones_second_image(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "green")]
    with pytest.raises(ImageError, match=r"move\.gif: has several frames"):
        open_image(written(frames[0], kind, save_all=True, append_images=frames[1:]), name="move.gif")
    photo = written(GRADIENT, "mpo", save_all=True, append_images=[GRADIENT])
    assert open_image(photo).size == GRADIENT.size


@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(side: int) -> None:
    with pytest.raises(ImageError, match=r"too large.* 64,000,000 pixels"):
        open_image(bomb(side), name="bomb.png")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("RGB", (1, 1)), "1x1 is too small"),
        (Image.new("RGB", (2000, 8)), "2000x8 is too long"),
        (Image.new("F", (8, 8)), "8 bits a channel"),
        ([[0.5]], "list is no image"),
    ],
)
def test_what_cannot_be_judged_is_named(image: Any, message: str) -> None:
    with pytest.raises(ImageError, match=f"x: .*{message}"):
        as_rgb(image, "x")


# --- strangers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["eps", "ico", "jpeg2000", "ppm", "tga", "pcx"])
def test_only_named_formats_are_decoded(kind: str) -> None:
    with pytest.raises(ImageError, match=r"^cat\.png: not an image of a known format"):
        open_image(written(GRADIENT, kind), name="cat.png")


# --- folders ---------------------------------------------------------------------------------------------------


def test_a_folder_s_files_are_images_in_natural_order_but_texts_pages_and_hidden_ones(tmp_path: Path) -> None:
    for name in ("p10.tiff", "p9.PNG", "no suffix", ".DS_Store", "1.txt", "LIST.CSV", "card.yaml", "all.zip", "2.heic"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "set.png").mkdir()
    os.mkfifo(tmp_path / "3.png")
    assert [path.name for path in images_in(tmp_path)] == ["2.heic", "3.png", "no suffix", "p9.PNG", "p10.tiff"]
    assert images_in(tmp_path / "absent") == ()


def display_p3() -> bytes:
    """The profile of a wide display that bears the name of sRGB, as some programs leave it."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    colours = {b"rXYZ": (0.5151, 0.2412, -0.0011), b"gXYZ": (0.2919, 0.6922, 0.0419), b"bXYZ": (0.1572, 0.0666, 0.7841)}
    for entry in range(132, 132 + 12 * int.from_bytes(profile[128:132], "big"), 12):
        tag, offset = bytes(profile[entry : entry + 4]), int.from_bytes(profile[entry + 4 : entry + 8], "big")
        if tag in colours:
            struct.pack_into(">3i", profile, offset + 8, *(round(value * 65536) for value in colours[tag]))
    return bytes(profile)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
def test_colours_of_a_profile_become_srgb(mode: str) -> None:
    for colour, shown in (((200, 60, 60), (218, 42, 52)), ((90, 90, 90), (90, 90, 90))):
        plain = Image.new("RGB", (8, 8), colour)
        plain = plain.quantize(4) if mode == "P" else plain.convert(mode)
        image = open_image(written(plain, icc_profile=display_p3()))
        assert image.mode == "RGB"
        assert image.getpixel((4, 4)) == pytest.approx(shown, abs=4)
        assert "icc_profile" not in image.info


def test_the_profile_of_srgb_changes_nothing_and_a_broken_one_is_named(caplog: pytest.LogCaptureFixture) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    assert open_image(written(GRADIENT, icc_profile=srgb)).tobytes() == GRADIENT.tobytes()
    assert caplog.text == ""
    assert open_image(written(GRADIENT, icc_profile=b"none"), name="a.png").tobytes() == GRADIENT.tobytes()
    assert "a.png: its colour profile" in caplog.text
