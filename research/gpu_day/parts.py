"""The parts of the day: their expected seconds on an H200, their value, and the order that follows from both.

Importing this file imports no torch: a part's function is looked up in the part's own process.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

Record = dict[str, Any]
Run = Callable[[argparse.Namespace], Iterator[Record]]


class SkipPart(Exception):
    """This machine cannot run the part; the message is the reason."""


class UnusableMachine(Exception):
    """This machine can run no part; the message is the reason and the fix."""


@dataclass(frozen=True, slots=True)
class Part:
    """A measurement in a process of its own."""

    name: str
    function: str
    """Module of this package and function in it, as `module:function`."""
    seconds: int
    """Expected on an H200, where all but the product at full depth were measured."""
    value: int
    """Worth relative to the other parts."""
    arguments: tuple[str, ...] = ()
    """First arguments of the function."""

    @property
    def limit(self) -> float:
        """Seconds after which the process is killed."""
        return 60 + 2.5 * self.seconds

    def load(self) -> Run:
        """Import the part's function."""
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f".{module}", __package__), name)
        return partial(function, *self.arguments)


def form_part(form: str, seconds: int, value: int) -> Part:
    return Part(f"form-{form}", "forms:measure_form", seconds, value, (form,))


ALL = (
    Part("machine", "machine:describe_machine", 25, 1000),
    form_part("bf16", 50, 120),
    form_part("int8", 50, 90),
    form_part("streamed", 50, 90),
    Part("full", "forms:measure_full", 100, 110),
    Part("full-recipe", "forms:measure_recipe", 205, 170),
    form_part("compiled", 190, 120),
    form_part("compiled-int8", 220, 60),
    Part("judge", "judging:measure_judge", 25, 70),
    Part("product", "product:measure_product", 440, 220),
)


def by_value(parts: Sequence[Part]) -> list[Part]:
    """Sort parts by value per expected second, highest first."""
    return sorted(parts, key=lambda part: -part.value / part.seconds)


PARTS: Mapping[str, Part] = {part.name: part for part in by_value(ALL)}
