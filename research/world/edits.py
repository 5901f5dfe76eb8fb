"""Edits of the tiny world, and heroes drawn from references: tasks, and grades by the oracle.

An edit changes one attribute of a drawn panel, and the other six stay. A hero's task has two or three panels of one
hero and a text of a new scene, which names none of the hero's traits. The oracle measures and is never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from research.world.world import (
    IDENTITY,
    PALETTE_WORDS,
    PLACE_WORDS,
    SCENES,
    VALUES,
    Oracle,
    Panel,
    Split,
    heroes_of,
    with_another,
)

if TYPE_CHECKING:
    from PIL.Image import Image

INSTRUCTIONS: dict[str, dict[str, str]] = {
    "colour": {value: f"Paint the hero {value}." for value in VALUES["colour"]},
    "hat": {value: f"Give the hero a {value}." for value in VALUES["hat"]},
    "palette": {value: f"Show the scene {words}." for value, words in PALETTE_WORDS.items()},
    "place": {value: f"Put the hero {words}." for value, words in PLACE_WORDS.items()},
    "pose": {value: f"Let the hero be {value}." for value in VALUES["pose"]},
    "prop": {value: f"Put a {value} beside the hero." for value in VALUES["prop"]},
}
"""Attribute → value → the instruction that changes it. A hero of another shape would be another hero."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One attribute of a panel and its new value."""

    before: Panel
    attribute: str
    value: str

    @property
    def instruction(self) -> str:
        """The text of the edit."""
        return INSTRUCTIONS[self.attribute][self.value]

    @property
    def after(self) -> Panel:
        """The edited panel."""
        return replace(self.before, **{self.attribute: self.value})

    @property
    def others(self) -> tuple[str, ...]:
        """The attributes that stay."""
        return tuple(name for name in VALUES if name != self.attribute)


@dataclass(frozen=True, slots=True)
class HeroTask:
    """A panel to draw, and panels of the same hero."""

    asked: Panel
    references: tuple[Panel, ...]
    text: str
    """The scene, mostly with its place and palette, and never with the hero's traits."""


def draw_edit(panel: Panel, attribute: str, rng: Random) -> Edit:
    """Draw another value of `attribute`."""
    return Edit(panel, attribute, getattr(with_another(panel, attribute, rng), attribute))


def panel_of(hero: Sequence[str], rng: Random) -> Panel:
    """Draw a panel of a hero (colour, shape, hat)."""
    pose, prop = rng.choice(SCENES)
    return Panel(*hero, rng.choice(VALUES["palette"]), rng.choice(VALUES["place"]), pose, prop)


def world_edits(split: Split, count: int, *, seed: int = 0) -> list[Edit]:
    """Draw `count` edits of heroes of one split; the attributes of INSTRUCTIONS take turns.

    A new colour or hat makes another hero, possibly of another split: only the sources are held out.
    """
    rng = Random(f"edits-{split}-{seed}")
    heroes, attributes = heroes_of(split), tuple(INSTRUCTIONS)
    edits = []
    for index in range(count):
        edits.append(draw_edit(panel_of(rng.choice(heroes), rng), attributes[index % len(attributes)], rng))
    return edits


def draw_task(hero: Sequence[str], rng: Random, *, elsewhere: float = 0.5) -> HeroTask:
    """Draw two or three references of a hero, and a panel in another scene.

    Args:
        elsewhere: probability that the references have places and palettes of their own instead of the panel's.
    """
    moved = rng.random() < elsewhere
    asked = panel_of(hero, rng)
    references = []
    while len(references) < 2 or (len(references) == 2 and rng.random() < 0.5):
        other = panel_of(hero, rng)
        if (other.pose, other.prop) == (asked.pose, asked.prop):
            continue
        if not moved:
            other = replace(other, palette=asked.palette, place=asked.place)
        references.append(other)

    # What the references share need not be named.
    text = asked.scene
    if moved or rng.random() < 0.5:
        text = f"{PLACE_WORDS[asked.place]} {PALETTE_WORDS[asked.palette]}, {text}"
    return HeroTask(asked, tuple(references), text)


def hero_tasks(split: Split, count: int, *, seed: int = 0) -> list[HeroTask]:
    """Draw `count` tasks about heroes of one split, which take turns.

    References have the panel's place and palette: the judge's question about two images asks for one style, too.
    """
    rng = Random(f"heroes-{split}-{seed}")
    heroes = list(heroes_of(split))
    rng.shuffle(heroes)
    return [draw_task(heroes[index % len(heroes)], rng, elsewhere=0.0) for index in range(count)]


# --- grades ----------------------------------------------------------------------------------------------------

EDIT_GRADES = ("kept", "followed", "edited_well", "valid")
HERO_GRADES = ("identity", "all_traits", "scene", "pasted", "valid")


def grade_edits(edits: Sequence[Edit], images: Sequence[Image], *, oracle: Oracle) -> dict[str, float]:
    """Return the EDIT_GRADES of edited images, each in 0..1, means over images.

    Returns:
        kept: share of the other six attributes that equal the source's.
        followed: share of images with the new value of the edited attribute.
        edited_well: share of images with kept = followed = 1.
        valid: share of recognised images; all grades of the rest are 0.
    """
    rows = []
    for edit, shown in zip(edits, oracle.read(images), strict=True):
        if shown is None:
            rows.append((0.0, 0.0, 0.0, 0.0))
            continue
        kept = _share_equal(shown, edit.before, edit.others)
        followed = float(getattr(shown, edit.attribute) == edit.value)
        rows.append((kept, followed, float(kept == followed == 1), 1.0))
    return dict(zip(EDIT_GRADES, np.mean(rows, 0).tolist(), strict=True))


def grade_heroes(tasks: Sequence[HeroTask], images: Sequence[Image], *, oracle: Oracle) -> dict[str, float]:
    """Return the HERO_GRADES of images, each in 0..1, means over images.

    Returns:
        identity: share of colour, shape and hat that equal the hero's.
        all_traits: share of images in which all three do.
        scene: share of palette, place, pose and prop that equal the text's.
        pasted: share of images whose pose and prop are those of one reference.
        valid: share of recognised images; all grades of the rest are 0.
    """
    rows = []
    for task, shown in zip(tasks, oracle.read(images), strict=True):
        if shown is None:
            rows.append((0.0,) * len(HERO_GRADES))
            continue
        identity = _share_equal(shown, task.asked, IDENTITY)
        scene = _share_equal(shown, task.asked, ("palette", "place", "pose", "prop"))
        pasted = any(shown.scene == reference.scene for reference in task.references)
        rows.append((identity, float(identity == 1), scene, float(pasted), 1.0))
    return dict(zip(HERO_GRADES, np.mean(rows, 0).tolist(), strict=True))


def _share_equal(first: Panel, second: Panel, names: Sequence[str]) -> float:
    return float(np.mean([getattr(first, name) == getattr(second, name) for name in names]))
