"""A hero drawn from reference images: tasks, the teacher's panels, files, and grades by the oracle.

A task has two or three images of one hero and a text of the new scene, which names none of the hero's traits. The
images have other poses and props, and in training some have other palettes. The oracle measures and is never a reward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image

from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.tiny.characters import IDENTITY, SCENES, VALUES, Oracle, Panel, Split, draw, subjects_of
from pacorl.tiny.words import SCENE
from pacorl.types import Prompt

NAME = "hero"
"""Name and description of the character: the judge learns its traits from the images alone."""
PIXELS = 64
COUNTS: dict[Split, int] = {"train": 288, "dev": 48, "test": 96}
HERO_GRADES = ("identity", "all_traits", "scene", "pasted", "valid")


@dataclass(frozen=True, slots=True)
class HeroTask:
    """A panel to draw, and panels of the same hero."""

    asked: Panel
    references: tuple[Panel, ...]

    @property
    def text(self) -> str:
        """The scene, without the hero's traits."""
        return self.asked.scene_text


def draw_task(subject: Sequence[str], rng: Random, *, other_palette: float = 0.5) -> HeroTask:
    """Draw two or three references and a panel in another scene.

    Args:
        other_palette: probability that a reference has a random palette instead of the panel's.
    """
    scenes = rng.sample(SCENES, rng.choice((3, 4)))
    asked, *references = (Panel(*subject, *scene) for scene in scenes)  # type: ignore[call-arg]
    shown = []
    for reference in references:
        palette = rng.choice(VALUES["palette"]) if rng.random() < other_palette else asked.palette
        shown.append(replace(reference, palette=palette))
    return HeroTask(asked, tuple(shown))


def hero_tasks(split: Split, count: int, *, seed: int = 0) -> list[HeroTask]:
    """Draw `count` tasks about characters of one split, which take turns.

    References have the panel's palette: the judge's question about two images asks for one style, too.
    """
    rng = Random(f"heroes-{split}-{seed}")
    subjects = list(subjects_of(split))
    rng.shuffle(subjects)
    return [draw_task(subjects[index % len(subjects)], rng, other_palette=0.0) for index in range(count)]


def taught_heroes(rng: Random, *, redraw: float, paste: float) -> Iterator[tuple[HeroTask, Panel]]:
    """Yield tasks about training characters without end, and the teacher's panel of each.

    Args:
        redraw: probability that the teacher redraws a trait of the hero.
        paste: probability that it copies a reference instead.
    """
    subjects = subjects_of("train")
    while True:
        task = draw_task(rng.choice(subjects), rng)
        if rng.random() < paste:
            yield task, rng.choice(task.references)
            continue
        traits = {}
        for name in IDENTITY:
            if rng.random() < redraw:
                traits[name] = rng.choice(VALUES[name])
        yield task, replace(task.asked, **traits)


def write_heroes(folder: Path, tasks: Sequence[HeroTask], *, name: str) -> Path:
    """Draw the references as `folder/name/0000-0.png` … and write the records as `folder/name.jsonl`."""
    rows = []
    for number, task in enumerate(tasks):
        images = []
        for position, reference in enumerate(task.references):
            images.append(f"{name}/{number:04d}-{position}.png")
            write_atomic(folder / images[-1], png_bytes(draw(reference, PIXELS)))
        row = {
            "prompt": task.text,
            "layout": "1x1",
            "panels": [task.text],
            "characters": {NAME: {"description": NAME, "images": images}},
        }
        rows.append(row)
    path = folder / f"{name}.jsonl"
    write_jsonl(path, rows)
    return path


def draw_heroes(out: Path) -> list[Path]:
    """Write the tasks for training, development and test as `{split}.jsonl`, with their references."""
    return [write_heroes(out, hero_tasks(split, count), name=split) for split, count in COUNTS.items()]


def grade_heroes(prompts: Sequence[Prompt], images: Sequence[Image.Image], *, oracle: Oracle) -> list[dict[str, float]]:
    """Return the HERO_GRADES of each image, each in 0..1.

    Returns:
        identity: share of colour, shape and hat that equal the hero's.
        all_traits: whether all three do.
        scene: share of palette, pose and prop that equal the text's.
        pasted: whether pose and prop are those of one reference.
        valid: whether the image is recognised; all grades are 0 if not.
    """
    graded = []
    for prompt, shown in zip(prompts, oracle.read(images), strict=True):
        if shown is None:
            graded.append(dict.fromkeys(HERO_GRADES, 0.0))
            continue
        # The nearest panel at any distance: a reference is a drawing.
        references = [panel for panel, _ in oracle.nearest([open_image(path) for path in prompt.references])]
        asked = references[0].in_scene(prompt.text)
        identity = _share_equal(shown, asked, IDENTITY)
        scene = _share_equal(shown, asked, ("palette", *SCENE))
        pasted = any(_share_equal(shown, reference, SCENE) == 1 for reference in references)
        values = (identity, float(identity == 1), scene, float(pasted), 1.0)
        graded.append(dict(zip(HERO_GRADES, values, strict=True)))
    return graded


def _share_equal(first: Panel, second: Panel, names: Sequence[str]) -> float:
    return float(np.mean([getattr(first, name) == getattr(second, name) for name in names]))
