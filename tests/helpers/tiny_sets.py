"""Sets of the tiny world: consistent ones, as a prompt asks for them, and as an unreliable generator draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from PIL.Image import Image

from pacorl.core.grid import join
from pacorl.tiny.words import asked_in
from pacorl.tiny.world import LOOKS, SCENES, VALUES, Panel, draw
from pacorl.types import Grid, Prompt


def set_of(looks: Sequence[str], count: int, rng: Random) -> list[Panel]:
    """Draw `count` panels with the same looks in one place, in different scenes."""
    place = rng.choice(VALUES["place"])
    return [Panel(*looks, place, *scene) for scene in rng.sample(SCENES, count)]  # type: ignore[call-arg]


def draw_grid(panels: Sequence[Panel], grid: Grid, panel_size: int) -> Image:
    """Draw a grid image."""
    return join([draw(panel, panel_size) for panel in panels], grid)


def panels_of_prompt(prompt: Prompt) -> list[Panel]:
    """Return panels as the prompt asks; looks that its theme does not name follow from its id."""
    rng = Random(prompt.id)
    looks = {name: rng.choice(VALUES[name]) for name in LOOKS}
    return [Panel(**{**looks, **asked}) for asked in asked_in(prompt)]


def redrawn(panels: Sequence[Panel], *, chance: float, rng: Random) -> list[Panel]:
    """Imitate an unreliable generator: redraw each look with probability `chance`."""
    drawn = []
    for panel in panels:
        changes = {name: rng.choice(VALUES[name]) for name in LOOKS if rng.random() < chance}
        drawn.append(replace(panel, **changes))
    return drawn
