"""Heroes drawn from references: tasks for the tiny editor, and grades by the oracle.

A task has two or three panels of one hero and a text of a new scene, which names none of the hero's traits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.tiny.oracle import read_panels
from pacorl.tiny.world import IDENTITY, SCENES, VALUES, Panel, Split, draw, split_of_hero, where_text

if TYPE_CHECKING:
    from PIL.Image import Image

HERO_GRADES = ("identity", "all_traits", "scene", "pasted", "valid")


def heroes_of(split: Split) -> tuple[tuple[str, str, str], ...]:
    """List the heroes (colour, shape, hat) of a split."""
    heroes = itertools.product(*(VALUES[name] for name in IDENTITY))
    return tuple(hero for hero in heroes if split_of_hero(*hero) == split)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class HeroTask:
    """A panel to draw, and panels of the same hero."""

    asked: Panel
    references: tuple[Panel, ...]
    text: str
    """The scene, mostly with its place and palette, and never with the hero's traits."""


def panel_of(hero: Sequence[str], rng: Random) -> Panel:
    """Draw a panel of a hero (colour, shape, hat)."""
    pose, prop = rng.choice(SCENES)
    return Panel(*hero, rng.choice(VALUES["palette"]), rng.choice(VALUES["place"]), pose, prop)


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
        text = f"{where_text({'place': asked.place, 'palette': asked.palette})}, {text}"
    return HeroTask(asked, tuple(references), text)


def hero_tasks(split: Split, count: int, *, seed: int = 0) -> list[HeroTask]:
    """Draw `count` tasks about heroes of one split, which take turns.

    References have the panel's place and palette: the judge's question about two images asks for one style, too.
    """
    rng = Random(f"heroes-{split}-{seed}")
    heroes = list(heroes_of(split))
    rng.shuffle(heroes)
    return [draw_task(heroes[index % len(heroes)], rng, elsewhere=0.0) for index in range(count)]


def write_heroes(folder: Path, tasks: Sequence[HeroTask], *, name: str, pixels: int = 64) -> Path:
    """Draw the references as `folder/name/0000-0.png` … and write the records as `folder/name.jsonl`."""
    rows = []
    for number, task in enumerate(tasks):
        images = []
        for position, reference in enumerate(task.references):
            images.append(f"{name}/{number:04d}-{position}.png")
            write_atomic(folder / images[-1], png_bytes(draw(reference, pixels)))
        row = {
            "prompt": task.text,
            "layout": "1x1",
            "panels": [task.text],
            "characters": {"hero": {"description": "hero", "images": images}},
        }
        rows.append(row)
    path = folder / f"{name}.jsonl"
    write_jsonl(path, rows)
    return path


def grade_heroes(tasks: Sequence[HeroTask], images: Sequence[Image]) -> dict[str, float]:
    """Return the HERO_GRADES of images, each in 0..1, means over images.

    Returns:
        identity: share of colour, shape and hat that equal the hero's.
        all_traits: share of images in which all three do.
        scene: share of palette, place, pose and prop that equal the text's.
        pasted: share of images whose pose and prop are those of one reference.
        valid: share of recognised images; all grades of the rest are 0.
    """
    rows = []
    for task, shown in zip(tasks, read_panels(images), strict=True):
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
