"""Elements of a page: numbers in words, escaped SVG elements, plots of few numbers, images as data URLs.

Colours come from the page's stylesheet through classes and custom properties, so that every plot follows the reader's
light or dark setting.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape
from PIL import Image

from pacorl.core.ranking import Interval
from pacorl.io.documents import read_object

Matrix = tuple[tuple[float | None, ...], ...]
"""P(Yes) of each pair of panels, symmetric; None on the diagonal and for a failed question."""

WORDS = read_object(Path(__file__).with_name("words.json"))
LABELS: Mapping[str, str] = WORDS["labels"]
"""Name of a quantity → its label. `label` turns unlisted names into words."""
MEANINGS: Mapping[str, str] = WORDS["meanings"]
"""Metric → one sentence for the reader of a page; its order is the order of the page."""
MINUS = "\N{MINUS SIGN}"

CELL = 44
"""Side of a cell of a pair matrix, in the units of its view box."""
STRONG = 0.728
"""P(Yes) from which a light cell has white text: 4.5 : 1 on every colour."""

PIXEL_ART_BELOW = 200 * 200
"""An image of fewer pixels is kept lossless and shown with hard pixel edges."""
LADDER = ((1024, 88), (768, 76), (512, 76), (384, 66))
"""(longer side in pixels, JPEG quality), tried in turn until an image fits its budget; the last is always taken."""
BUDGET = 200_000
"""Bytes of one data URL: a page of 36 images stays under 8 MB."""
COLUMN = 384
"""CSS pixels of an image's column; small images grow by the largest whole factor that fits."""
WIDE = 1.8
"""An image at least so much wider than high is shown at twice the column."""


# --- words -----------------------------------------------------------------------------------------------------------


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


def score(value: float | None) -> str:
    """Format a value between 0 and 1 to three places, so that nearly 0 reads as 0; any other as `amount` does."""
    if value is not None and 0 <= value <= 1:
        return f"{value:.3f}"
    return amount(value)


def change(value: float | None) -> str:
    """Format an amount with its sign: `+0.120`."""
    sign = "+" if value is not None and value > 0 else ""
    return sign + amount(value)


def interval_text(figure: Interval, *, signed: bool = False) -> str:
    """Format as `0.549 (0.412 to 0.683)`; the mean alone without an interval."""
    form = "+z.3f" if signed else "z.3f"
    text = f"{figure.mean:{form}}"
    if figure.low is not None and figure.high is not None:
        text += f" ({figure.low:{form}} to {figure.high:{form}})"
    return text.replace("-", MINUS)


# --- elements --------------------------------------------------------------------------------------------------------


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """Build an element with everything escaped; in attributes a trailing underscore is dropped and `_` becomes `-`."""
    # A page has thousands of elements, and `Markup.format` takes several times as long as `escape`.
    written = ""
    for key, value in attributes.items():
        # Two decimals are a hundredth of a pixel; more would double the page.
        shown = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
        written += f' {key.rstrip("_").replace("_", "-")}="{escape(shown)}"'
    content = "".join([escape(child) for child in children])
    return Markup(f"<{name}{written}>{content}</{name}>")


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def extent(values: Iterable[float]) -> tuple[float, float]:
    """Return an axis' ends: 8 % of air around the values."""
    numbers = list(values)
    low = min(numbers)
    high = max(numbers)
    air = (high - low) * 0.08 or abs(high) * 0.08 or 1.0
    return low - air, high + air


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values (1, 2, 2.5 or 5 times a power of ten apart) between two ends."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerances keep a tick just beyond its step or its end by rounding.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# --- intervals -------------------------------------------------------------------------------------------------------


def interval_svg(before: Interval | None, after: Interval | None) -> Markup:
    """Draw before above after on one axis: 0 to 1 if all values are in it, else just around them."""
    sides = [(name, y, side) for name, y, side in (("before", 12, before), ("after", 24, after)) if side]
    ends = {name: _ends(side) for name, _, side in sides}
    values = [end for pair in ends.values() for end in pair]
    low, high = (0.0, 1.0) if min(values) >= 0 and max(values) <= 1 else extent(values)
    scale = Scale(low, high, 6, 254)

    drawn = [tag("line", x1=x, x2=x, y1=3, y2=33, class_="grid") for x in (6, 130, 254)]
    for name, y, side in sides:
        left, right = ends[name]
        whisker = tag("line", x1=scale(left), x2=scale(right), y1=y, y2=y)
        drawn.append(tag("g", whisker, tag("circle", cx=scale(side.mean), cy=y, r=4.5), class_=name))
    for x, value, anchor in ((6, low, "start"), (254, high, "end")):
        drawn.append(tag("text", f"{value:.3g}".replace("-", MINUS), x=x, y=48, text_anchor=anchor))
    return tag("svg", *drawn, class_="interval", viewBox="0 0 260 52", aria_hidden="true")


def _ends(interval: Interval) -> tuple[float, float]:
    if interval.low is None or interval.high is None:
        return interval.mean, interval.mean
    return interval.low, interval.high


# --- pair matrices ---------------------------------------------------------------------------------------------------


def pair_matrix_svg(p_yes: Matrix, *, title: str = "P(Yes) of each pair") -> Markup:
    """Draw P(Yes) of every pair of `K` panels as a heat map with numbers; the diagonal has the panels' numbers.

    p_yes: K × K, None if there is no judgement. An empty matrix gives an empty text.
    """
    if not p_yes:
        return Markup("")
    side = len(p_yes) * CELL
    cells = []
    for row, values in enumerate(p_yes):
        cells += [_cell(value, row, col) for col, value in enumerate(values)]
    return tag("svg", tag("title", title), *cells, class_="matrix", viewBox=f"0 0 {side} {side}", role="img")


def _cell(value: float | None, row: int, col: int) -> Markup:
    x = col * CELL
    y = row * CELL
    box = {"x": x + 1, "y": y + 1, "width": CELL - 2, "height": CELL - 2, "rx": 4}
    middle = {"x": x + CELL / 2, "y": y + CELL / 2 + 4.5, "text_anchor": "middle"}
    if row == col:
        return tag("text", str(row + 1), **middle, class_="panel-number")
    if value is None:
        return tag("rect", **box, class_="unjudged") + tag("text", "–", **middle, class_="panel-number")
    name = tag("title", f"panels {row + 1} and {col + 1}: P(Yes) = {value:.3f}")
    kind = "judged strong" if value >= STRONG else "judged"
    number = tag("text", f"{value:.2f}", **middle)
    return tag("g", name, tag("rect", **box), number, class_=kind, style=f"--p:{100 * value:.0f}%")


# --- images ----------------------------------------------------------------------------------------------------------


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
    """Encode the image and choose its size on the page."""
    pixel_art = image.width * image.height < PIXEL_ART_BELOW
    # A wide image, such as a grid of one row, takes two columns.
    column = COLUMN * 2 if image.width >= WIDE * image.height else COLUMN
    # Whole factors for pixel art: pixels of unequal sizes would look like a generated pattern.
    factor = max(1, column // image.width) if pixel_art else column / image.width
    width = round(image.width * factor)
    height = round(image.height * factor)
    return ShownImage(url=data_url(image), width=width, height=height, pixel_art=pixel_art)


def data_url(image: Image.Image) -> str:
    """Encode the image as a data URL of about BUDGET bytes at most: PNG below PIXEL_ART_BELOW, else JPEG."""
    image = image.convert("RGB")  # JPEG has no transparency, and a page no use for it
    if image.width * image.height < PIXEL_ART_BELOW:
        return f"data:image/png;base64,{_base64(image, 'PNG')}"

    # The largest that fits the budget: a page of many images is mailed.
    for side, quality in LADDER:
        resized = image.copy()
        resized.thumbnail((side, side), Image.Resampling.LANCZOS)
        encoded = _base64(resized, "JPEG", quality=quality)
        if len(encoded) <= BUDGET:
            break
    return f"data:image/jpeg;base64,{encoded}"


def _base64(image: Image.Image, kind: str, **options: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, **options)
    return base64.b64encode(buffer.getvalue()).decode()
