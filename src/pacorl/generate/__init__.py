"""Making images: sets and edits, the best of several by a judge, storyboards.

    from pacorl.generate import Generator, generate_sets, prompt_from
    generator = Generator.load("tiny")
    images = generate_sets(generator, [prompt_from(generator.model, theme="red round hero, crown, night", panels=[…])])
    images[0].image.save("set.png")

compose      a theme and panels, or a record's address → a prompt
sets         `generate_sets`, and candidates by a judge
storyboard   characters, style and scenes in YAML → pages of panels
files        PNGs with their recipe, and a page of them
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pacorl.engine.generator import Generator as Generator
    from pacorl.generate.compose import prompt_from as prompt_from
    from pacorl.generate.sets import GeneratedImage as GeneratedImage
    from pacorl.generate.sets import generate_sets as generate_sets
    from pacorl.generate.storyboard import Storyboard as Storyboard
    from pacorl.generate.storyboard import generate_storyboard as generate_storyboard
    from pacorl.generate.storyboard import read_storyboard as read_storyboard

# Imported when they are first used: reading a storyboard needs no torch.
_HOMES = {
    "Generator": "pacorl.engine.generator",
    "GeneratedImage": "pacorl.generate.sets",
    "Storyboard": "pacorl.generate.storyboard",
    "generate_sets": "pacorl.generate.sets",
    "generate_storyboard": "pacorl.generate.storyboard",
    "prompt_from": "pacorl.generate.compose",
    "read_storyboard": "pacorl.generate.storyboard",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'pacorl.generate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
