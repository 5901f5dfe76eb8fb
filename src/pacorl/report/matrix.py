"""Pair matrices: P(Yes) of every two panels as a heat map with numbers that can be read in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from pacorl.report.folder import Matrix
from pacorl.report.svg import tag

Rgb = tuple[int, int, int]

LIGHT_RAMP: tuple[Rgb, ...] = ((242, 238, 229), (176, 211, 207), (70, 150, 152), (9, 84, 92))
DARK_RAMP: tuple[Rgb, ...] = ((40, 42, 44), (33, 76, 80), (42, 133, 135), (126, 217, 208))
"""P(Yes) from 0 to 1, the colours between by straight lines; the more consistent a pair, the more ink it gets."""

CELL = 44


def pair_matrix_svg(p_yes: Matrix, *, title: str = "P(Yes) of each pair") -> Markup:
    """P(Yes) of every pair of `K` panels as a heat map with numbers; panel numbers stand on the diagonal.

    p_yes: K × K, None where there is no judgement. An empty matrix gives an empty text.
    """
    if not p_yes:
        return Markup("")
    side = len(p_yes) * CELL
    cells = [
        _cell(value, row, col, diagonal=row == col)
        for row, values in enumerate(p_yes)
        for col, value in enumerate(values)
    ]
    return tag("svg", tag("title", title), *cells, class_="matrix", viewBox=f"0 0 {side} {side}", role="img")


def _cell(value: float | None, row: int, col: int, *, diagonal: bool) -> Markup:
    x, y = col * CELL, row * CELL
    if diagonal:
        return _cell_text(str(row + 1), x, y, class_="panel-number")
    if value is None:
        return _cell_box(x, y, class_="unjudged") + _cell_text("–", x, y, class_="panel-number")
    light, dark = colour(LIGHT_RAMP, value), colour(DARK_RAMP, value)
    style = f"--l:{_hex(light)};--lt:{readable_on(light)};--d:{_hex(dark)};--dt:{readable_on(dark)}"
    name = tag("title", f"panels {row + 1} and {col + 1}: P(Yes) = {value:.3f}")
    return tag("g", name, _cell_box(x, y), _cell_text(f"{value:.2f}", x, y), class_="judged", style=style)


def _cell_box(x: float, y: float, **attributes: object) -> Markup:
    return tag("rect", x=x + 1, y=y + 1, width=CELL - 2, height=CELL - 2, rx=4, **attributes)


def _cell_text(text: str, x: float, y: float, **attributes: object) -> Markup:
    return tag("text", text, x=x + CELL / 2, y=y + CELL / 2 + 4.5, text_anchor="middle", **attributes)


def colour(ramp: Sequence[Rgb], value: float) -> Rgb:
    """The colour of `value`, clamped to 0..1."""
    place = min(max(value, 0.0), 1.0) * (len(ramp) - 1)
    below = min(int(place), len(ramp) - 2)
    first, second = ramp[below], ramp[below + 1]
    mixed = [round(a + (b - a) * (place - below)) for a, b in zip(first, second, strict=True)]
    return mixed[0], mixed[1], mixed[2]


def readable_on(background: Rgb) -> str:
    """Black or white, whichever has the larger contrast (WCAG 2.2); it is at least 4.5 on every colour."""
    level = luminance(background) + 0.05
    return "#000" if level / 0.05 >= 1.05 / level else "#fff"


def luminance(rgb: Rgb) -> float:
    """Relative luminance of an sRGB colour (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (channel / 255 for channel in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _hex(rgb: Rgb) -> str:
    return "#" + "".join(f"{channel:02x}" for channel in rgb)
