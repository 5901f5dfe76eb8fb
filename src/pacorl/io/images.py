"""Images of the whole package: every file becomes an upright 8-bit sRGB image, or an ImageError with the reason.

FORMATS are read, and their EXIF orientation and colour profile applied. Transparency is laid on white, as on a page;
CMYK, palette and 16-bit grey become RGB. An image of several frames is refused: only its owner can choose one of them.
The second image in a phone's photo (MPO) is not such a frame, and is ignored. Servers decode what they receive by
`io.uploads`.
"""

import io
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps, PngImagePlugin, UnidentifiedImageError

from pacorl.io.files import read_bytes
from pacorl.types import Size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats by content, not by a file's name; JPEG with MPO. Pillow has fifty more: one of them starts Ghostscript, and a
kilobyte of JPEG 2000 within the limits took 44 seconds and 1.2 GB."""

IMAGE_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
"""File suffix → media type of the images that pages show."""
BESIDE = (
    *(".txt", ".caption", ".yaml", ".yml", ".json", ".jsonl", ".csv", ".md", ".html", ".pdf", ".log", ".ini", ".db"),
    *(".zip", ".tar", ".gz", ".safetensors", ".mp4"),
)
"""Suffixes of files allowed in a folder of images: captions, cards, records, pages, archives."""

MAX_PIXELS = 64_000_000
"""A decompressed image of this many pixels takes about 250 MB; larger images are bombs, or meant for print."""
SMALLER = "an image may have {:,} pixels; give a smaller copy"
MIN_SIDE = 4
"""Shorter sides could be colour channels, and leave no content to judge."""
MAX_ASPECT = 200
"""The judge's image processor refuses longer strips."""

MAX_BYTES = 2**29
"""Limit of a file: MAX_PIXELS of four channels of 16 bits, uncompressed."""

SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations whose rows are columns; larger numbers have no meaning, and no reader turns by them."""

ROUNDING = 2
"""Largest change of a channel by a conversion between two profiles of one colour space."""


logger = logging.getLogger(__name__)


class ImageError(ValueError):
    """An unusable image; the message names it and the reason."""


def open_image(
    source: Path | str | bytes, *, name: str = "", max_pixels: int = MAX_PIXELS, formats: tuple[str, ...] = FORMATS
) -> Image.Image:
    """Read a file or its content as an upright RGB image; `name` is its name in messages.

    Raises:
        ImageError: it is no image, damaged, too large or too small, or has several frames.
        ValueError: the file cannot be read.
    """
    name = name or ("the image" if isinstance(source, bytes) else str(source))
    data = source if isinstance(source, bytes) else read_bytes(Path(source), limit=MAX_BYTES)
    with _decoder_errors(name):
        image = Image.open(io.BytesIO(data), formats=formats)
        # Before the pixels are decoded: a bomb of a few kilobytes would fill the memory. And after: some formats store
        # their size a second time, with the pixels.
        _check_pixels(image, name, max_pixels)
        check_shape(image, name)
        image.load()
        _check_pixels(image, name, max_pixels)
        upright = ImageOps.exif_transpose(image)
    return as_rgb(upright, name)


def images_in(folder: Path) -> tuple[Path, ...]:
    """List the images of a folder in natural order: 1, 2, 10. A missing folder has none.

    All files count as images except hidden files and the suffixes in BESIDE. A file of another kind, or a link to
    nothing, then fails when it is opened, instead of being skipped silently.
    """
    images = []
    for path in sorted(folder.glob("*"), key=natural):
        if not path.is_dir() and path.suffix.lower() not in BESIDE and not path.name.startswith("."):
            images.append(path)
    return tuple(images)


def natural(path: Path) -> tuple[str, str]:
    """Sort key by which 2.png comes before 10.png."""
    padded = re.sub("[0-9]+", lambda number: number[0].zfill(20), path.name.casefold())
    return padded, path.name


@contextmanager
def _decoder_errors(name: str) -> Iterator[None]:
    """Replace any error of a decoder by an ImageError with the image's name."""
    try:
        yield
    except ImageError:
        raise
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not an image of a known format; save it as PNG or JPEG") from None
    except Exception as error:  # decoders raise any class: struct.error, TypeError, RuntimeError
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        fix = f"save it anew, with at most {MAX_PIXELS:,} pixels"
        raise ImageError(f"{name}: damaged, cut off or too large ({reason}); {fix}") from None


def _check_pixels(image: Image.Image, name: str, most: int) -> None:
    if image.width * image.height > most:
        raise ImageError(f"{name}: {image.width}x{image.height} is too large; {SMALLER.format(most)}")


@cache
def upright_size(path: Path) -> Size:
    """Read height and width of an upright image from its header. Raises as `open_image` does."""
    data = read_bytes(path, limit=MAX_BYTES)
    with _decoder_errors(str(path)), Image.open(io.BytesIO(data), formats=FORMATS) as image:
        if image.getexif().get(ExifTags.Base.Orientation) in SIDEWAYS:
            return Size(image.width, image.height)
        return Size(image.height, image.width)


def check_readable(paths: Iterable[Path]) -> None:
    """Open every image once. Raises ValueError with the first unusable image and its reason."""
    # In threads: Pillow's decoders release the interpreter lock.
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(open_image, dict.fromkeys(paths)):
            pass


def as_rgb(image: Image.Image, name: str) -> Image.Image:
    """Convert an image to 8-bit RGB, as judges read it; an RGB image is returned as it is.

    Raises:
        ImageError: no judge can take it.
    """
    if not isinstance(image, Image.Image):
        raise ImageError(f"{name}: {type(image).__name__} is no image; give PIL's, as of PIL.Image.fromarray(array)")
    check_shape(image, name)
    if image.info.get("icc_profile"):
        image = _as_srgb(image, name)
    if image.mode == "RGB" and not image.has_transparency_data:
        return image
    if image.mode in ("I", "F"):
        raise ImageError(f"{name}: its pixels (mode {image.mode}) have no fixed white; save it with 8 bits a channel")
    if image.mode.startswith("I;16"):
        # Pillow's own conversion to "L" clips at 255 instead of scaling: 65535 / 257 = 255.
        return image.point(lambda value: value / 257).convert("L").convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _as_srgb(image: Image.Image, name: str) -> Image.Image:
    """Convert an image with a colour profile to sRGB, as every screen shows it; one without RGB or CMYK is left."""
    colours = image
    if image.mode in ("P", "PA", "RGBA", "RGBX"):
        colours = image.convert("RGB")
    if colours.mode not in ("RGB", "CMYK", "L"):
        return image
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(image.info["icc_profile"]))
        # As browsers do: colours of both spaces stay, and black stays black.
        converted = ImageCms.profileToProfile(
            colours,
            profile,
            ImageCms.createProfile("sRGB"),
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            outputMode="RGB",
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError) as error:
        logger.warning("%s: its colour profile cannot be used, and is ignored (%s)", name, error)
        return image
    assert converted is not None, "not in place"
    # Of the same space, a conversion only rounds.
    if colours.mode == "RGB":
        difference = ImageChops.difference(colours, converted)
        if not difference.point(lambda value: max(0, value - ROUNDING)).getbbox():
            converted = image.copy()
    # The pixels are sRGB now; saved with the former profile they would be converted twice.
    converted.info.pop("icc_profile", None)
    if image.has_transparency_data:
        converted.putalpha(image.convert("RGBA").getchannel("A"))
        converted.info.pop("transparency", None)
    return converted


def check_shape(image: Image.Image, name: str) -> None:
    """Raise ImageError if an image has several frames or pages, or is too small or too long and thin for a judge."""
    if getattr(image, "is_animated", False) and image.format != "MPO":
        raise ImageError(f"{name}: has several frames or pages; save the one that is meant as an image of its own")
    short, long = sorted((image.height, image.width))
    if short < MIN_SIDE:
        raise ImageError(f"{name}: {image.width}x{image.height} is too small; each side needs {MIN_SIDE} pixels")
    if long > MAX_ASPECT * short:
        raise ImageError(
            f"{name}: {image.width}x{image.height} is too long; one side may be {MAX_ASPECT} times the other"
        )


def png_bytes(image: Image.Image, texts: Mapping[str, str] | None = None) -> bytes:
    """Encode the image as PNG, with `texts` in its text chunks."""
    chunks = PngImagePlugin.PngInfo()
    # iTXt: the other chunks of texts hold Latin letters only.
    for key, text in (texts or {}).items():
        chunks.add_itxt(key, text)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", pnginfo=chunks)
    return buffer.getvalue()


def recipe_of(source: Path | bytes) -> dict[str, str]:
    """Read the recipe of a generated image, from a file or its content; empty for an image of other programs."""
    texts = png_texts(source)
    if not texts.get("Software", "").startswith("pacorl "):
        return {}
    return texts


def png_texts(source: Path | bytes) -> dict[str, str]:
    """Read the text chunks of a PNG, a file or its content; empty if it is missing or broken."""
    try:
        data = source if isinstance(source, bytes) else read_bytes(source, limit=MAX_BYTES)
        with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
            image.load()  # Pillow reads the chunks behind the pixels only now
            return {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}
    except Exception:  # whatever a decoder raises
        return {}
