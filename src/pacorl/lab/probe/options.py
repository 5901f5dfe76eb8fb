"""Budget and candidates of a probe, which are flags of `pacorl probe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pacorl.config.options import STRONGEST, amount, option
from pacorl.types import Size

Value = TypeVar("Value")


def listed(parse: Callable[[str], Value], example: str) -> Callable[[str], tuple[Value, ...]]:
    """Make a parser of values between commas."""

    def values(text: str) -> tuple[Value, ...]:
        try:
            return tuple(parse(word.strip()) for word in text.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is no list such as {example}") from None

    return values


@dataclass(frozen=True, kw_only=True)
class ProbeOptions:
    """Budget and candidates of a probe; None selects the default candidates of a setting."""

    epochs: float = option(1.0, "The budget, in epochs of the config.", least=0, most=STRONGEST)
    steps: tuple[int, ...] | None = option(
        None, "Stochastic steps to compare, e.g. 0,1,3; all by default.", parse=listed(int, "0,1,3")
    )
    noise_levels: tuple[float, ...] | None = option(
        None, "Noise levels to compare, e.g. 0.5,0.9.", parse=listed(amount, "0.5,0.9")
    )
    sizes: tuple[Size, ...] | None = option(
        None, "Training sizes to compare, e.g. 256x256,384x384.", parse=listed(Size.parse, "256x256,384x384")
    )
    credit: int = option(0, "Groups that compare panel credit with set credit, e.g. 60.", least=0, most=10_000)
