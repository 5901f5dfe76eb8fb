"""What every page is drawn of: numbers in words, escaped SVG elements, plots of few numbers, images as data URLs.

Colours come from the page's stylesheet through classes and custom properties, so that every plot follows the reader's
light or dark setting.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup, escape
from PIL import Image

from pacorl.core.ranking import Interval
from pacorl.io.documents import read_object
from pacorl.report.folder import Matrix

Rgb = tuple[int, int, int]

WORDS = read_object(Path(__file__).with_name("words.json"))
LABELS: Mapping[str, str] = WORDS["labels"]
"""Name of a quantity → how it reads. A name that is not here reads as its own words."""
MEANINGS: Mapping[str, str] = WORDS["meanings"]
"""Metric → one sentence for the reader of a page; its order is the order of the page."""
MINUS = "\N{MINUS SIGN}"

LIGHT_RAMP: tuple[Rgb, ...] = ((242, 238, 229), (176, 211, 207), (70, 150, 152), (9, 84, 92))
DARK_RAMP: tuple[Rgb, ...] = ((40, 42, 44), (33, 76, 80), (42, 133, 135), (126, 217, 208))
"""P(Yes) from 0 to 1, the colours between by straight lines; the more consistent a pair, the more ink it gets."""

CELL = 44  # of a pair matrix, in the units of its view box

PIXEL_ART_BELOW = 200 * 200
"""An image of fewer pixels is kept lossless and shown with hard pixel edges."""
LADDER = ((1024, 88), (768, 86), (768, 76), (512, 76), (384, 66))
"""(longer side in pixels, JPEG quality), tried in turn until an image fits its budget; the last is always taken."""
BUDGET = 200_000
"""Bytes of one data URL: a page of 36 images stays under 8 MB."""
COLUMN = 384
"""CSS pixels of an image beside another; small ones grow by the largest whole factor that fits."""
WIDE = 1.8
"""An image at least so much wider than high is shown at twice the column."""


# --- words -----------------------------------------------------------------------------------------------------------


def label(name: str) -> str:
    """`grad_norm` → `Gradient norm`."""
    words = LABELS.get(name) or name.replace("_", " ").replace("/", " · ").strip()
    return words[:1].upper() + words[1:]


def amount(value: float | None) -> str:
    """About three significant figures with a real minus sign; – for nothing."""
    if value is None:
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    elif size < 10:
        text = f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"
    else:
        text = f"{value:.1f}" if size < 1000 else f"{value:.0f}"
    return text.replace("-", MINUS)


def score(value: float | None) -> str:
    """A value between 0 and 1 to three places, so that nearly 0 reads as 0; any other as `amount` says."""
    return f"{value:.3f}" if value is not None and 0 <= value <= 1 else amount(value)


def change(value: float | None) -> str:
    """An amount that says its direction: `+0.120`."""
    return ("+" if value is not None and value > 0 else "") + amount(value)


def duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_seconds} s"
    return f"{minutes} min {rest_seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


# --- elements --------------------------------------------------------------------------------------------------------


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element with everything escaped; a trailing underscore in an attribute is dropped, others become dashes."""
    # A page has thousands of elements, and `Markup.format` takes several times as long as `escape`. Two decimals are a
    # hundredth of a pixel; more would double the page.
    shown = {key: f"{v:.2f}".rstrip("0").rstrip(".") if isinstance(v, float) else v for key, v in attributes.items()}
    written = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(text)}"' for key, text in shown.items())
    return Markup(f"<{name}{written}>{''.join(map(escape, children))}</{name}>")


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values to coordinates."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def padded(values: Iterable[float]) -> tuple[float, float]:
    """The ends of the values with some air; zero is taken in if it is near, one value gets a range of its own."""
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    air = (high - low) * 0.08 or abs(high) * 0.08 or 1.0
    reach = 0.4 * max(abs(low), abs(high))
    return (0.0 if 0 <= low <= reach else low - air), (0.0 if -reach <= high <= 0 and low < 0 else high + air)


def ticks(low: float, high: float) -> list[float]:
    """About five round values (1, 2, 2.5 or 5 times a power of ten apart) between two ends."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerances keep a tick that rounding has put just beyond its step or its end.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# --- intervals, changes, shares --------------------------------------------------------------------------------------


def ends_of(interval: Interval) -> tuple[float, float]:
    """The interval's ends; the mean for one that has none."""
    low, high = interval.low, interval.high
    return (interval.mean if low is None else low), (interval.mean if high is None else high)


def unit_axis(before: Interval | None, after: Interval | None) -> bool:
    """Whether all values lie in 0..1."""
    return all(0 <= end <= 1 for side in (before, after) if side for end in ends_of(side))


def interval_svg(before: Interval | None, after: Interval | None) -> Markup:
    """Before above after on one axis: 0 to 1 if all values lie there, else just around them."""
    sides = [(name, y, side) for name, y, side in (("before", 12, before), ("after", 24, after)) if side]
    low, high = (0.0, 1.0) if unit_axis(before, after) else padded(end for *_, side in sides for end in ends_of(side))
    scale = Scale(low, high, 6, 254)
    drawn = [tag("line", x1=x, x2=x, y1=3, y2=33, class_="grid") for x in (6, 130, 254)]
    for name, y, side in sides:
        left, right = map(scale, ends_of(side))
        whisker = tag("line", x1=left, x2=right, y1=y, y2=y)
        drawn.append(tag("g", whisker, tag("circle", cx=scale(side.mean), cy=y, r=4.5), class_=name))
    return tag("svg", *drawn, class_="interval", viewBox="0 0 260 36", aria_hidden="true")


def changes_svg(changes: Sequence[float], links: Mapping[int, str]) -> Markup:
    """One bar per image in the order given; those in `links` (index → element id) are strong and lead there."""
    if not changes:
        return Markup("")
    width = 1200 / len(changes)
    gap = min(4.0, width / 4)
    scale = Scale(min(0.0, *changes), max(1e-9, *changes), 84, 4)
    bars = []
    for index, value in enumerate(changes):
        top, bottom = sorted((scale(value), scale(0)))
        # No bar is lower than a unit: a change of 0 is an image too.
        box = tag("rect", x=index * width + gap / 2, y=top, width=width - gap, height=max(bottom - top, 1.0))
        if index in links:
            box = tag("a", tag("title", change(value)), box, href=f"#{links[index]}", tabindex=-1)
        bars.append(box)
    zero = tag("line", x1=0, x2=1200, y1=scale(0), y2=scale(0), class_="zero")
    return tag(
        "svg", *bars, zero, class_="changes", viewBox="0 0 1200 88", preserveAspectRatio="none", aria_hidden="true"
    )


def shares_svg(seconds: Mapping[str, float]) -> Markup:
    """One bar cut into phases in proportion to their seconds."""
    total = sum(seconds.values())
    pieces, x = [], 0.0
    for index, (name, spent) in enumerate(seconds.items()):
        width = spent / total * 1200
        title = tag("title", f"{name}: {duration(spent)}")
        pieces.append(tag("rect", title, x=x, y=0, width=max(width - 3, 1.0), height=20, class_=f"fill-{index % 6}"))
        x += width
    label = "Share of each phase of the time"
    box = {"viewBox": "0 0 1200 20", "preserveAspectRatio": "none"}
    return tag("svg", *pieces, class_="shares", role="img", aria_label=label, **box)


# --- pair matrices ---------------------------------------------------------------------------------------------------


def pair_matrix_svg(p_yes: Matrix, *, title: str = "P(Yes) of each pair") -> Markup:
    """P(Yes) of every pair of `K` panels as a heat map with numbers; panel numbers stand on the diagonal.

    p_yes: K × K, None if there is no judgement. An empty matrix gives an empty text.
    """
    if not p_yes:
        return Markup("")
    side = len(p_yes) * CELL
    cells = [_cell(value, row, col) for row, values in enumerate(p_yes) for col, value in enumerate(values)]
    return tag("svg", tag("title", title), *cells, class_="matrix", viewBox=f"0 0 {side} {side}", role="img")


def _cell(value: float | None, row: int, col: int) -> Markup:
    x, y = col * CELL, row * CELL
    box = {"x": x + 1, "y": y + 1, "width": CELL - 2, "height": CELL - 2, "rx": 4}
    middle = {"x": x + CELL / 2, "y": y + CELL / 2 + 4.5, "text_anchor": "middle"}
    if row == col:
        return tag("text", str(row + 1), **middle, class_="panel-number")
    if value is None:
        return tag("rect", **box, class_="unjudged") + tag("text", "–", **middle, class_="panel-number")
    light, dark = colour(LIGHT_RAMP, value), colour(DARK_RAMP, value)
    style = f"--l:{_hex(light)};--lt:{readable_on(light)};--d:{_hex(dark)};--dt:{readable_on(dark)}"
    name = tag("title", f"panels {row + 1} and {col + 1}: P(Yes) = {value:.3f}")
    return tag("g", name, tag("rect", **box), tag("text", f"{value:.2f}", **middle), class_="judged", style=style)


def colour(ramp: Sequence[Rgb], value: float) -> Rgb:
    """The colour of `value`, clamped to 0..1."""
    position = min(max(value, 0.0), 1.0) * (len(ramp) - 1)
    below = min(int(position), len(ramp) - 2)  # the last colour belongs to the last stretch
    red, green, blue = (
        round(a + (b - a) * (position - below)) for a, b in zip(ramp[below], ramp[below + 1], strict=True)
    )
    return red, green, blue


def readable_on(background: Rgb) -> str:
    """Black or white, whichever has the larger contrast (WCAG 2.2); it is at least 4.5 on every colour."""
    level = luminance(background) + 0.05
    return "#000" if level / 0.05 >= 1.05 / level else "#fff"


def luminance(rgb: Rgb) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (channel / 255 for channel in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _hex(rgb: Rgb) -> str:
    return "#" + bytes(rgb).hex()


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
    """The image at the size that suits it."""
    pixel_art = image.width * image.height < PIXEL_ART_BELOW
    room = COLUMN * 2 if image.width >= WIDE * image.height else COLUMN
    # Whole factors only: pixels of unequal sizes would look like a pattern that the generator made.
    factor = max(1, room // image.width) if pixel_art else room / image.width
    width, height = round(image.width * factor), round(image.height * factor)
    return ShownImage(url=data_url(image), width=width, height=height, pixel_art=pixel_art)


def data_url(image: Image.Image) -> str:
    """The image as a data URL of about BUDGET bytes at most: PNG below PIXEL_ART_BELOW, else JPEG."""
    image = image.convert("RGB")  # JPEG has no transparency, and a page no use for it
    if image.width * image.height < PIXEL_ART_BELOW:
        return f"data:image/png;base64,{_base64(image, 'PNG')}"
    for side, quality in LADDER:
        scale = min(1.0, side / max(image.size))
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        resized = image if size == image.size else image.resize(size, Image.Resampling.LANCZOS)
        encoded = _base64(resized, "JPEG", quality=quality)
        if len(encoded) <= BUDGET:
            break
    return f"data:image/jpeg;base64,{encoded}"


def _base64(image: Image.Image, kind: str, **options: int) -> str:
    buffer = io.BytesIO()
    image.save(buffer, kind, optimize=True, **options)
    return base64.b64encode(buffer.getvalue()).decode()
