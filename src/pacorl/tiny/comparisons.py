"""Pairs of panels, drawn to train a judge."""

from dataclasses import replace
from itertools import cycle, product
from pathlib import Path
from random import Random

from pacorl.core.questions import meets_criterion
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.tiny.world import IDENTITY, Split, draw, panels_of, with_another
from pacorl.types import Comparison

SIDE = 64
"""Pixels of a drawn panel."""
ONE_HERO = "The hero is the same in all images."


def draw_comparisons(folder: Path, *, split: Split, count: int, seed: int = 0) -> list[Comparison]:
    """Draw pairs of panels into `folder` and ask whether they show one hero; half of the answers are Yes.

    In half of the pairs each panel has its own palette and place, which the committed judge has not learned to ignore.
    The category is the attribute in question, the reasons describe the images.
    """
    # The seed contains the split, so that no two splits draw alike.
    rng = Random(f"{split}-{seed}")
    pool = panels_of(split)
    drawn = []
    # Attributes and answers take turns: an even count has as many Yes as No.
    for number, (name, consistent) in zip(range(count), cycle(product(IDENTITY, (True, False))), strict=False):
        first = rng.choice(pool)
        second = replace(rng.choice(pool), colour=first.colour, shape=first.shape, hat=first.hat)
        if rng.random() < 0.5:
            second = replace(second, palette=first.palette, place=first.place)
        if consistent:
            reasons = f"Both show {first.colour} {first.shape} hero, {first.hat}."
        else:
            second = with_another(second, name, rng)
            reasons = f"The {name} differs: {getattr(first, name)} and {getattr(second, name)}."

        # On the disk before the file that names them: a power cut must not leave pairs without images.
        paths = (folder / f"{number:05d}-a.png", folder / f"{number:05d}-b.png")
        for path, panel in zip(paths, (first, second), strict=True):
            write_atomic(path, png_bytes(draw(panel, SIDE)))

        drawn.append(
            Comparison(
                images=paths,
                question=meets_criterion(ONE_HERO),
                consistent=consistent,
                reasons=reasons,
                category=name,
                group=f"{first.looks} / {second.looks}",
            )
        )
    return drawn
