"""Making pictures: sets and edits, the best of several by a judge, storyboards.

    from pacorl.generate import Generator, generate_sets, prompt_from
    painter = Generator.load("tiny")
    made = generate_sets(painter, [prompt_from(painter.model, theme="red round hero, crown, night", panels=[…])])
    made[0].sheet.save("set.png")

compose      a theme and panels → a prompt in the T2IS form
generator    a policy with its adapter, by any name
ranking      candidates by what a judge says of them
sets         `generate_sets`
storyboard   characters, style and scenes in YAML → pages of panels
files        PNGs with their recipe, and a page of them

The names below are imported when they are first used: reading a storyboard needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pacorl.engine.generator import Generator
    from pacorl.generate.compose import prompt_from
    from pacorl.generate.sets import Made, generate_sets
    from pacorl.generate.storyboard import Storyboard, paint_storyboard, read_storyboard

__all__ = ["Generator", "Made", "Storyboard", "generate_sets", "paint_storyboard", "prompt_from", "read_storyboard"]

_HOMES = {
    "Generator": "generator",
    "Made": "sets",
    "Storyboard": "storyboard",
    "generate_sets": "sets",
    "paint_storyboard": "storyboard",
    "prompt_from": "compose",
    "read_storyboard": "storyboard",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pacorl.generate' has no attribute {name!r}")
    return getattr(import_module(f"pacorl.generate.{_HOMES[name]}"), name)
