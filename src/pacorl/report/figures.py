"""Elements of a page: numbers in words, escaped SVG elements, plots of few numbers, images as data URLs.

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

Matrix = tuple[tuple[float | None, ...], ...]
"""P(Yes) of each pair of panels, symmetric; None on the diagonal and for a failed question."""

Rgb = tuple[int, int, int]

WORDS = read_object(Path(__file__).with_name("words.json"))
LABELS: Mapping[str, str] = WORDS["labels"]
"""Name of a quantity → its label. `label` turns unlisted names into words."""
MEANINGS: Mapping[str, str] = WORDS["meanings"]
"""Metric → one sentence for the reader of a page; its order is the order of the page."""
MINUS = "\N{MINUS SIGN}"
PARTS = ("rollout", "reward", "update", "evaluation")
"""Phases of a run, one after another, in the order of their colours; further times are parts of these."""

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
    if size < 1e-3 or size >= 1e6:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    elif size < 10:
        text = f"{value:.3f}" if size >= 0.01 else f"{value:.2g}"
    else:
        text = f"{value:.1f}" if size < 1000 else f"{value:.0f}"
    return text.replace("-", MINUS)


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


def part_colour(name: str, index: int) -> int:
    """Return the number of a part's colour, equal in every plot; an unknown part takes its position's."""
    return PARTS.index(name) if name in PARTS else index % 6


def duration(seconds: float) -> str:
    """`0.8 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest_seconds = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest_seconds} s"
    if minutes < 60:
        return f"{minutes} min {rest_seconds} s"
    return f"{minutes // 60} h {minutes % 60} min"


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


def padded(values: Iterable[float]) -> tuple[float, float]:
    """Return an axis' ends: 8 % of air around the values, and zero included if it is near."""
    numbers = list(values)
    low = min(numbers)
    high = max(numbers)
    air = (high - low) * 0.08 or abs(high) * 0.08 or 1.0
    reach = 0.4 * max(abs(low), abs(high))
    start = 0.0 if 0 <= low <= reach else low - air
    end = 0.0 if -reach <= high <= 0 and low < 0 else high + air
    return start, end


def ticks(low: float, high: float) -> list[float]:
    """Return about five round values (1, 2, 2.5 or 5 times a power of ten apart) between two ends."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    # The tolerances keep a tick just beyond its step or its end by rounding.
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


# --- intervals, changes, shares --------------------------------------------------------------------------------------


def ends_of(interval: Interval) -> tuple[float, float]:
    """Return the interval's ends; the mean in place of a missing end."""
    low = interval.mean if interval.low is None else interval.low
    high = interval.mean if interval.high is None else interval.high
    return low, high


def unit_axis(before: Interval | None, after: Interval | None) -> bool:
    """Whether all ends are in 0..1."""
    return all(0 <= end <= 1 for end in _all_ends(before, after))


def _all_ends(before: Interval | None, after: Interval | None) -> list[float]:
    ends: list[float] = []
    for side in (before, after):
        if side:
            ends += ends_of(side)
    return ends


def interval_svg(before: Interval | None, after: Interval | None, *, labelled: bool = False) -> Markup:
    """Draw before above after on one axis: 0 to 1 if all values are in it, else just around them.

    labelled: whether the axis has its numbers below it, for rows of different axes.
    """
    low, high = (0.0, 1.0) if unit_axis(before, after) else padded(_all_ends(before, after))
    scale = Scale(low, high, 6, 254)
    drawn = [tag("line", x1=x, x2=x, y1=3, y2=33, class_="grid") for x in (6, 130, 254)]
    for name, y, side in (("before", 12, before), ("after", 24, after)):
        if side:
            left, right = ends_of(side)
            whisker = tag("line", x1=scale(left), x2=scale(right), y1=y, y2=y)
            drawn.append(tag("g", whisker, tag("circle", cx=scale(side.mean), cy=y, r=4.5), class_=name))
    if not labelled:
        return tag("svg", *drawn, class_="interval", viewBox="0 0 260 36", aria_hidden="true")
    for x, value, anchor in ((6, low, "start"), (130, (low + high) / 2, "middle"), (254, high, "end")):
        number = f"{value:.4g}".replace("-", MINUS)
        drawn.append(tag("text", number, x=x, y=50, text_anchor=anchor))
    return tag("svg", *drawn, class_="interval labelled", viewBox="0 0 260 54", aria_hidden="true")


def changes_svg(changes: Sequence[float], links: Mapping[int, str]) -> Markup:
    """Draw one bar per image in the order given; a bar in `links` (index → element id) is strong and links there."""
    if not changes:
        return Markup("")
    # Bars from zero, whose line may be anywhere in the plot.
    width = 1200 / len(changes)
    gap = min(4.0, width / 4)
    scale = Scale(min(0.0, *changes), max(1e-9, *changes), 84, 4)
    bars = []
    for index, value in enumerate(changes):
        top, bottom = sorted((scale(value), scale(0)))
        # At least one unit high, so that a change of 0 is visible.
        box = tag("rect", x=index * width + gap / 2, y=top, width=width - gap, height=max(bottom - top, 1.0))
        if index in links:
            box = tag("a", tag("title", change(value)), box, href=f"#{links[index]}", tabindex=-1)
        bars.append(box)
    zero = tag("line", x1=0, x2=1200, y1=scale(0), y2=scale(0), class_="zero")
    return tag(
        "svg", *bars, zero, class_="changes", viewBox="0 0 1200 88", preserveAspectRatio="none", aria_hidden="true"
    )


def shares_svg(seconds: Mapping[str, float]) -> Markup:
    """Draw one bar cut into phases in proportion to their seconds."""
    total = sum(seconds.values())
    pieces = []
    x = 0.0
    for index, (name, spent) in enumerate(seconds.items()):
        width = spent / total * 1200
        title = tag("title", f"{name}: {duration(spent)}")
        pieces.append(
            tag(
                "rect", title, x=x, y=0, width=max(width - 3, 1.0), height=20, class_=f"fill-{part_colour(name, index)}"
            )
        )
        x += width
    label = "Share of each phase of the time"
    box = {"viewBox": "0 0 1200 20", "preserveAspectRatio": "none"}
    return tag("svg", *pieces, class_="shares", role="img", aria_label=label, **box)


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
    light = colour(LIGHT_RAMP, value)
    dark = colour(DARK_RAMP, value)
    style = f"--l:#{bytes(light).hex()};--lt:{readable_on(light)};--d:#{bytes(dark).hex()};--dt:{readable_on(dark)}"
    name = tag("title", f"panels {row + 1} and {col + 1}: P(Yes) = {value:.3f}")
    return tag("g", name, tag("rect", **box), tag("text", f"{value:.2f}", **middle), class_="judged", style=style)


def colour(ramp: Sequence[Rgb], value: float) -> Rgb:
    """Interpolate the colour of `value`, clamped to 0..1."""
    position = min(max(value, 0.0), 1.0) * (len(ramp) - 1)
    below = min(int(position), len(ramp) - 2)  # the last colour belongs to the last stretch
    mixed = zip(ramp[below], ramp[below + 1], strict=True)
    red, green, blue = (round(start + (end - start) * (position - below)) for start, end in mixed)
    return red, green, blue


def readable_on(background: Rgb) -> str:
    """Select black or white by the larger contrast (WCAG 2.2); it is at least 4.5 on every colour."""
    level = luminance(background) + 0.05
    if level / 0.05 >= 1.05 / level:
        return "#000"
    return "#fff"


def luminance(rgb: Rgb) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2)."""
    linear = []
    for channel in rgb:
        c = channel / 255
        linear.append(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


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
    factor = column / image.width
    if pixel_art:
        # Whole factors only: pixels of unequal sizes would look like a generated pattern.
        factor = max(1, column // image.width)
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
