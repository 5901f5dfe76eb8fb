"""What every plot of a page is made of: escaped elements and straight scales.

Colours come from the page's stylesheet through classes and custom properties, so that every plot follows the
reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from markupsafe import Markup


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An element with everything escaped; a trailing underscore in an attribute is dropped, others become dashes."""
    written = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _short(value)) for key, value in attributes.items()
    )
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, Markup("").join(children))


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


@dataclass(frozen=True, slots=True)
class Scale:
    """A straight line from values to places on the paper."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def padded(values: Iterable[float], *, share: float = 0.08) -> tuple[float, float]:
    """The ends of the values with some air; zero is taken in where it is near, one value gets a range of its own."""
    known = list(values)
    low, high = min(known), max(known)
    air = (high - low) * share or abs(high) * share or 1.0
    reach = 0.4 * max(abs(low), abs(high))
    return (0.0 if 0 <= low <= reach else low - air), (0.0 if -reach <= high <= 0 and low < 0 else high + air)


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """About `count` round values (1, 2, 2.5 or 5 times a power of ten apart) between two ends."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
