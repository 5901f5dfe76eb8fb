"""What a judge can look at: every picture becomes 8-bit RGB, or an error that names it and says why.

Transparency is laid on white (what a page would show); CMYK, palette and 16-bit grey become RGB. A picture of several
frames is refused: which of them is meant, only its owner knows. The second picture in a phone's photo (MPO) is not
such a frame, and ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

MIN_SIDE = 4
"""Below it, rows and columns cannot be told from colour channels, and there is nothing to judge."""
MAX_ASPECT = 200
"""The judge's image processor refuses longer strips."""


class ImageError(ValueError):
    """A picture that cannot be used; the message names it and says why."""


def as_rgb(image: Image, name: str) -> Image:
    """The picture as 8-bit RGB, itself where it is that already. Raises ImageError where no judge can take it."""
    check_frames(image, name)
    check_shape(image, name)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode in ("I", "F"):
        raise ImageError(f"{name}: its pixels (mode {image.mode}) have no fixed white; save it with 8 bits a channel")
    if image.mode.startswith("I;16"):
        return image.point(lambda value: value / 257).convert("L").convert("RGB")
    return _on_white(image) if image.has_transparency_data else image.convert("RGB")


def check_frames(image: Image, name: str) -> None:
    """Raises ImageError where a file holds several frames or pages."""
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise ImageError(f"{name}: has {frames} frames or pages; save the one that is meant as a picture of its own")


def check_shape(image: Image, name: str) -> None:
    """Raises ImageError where an image is too small or too long and thin for a judge."""
    short, long = sorted(image.size)
    if short < MIN_SIDE:
        raise ImageError(f"{name}: {image.width}x{image.height} is too small; each side needs {MIN_SIDE} pixels")
    if long > MAX_ASPECT * short:
        raise ImageError(
            f"{name}: {image.width}x{image.height} is too long; one side may be {MAX_ASPECT} times the other"
        )


def _on_white(image: Image) -> Image:
    from PIL import Image as Pillow

    white = Pillow.new("RGBA", image.size, "white")
    return Pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
