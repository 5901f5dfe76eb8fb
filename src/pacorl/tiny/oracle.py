"""The oracle of the tiny world: it reads the attributes of a panel and grades sets. It is never a reward."""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mode

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.set_scores import equal_shares
from pacorl.tiny.world import LOOKS, VALUES, Panel, layer, over

TEMPLATE_SIZE = 24
HERO_WIDTH = 16
"""Columns of a template for the hero; the prop has the rest."""
VALID_DISTANCE = 0.11
"""Root mean squared difference (pixels in 0..1) beyond which an image is no panel of this world."""


BACKGROUNDS = tuple(itertools.product(VALUES["palette"], VALUES["place"]))
HEROES = tuple(itertools.product(*(VALUES[name] for name in ("colour", "shape", "hat", "pose"))))


@cache
def _templates() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Draw the hero's side of every hero before every background, and the prop's side, a row of pixels each."""
    left, right = [], []
    for background in BACKGROUNDS:
        behind = layer("background", background, TEMPLATE_SIZE)
        for colour, shape, hat, pose in HEROES:
            hatless = layer("hero", (colour, shape, pose), TEMPLATE_SIZE)
            hero = over(layer("hat", (hat, shape, pose), TEMPLATE_SIZE), hatless)
            panel = over(hero, behind)
            left.append(panel[:, :HERO_WIDTH, :3].ravel())
        for prop in VALUES["prop"]:
            panel = over(layer("prop", (prop,), TEMPLATE_SIZE), behind)
            right.append(panel[:, HERO_WIDTH:, :3].ravel())
    return np.stack(left), np.stack(right)


def read_panels(images: Sequence[Image.Image]) -> list[Panel | None]:
    """Recognise the panel of each image; None if it is farther than VALID_DISTANCE from every template."""
    return [panel if distance <= VALID_DISTANCE else None for panel, distance in nearest_panels(images)]


def nearest_panels(images: Sequence[Image.Image]) -> list[tuple[Panel, float]]:
    """Return the nearest template of each image and its distance.

    Hero and prop are on different sides, so that the nearest of all 27,648 panels is the nearest pair of halves with
    one background.
    """
    scaled = []
    for image in images:
        small = image.convert("RGB").resize((TEMPLATE_SIZE, TEMPLATE_SIZE), Image.Resampling.BOX)
        scaled.append(np.asarray(small, dtype=np.float32) / np.float32(255))
    pixels = np.stack(scaled)
    left_side = pixels[:, :, :HERO_WIDTH].reshape(len(images), -1)
    right_side = pixels[:, :, HERO_WIDTH:].reshape(len(images), -1)
    left_templates, right_templates = _templates()
    # The templates are in the order of BACKGROUNDS, so that a reshape separates them by background.
    by_background = (len(images), len(BACKGROUNDS), -1)
    left_BKH = _squared(left_side, left_templates).reshape(by_background)
    right_BKP = _squared(right_side, right_templates).reshape(by_background)
    # Hero and prop are in separate columns, so each is matched by itself on every background.
    total_BK = left_BKH.min(-1) + right_BKP.min(-1)

    nearest = []
    for row, background in enumerate(total_BK.argmin(1)):
        palette, place = BACKGROUNDS[background]
        hero = left_BKH[row, background].argmin()
        colour, shape, hat, pose = HEROES[hero]
        prop = VALUES["prop"][right_BKP[row, background].argmin()]
        mean_squared = total_BK[row, background] / pixels[row].size
        distance = float(np.sqrt(mean_squared))
        nearest.append((Panel(colour, shape, hat, palette, place, pose, prop), distance))
    return nearest


def _squared(pixels: NDArray[np.float32], templates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Squared distances of images to templates, by one matrix product."""
    # |p − t|² = |p|² − 2 p·t + |t|², which may round to less than 0.
    pixel_norms = (pixels**2).sum(1)[:, None]
    template_norms = (templates**2).sum(1)[None, :]
    squared: NDArray[np.float32] = pixel_norms - 2 * pixels @ templates.T + template_norms
    return squared.clip(min=0)


def grade(requested: Sequence[Mapping[str, str]], shown: Sequence[Panel | None]) -> dict[str, float]:
    """Grade a set.

    Args:
        requested: what the prompt asks of each panel, as attribute → value.
        shown: recognised panels of the image.

    Returns:
        attribute_agreement: share of looks that two panels share, mean over pairs of panels.
        all_equal_pairs: share of pairs that share all of them.
        prompt_match: share of the requested attributes that a panel shows, mean over panels.
        valid: share of recognised panels.
    """
    agreements = []
    for first, second in itertools.combinations(shown, 2):
        equal = [getattr(first, name) == getattr(second, name) for name in LOOKS] if first and second else [False]
        agreements.append(float(np.mean(equal)))
    # A single panel has no pairs, and cannot disagree with itself.
    agreements = agreements or [1.0]

    matches = []
    for attributes, panel in zip(requested, shown, strict=True):
        correct = [getattr(panel, name, None) == value for name, value in attributes.items()]
        matches.append(float(np.mean(correct)))

    return {
        "attribute_agreement": float(np.mean(agreements)),
        "all_equal_pairs": float(np.mean([share == 1 for share in agreements])),
        "prompt_match": float(np.mean(matches)),
        "valid": float(np.mean([panel is not None for panel in shown])),
    }


def agreement(sets: Sequence[Sequence[Panel | None]]) -> dict[str, tuple[float, float]]:
    """Measure each look's agreement within sets and across sets, over valid panels.

    Returns:
        Look → (share of equal pairs of panels within sets, share of equal pairs of panels of different sets).
    """
    shares = {}
    for name in LOOKS:
        values_of_sets = []
        for panels in sets:
            values_of_sets.append([getattr(panel, name) for panel in panels if panel])
        shares[name] = equal_shares(values_of_sets)
    return shares


Majority = tuple[str | None, ...]
"""The commonest value of each look among a set's valid panels; None if there are none."""


def majority(panels: Sequence[Panel | None]) -> Majority:
    """Return the majority of a set; of equally common values the first in the alphabet."""
    valid = [panel.looks for panel in panels if panel]
    if not valid:
        return (None,) * len(LOOKS)
    # `mode` returns the first of equally common values.
    return tuple(mode(sorted(values)) for values in zip(*valid, strict=True))


def evenness(majorities: Sequence[Majority]) -> float:
    """Return the diversity of sets: the normalised entropy of their majorities, mean over the looks.

    It is 1 if all values are equally common among the sets, and 0 if every set shows the same value.
    """
    # Per look: an even mix of hats must not hide a single colour.
    entropies = []
    for position, name in enumerate(LOOKS):
        values = [of_set[position] for of_set in majorities]
        counts = np.array([values.count(value) for value in VALUES[name]], dtype=float)
        # At least 1: sets without a valid panel have no majority to count.
        shares = counts[counts > 0] / max(counts.sum(), 1)
        entropy = -(shares * np.log(shares)).sum()
        entropies.append(float(entropy / np.log(len(counts))))
    return float(np.mean(entropies))
