"""Images that a script hands over, rather than files (those are in tests/data/test_images.py)."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from pacorl.io.pixels import ImageError, as_rgb

PICTURE = Image.linear_gradient("L").resize((40, 30)).convert("RGB")


def reopened(image: Image.Image, kind: str, **options: object) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return Image.open(buffer)


def test_an_rgb_picture_stays_itself() -> None:
    assert as_rgb(PICTURE, "x") is PICTURE


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_lies_on_white(mode: str) -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0)).convert(mode)
    assert as_rgb(clear, "x").getpixel((0, 0)) == (255, 255, 255)


def test_a_transparent_colour_of_an_rgb_png_lies_on_white() -> None:
    image = reopened(Image.new("RGB", (8, 8), "red"), "png", transparency=(255, 0, 0))
    assert image.mode == "RGB"
    assert as_rgb(image, "x").getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_keeps_its_colours() -> None:
    assert as_rgb(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "x").getpixel((0, 0)) == (255, 0, 0)


def test_an_animation_is_refused_and_one_of_its_frames_is_not() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    moving = reopened(frames[0], "gif", save_all=True, append_images=frames[1:])
    with pytest.raises(ImageError, match="x: has 2 frames"):
        as_rgb(moving, "x")
    moving.seek(1)
    assert as_rgb(moving.copy(), "x").getpixel((0, 0)) == (0, 0, 255)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (Image.new("RGB", (1, 1)), "1x1 is too small"),
        (Image.new("RGB", (2000, 8)), "2000x8 is too long"),
        (Image.new("F", (8, 8)), "8 bits a channel"),
    ],
)
def test_what_cannot_be_judged_is_named(image: Image.Image, message: str) -> None:
    with pytest.raises(ImageError, match=f"x: .*{message}"):
        as_rgb(image, "x")
