"""Pairs of the tiny world whose reasons carry the evidence, in about 10, 40 or 160 tokens.

The reasons name the true attributes of both images and contain no sentence twice. The three lengths share their images
and labels, so a comparison of lengths is paired. Training pairs have train characters and the palettes of TRAINED; each
test pair has a test character and at least one image in NEW, a palette that no training pair shows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

from pacorl.core.questions import meets_criterion
from pacorl.io.files import make_folder
from pacorl.records.comparisons import ONE_HERO, TINY_SIDE, save_comparisons
from pacorl.tiny.characters import IDENTITY, KEPT, VALUES, Panel, Split, draw, panels_of, with_another
from pacorl.types import Comparison

LENGTHS = (10, 40, 160)
TRAINED = ("day", "night", "sunset")
NEW = "candy"


def write_pairs(folder: Path, *, split: Split, count: int, length: int, seed: int = 0) -> Path:
    """Draw pairs in which half of the answers are Yes, and return their JSONL file."""
    make_folder(folder)
    rng = random.Random(f"{split}-{seed}")
    pool = [panel for panel in panels_of(split) if panel.palette in TRAINED]
    comparisons = []
    turns = cycle(product(IDENTITY, (True, False)))
    for number, (name, consistent) in zip(range(count), turns, strict=False):
        # 1. Two panels that differ in `name`, or in no attribute of the hero.
        first = rng.choice(pool)
        second = replace(rng.choice(pool), colour=first.colour, shape=first.shape, hat=first.hat)
        if not consistent:
            second = with_another(second, name, rng)
        if split == "test":
            first = replace(first, palette=NEW)

        # 2. Their images and the record.
        paths = (folder / f"{number:05d}-a.png", folder / f"{number:05d}-b.png")
        for path, panel in zip(paths, (first, second), strict=True):
            draw(panel, TINY_SIDE).save(path)
        comparisons.append(
            Comparison(
                images=paths,
                question=meets_criterion(ONE_HERO),
                consistent=consistent,
                reasons=reasons(first, second, length),
                category=name,
                group=f"{first.subject} / {second.subject}",
            )
        )

    file = folder / "comparisons.jsonl"
    save_comparisons(comparisons, file)
    return file


def reasons(first: Panel, second: Panel, length: int) -> str:
    """Write the reasons in about `length` tokens of the tiny judge.

    10 names the one difference, or the shared hero. 40 compares the kept attributes one by one. 160 lists every
    attribute of each image and then compares all of them.
    """
    different = [name for name in IDENTITY if getattr(first, name) != getattr(second, name)]
    if length == 10:
        if different:
            return compared(first, second, different[0])
        return f"Both show {first.colour} {first.shape} hero, {first.hat}."

    sentences = []
    if length == 160:
        for image, panel in (("One image", first), ("The other", second)):
            for name in VALUES:
                sentences.append(f"{image} shows {name} {getattr(panel, name)}.")
    for name in VALUES if length == 160 else KEPT:
        sentences.append(compared(first, second, name))
    return " ".join(sentences)


def compared(first: Panel, second: Panel, name: str) -> str:
    """Compare one attribute in a sentence."""
    one, other = getattr(first, name), getattr(second, name)
    if one == other:
        return f"The {name} is {one} in all images."
    return f"The {name} differs: {one} and {other}."
