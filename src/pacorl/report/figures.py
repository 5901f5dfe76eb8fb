"""Elements of a page: numbers in words, and images as data URLs."""

import base64
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from pacorl.io.documents import read_object

WORDS = read_object(Path(__file__).with_name("words.json"))
LABELS: Mapping[str, str] = WORDS["labels"]
"""Name of a quantity → its label. `label` turns unlisted names into words."""
MEANINGS: Mapping[str, str] = WORDS["meanings"]
"""Metric → one sentence for the reader of a page; its order is the order of the page."""
MINUS = "\N{MINUS SIGN}"

STRONG = 0.728
"""P(Yes) from which a light cell of a pair matrix has white text: 4.5 : 1 on every colour."""

PIXEL_ART_BELOW = 200 * 200
"""An image of fewer pixels is kept lossless and shown with hard pixel edges."""
LARGEST, QUALITY = 768, 80
"""Longer side in pixels and JPEG quality of a larger image, about 100 kB: a page of many images is mailed."""
COLUMN = 384
"""CSS pixels of an image's column; small images grow by the largest whole factor that fits."""
WIDE = 1.8
"""An image at least so much wider than high is shown at twice the column."""


def label(name: str) -> str:
    """`grad_norm` → `Gradient norm`."""
    words = LABELS.get(name) or name.replace("_", " ").replace("/", " · ").strip()
    return words[:1].upper() + words[1:]


def amount(value: float | None) -> str:
    """Format a value with about three significant figures and a real minus sign; – for None."""
    if value is None:
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    places = 3 if size < 10 else 1 if size < 1000 else 0
    form = f".{places}f" if 0.01 <= size < 1e6 else ".2g"
    return f"{value:{form}}".replace("-", MINUS)


def change(value: float | None) -> str:
    """Format a difference with its sign, as `Interval.text` does: `+0.120`."""
    if value is None:
        return "–"
    return f"{value:+z.3f}".replace("-", MINUS)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image as a page shows it; width and height in CSS pixels."""

    url: str
    width: int
    height: int
    pixel_art: bool

    @property
    def wide(self) -> bool:
        return self.width >= WIDE * self.height


def show(image: Image.Image) -> ShownImage:
    """Encode the image as a data URL, PNG or JPEG, and choose its size on the page."""
    pixel_art = image.width * image.height < PIXEL_ART_BELOW
    # A wide image, such as a grid of one row, takes two columns.
    column = COLUMN * 2 if image.width >= WIDE * image.height else COLUMN
    # Whole factors for pixel art: pixels of unequal sizes would look like a generated pattern.
    factor = max(1, column // image.width) if pixel_art else column / image.width
    width = round(image.width * factor)
    height = round(image.height * factor)
    image = image.convert("RGB")  # a copy; JPEG has no transparency, and a page no use for it
    kind = "png"
    if not pixel_art:
        kind = "jpeg"
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, quality=QUALITY)
    url = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return ShownImage(url, width, height, pixel_art)
