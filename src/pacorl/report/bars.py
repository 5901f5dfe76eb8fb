"""Plots of few numbers: intervals before and after, the changes of all sheets, the shares of phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pacorl.report.svg import Scale, padded, tag
from pacorl.report.words import change, duration


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its interval; the ends are None where there is none."""

    mean: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        return (self.mean if self.low is None else self.low, self.mean if self.high is None else self.high)

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of 0; without an interval nothing is excluded."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def interval_svg(before: Interval | None, after: Interval | None) -> Markup:
    """Before above after on one axis: 0 to 1 where all values lie there, else just around them."""
    sides = {name: side for name, side in (("before", before), ("after", after)) if side}
    low, high = (0.0, 1.0) if unit_axis(before, after) else padded(_ends(before, after))
    scale = Scale(low, high, 6, 254)
    frame = [tag("line", x1=x, x2=x, y1=3, y2=33, class_="grid") for x in (6, 130, 254)]
    marks = [_mark(side, scale, 12 if name == "before" else 24, name) for name, side in sides.items()]
    return tag("svg", *frame, *marks, class_="interval", viewBox="0 0 260 36", aria_hidden="true")


def unit_axis(before: Interval | None, after: Interval | None) -> bool:
    """Whether all values lie in 0..1."""
    return all(0 <= end <= 1 for end in _ends(before, after))


def _ends(before: Interval | None, after: Interval | None) -> list[float]:
    return [end for side in (before, after) if side for end in side.ends]


def _mark(side: Interval, scale: Scale, y: float, name: str) -> Markup:
    low, high = side.ends
    whisker = tag("line", x1=scale(low), x2=scale(high), y1=y, y2=y)
    return tag("g", whisker, tag("circle", cx=scale(side.mean), cy=y, r=4.5), class_=name)


def changes_svg(changes: Sequence[float], links: Mapping[int, str]) -> Markup:
    """One bar per sheet in the order given; the places in `links` (index → element id) are strong and lead there."""
    if not changes:
        return Markup("")
    width = 1200 / len(changes)
    scale = Scale(min(0.0, *changes), max(1e-9, *changes), 84, 4)
    bars = [_bar(index * width, width, value, scale, links.get(index)) for index, value in enumerate(changes)]
    zero = tag("line", x1=0, x2=1200, y1=scale(0), y2=scale(0), class_="zero")
    return tag(
        "svg", *bars, zero, class_="changes", viewBox="0 0 1200 88", preserveAspectRatio="none", aria_hidden="true"
    )


def _bar(x: float, width: float, value: float, scale: Scale, link: str | None) -> Markup:
    top, bottom = sorted((scale(value), scale(0)))
    gap = min(4.0, width / 4)
    box = tag("rect", x=x + gap / 2, y=top, width=width - gap, height=max(bottom - top, 1.0))
    if link is None:
        return box
    return tag("a", tag("title", change(value)), box, href=f"#{link}", tabindex=-1)


def shares_svg(seconds: Mapping[str, float]) -> Markup:
    """One bar cut into phases in proportion to their seconds."""
    total = sum(seconds.values())
    pieces, x = [], 0.0
    for index, (name, spent) in enumerate(seconds.items()):
        width = spent / total * 1200
        title = tag("title", f"{name}: {duration(spent)}")
        pieces.append(tag("rect", title, x=x, y=0, width=max(width - 3, 1.0), height=20, class_=f"fill-{index % 6}"))
        x += width
    return tag("svg", *pieces, class_="shares", viewBox="0 0 1200 20", preserveAspectRatio="none", role="img")
