"""The tiny world: procedurally drawn sets of panels whose truth is known, so that every set can be graded.

A panel shows one hero in a place. Four *looks* must be the same over a set: colour, shape, hat and palette. No panel's
text names a look, and a theme names two at most, so that consistency does not follow from the text. The theme names
the place, and a panel's text its pose and prop. `draw` draws a panel, `set_prompts` writes prompts in the T2IS form,
and the `Oracle` recognises a panel. The oracle measures and is never a reward.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.grid import join, panel_tags
from pacorl.types import Grid, Prompt
from research.world import drawing
from research.world.drawing import over, shrunk

VALUES: dict[str, tuple[str, ...]] = {
    "colour": tuple(drawing.COLOURS),
    "shape": tuple(drawing.HALF_WIDTHS),
    "hat": tuple(drawing.HATS),
    "palette": tuple(drawing.PALETTES),
    "place": tuple(drawing.PLACES),
    "pose": ("standing", "waving", "jumping"),
    "prop": tuple(drawing.PROPS),
}
IDENTITY = ("colour", "shape", "hat")
LOOKS = (*IDENTITY, "palette")
"""Attributes that a consistent set shares, named or not."""
SCENE = ("pose", "prop")
"""Attributes that each panel's text names."""

PALETTE_WORDS = {"day": "by day", "night": "at night", "sunset": "at sunset", "candy": "in candy colours"}
PLACE_WORDS = {"meadow": "in a meadow", "beach": "at the beach", "town": "in town", "mountains": "in the mountains"}

Split = Literal["train", "dev", "test"]


@dataclass(frozen=True, slots=True)
class Panel:
    """Attributes of one panel."""

    colour: str
    shape: str
    hat: str
    palette: str
    place: str
    pose: str
    prop: str

    def __post_init__(self) -> None:
        for name, values in VALUES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(values)}")

    @property
    def looks(self) -> tuple[str, ...]:
        """The values of LOOKS."""
        return (self.colour, self.shape, self.hat, self.palette)

    @property
    def scene(self) -> str:
        """The text of the panel: `waving, flag`."""
        return f"{self.pose}, {self.prop}"


def theme_text(place: str, named: Mapping[str, str] = {}) -> str:
    """Write a theme: `a hero in town`, or with named looks `a red hero with a crown in town at night`."""
    words = ["a", *(named[name] for name in ("colour", "shape") if name in named), "hero"]
    if "hat" in named:
        words.append(f"with a {named['hat']}")
    words.append(PLACE_WORDS[place])
    if "palette" in named:
        words.append(PALETTE_WORDS[named["palette"]])
    return " ".join(words)


# --- drawing ---------------------------------------------------------------------------------------------------


@cache
def _layer(kind: str, names: tuple[str, ...], size: int) -> NDArray[np.float32]:
    return shrunk(getattr(drawing, kind)(*names), size)


def draw(panel: Panel, size: int, *, without: Literal["", "hat", "hero", "prop"] = "") -> Image.Image:
    """Draw a panel as an RGB image of `size` × `size` pixels, or a faulty one `without` its hat, hero or prop."""
    composed = _layer("background", (panel.palette, panel.place), size)
    if without != "prop":
        composed = over(_layer("prop", (panel.prop,), size), composed)
    if without != "hero":
        composed = over(_layer("hero", (panel.colour, panel.shape, panel.pose), size), composed)
        if without != "hat":
            composed = over(_layer("hat", (panel.hat, panel.shape, panel.pose), size), composed)
    return Image.fromarray((composed[..., :3] * 255 + 0.5).astype(np.uint8))


def draw_grid(panels: Sequence[Panel], grid: Grid, panel_size: int) -> Image.Image:
    """Draw a grid image."""
    return join([draw(panel, panel_size) for panel in panels], grid)


# --- prompts ---------------------------------------------------------------------------------------------------

SCENES = tuple(itertools.product(VALUES["pose"], VALUES["prop"]))
CRITERIA = {
    "Identity": {
        "Colour": "The hero has the same colour in all images.",
        "Shape": "The hero has the same shape in all images.",
        "Hat": "The hero wears the same hat in all images.",
    },
    "Style": {"Palette": "All images share one palette and time of day."},
}


def split_of_scenes(place: str, scenes: Sequence[tuple[str, str]]) -> Split:
    """Return the split of a set's scenes, in any order: one of six is for tests, one for development."""
    text = f"{place}: {sorted(scenes)}"
    return {0: "test", 1: "dev"}.get(zlib.crc32(text.encode()) % 6, "train")  # type: ignore[return-value]


def split_of_hero(colour: str, shape: str, hat: str) -> Split:
    """Return the split of a hero: every split has every colour, shape and hat, and no hero twice."""
    colour_index, shape_index, hat_index = (
        VALUES[name].index(value) for name, value in zip(IDENTITY, (colour, shape, hat), strict=True)
    )
    return {0: "test", 1: "dev"}.get((colour_index + shape_index + 2 * hat_index) % 6, "train")  # type: ignore[return-value]


@cache
def heroes_of(split: Split) -> tuple[tuple[str, str, str], ...]:
    """List the heroes (colour, shape, hat) of a split."""
    heroes = itertools.product(*(VALUES[name] for name in IDENTITY))
    return tuple(hero for hero in heroes if split_of_hero(*hero) == split)  # type: ignore[misc]


def draw_scenes(split: Split, place: str, count: int, rng: Random) -> list[tuple[str, str]]:
    """Draw `count` scenes of one split; they repeat only beyond all scenes."""
    while True:
        scenes: list[tuple[str, str]] = []
        while len(scenes) < count:
            scenes += rng.sample(SCENES, len(SCENES))
        if split_of_scenes(place, scenes[:count]) == split:
            return scenes[:count]


def draw_named(rng: Random) -> dict[str, str]:
    """Draw the looks that a theme names: none in half of the themes, else one or two."""
    count = rng.choice((0, 0, 1, 2))
    names = rng.sample(LOOKS, count)
    return {name: rng.choice(VALUES[name]) for name in LOOKS if name in names}


def write_prompt(
    number: int,
    place: str,
    scenes: Sequence[tuple[str, str]],
    grid: Grid,
    *,
    named: Mapping[str, str] = {},
) -> Prompt:
    """Write the T2IS prompt of a set."""
    theme = theme_text(place, named)
    texts = tuple(f"{pose}, {prop}" for pose, prop in scenes)
    sentences = [f"{grid} grid layout of {theme}."]
    for tag, text in zip(panel_tags(grid), texts, strict=True):
        sentences.append(f"{tag}: {text}.")
    return Prompt(id=number, text=" ".join(sentences), theme=theme, grid=grid, panels=texts, criteria=CRITERIA)


def set_prompts(split: Split, count: int, *, seed: int = 0, grid: Grid = Grid(2, 2)) -> list[Prompt]:
    """Draw `count` prompts of one split in the T2IS form. Places take turns; half of the themes name looks."""
    rng = Random(f"{split}-{seed}")
    prompts = []
    for number in range(count):
        place = VALUES["place"][number % len(VALUES["place"])]
        scenes = draw_scenes(split, place, grid.count, rng)
        prompts.append(write_prompt(number, place, scenes, grid, named=draw_named(rng)))
    return prompts


# --- recognition -----------------------------------------------------------------------------------------------

TEMPLATE_SIZE = 24
SMALL = 16
"""Size of panels that are blurred on their way to TEMPLATE_SIZE: their templates are drawn at this size."""
HERO_WIDTH = 16
"""Columns of a template that a hero may reach; a prop has the rest."""
VALID_DISTANCE = 0.11
"""Root mean squared difference (pixels in 0..1) beyond which an image is no panel of this world."""


class _Templates:
    """Panels by parts: the hero's side of every hero before every background, and the prop's side."""

    def __init__(self, size: int) -> None:
        names = ("palette", "place", "colour", "shape", "hat", "pose")
        self.heroes = tuple(itertools.product(*(VALUES[name] for name in names)))
        self.sides = tuple(itertools.product(*(VALUES[name] for name in ("palette", "place", "prop"))))
        left = []
        for palette, place, colour, shape, hat, pose in self.heroes:
            composed = over(
                over(_layer("hat", (hat, shape, pose), size), _layer("hero", (colour, shape, pose), size)),
                _layer("background", (palette, place), size),
            )
            left.append(_resized(composed[..., :3])[:, :HERO_WIDTH].reshape(-1))
        self.left = np.stack(left)
        right = []
        for palette, place, prop in self.sides:
            composed = over(_layer("prop", (prop,), size), _layer("background", (palette, place), size))
            right.append(_resized(composed[..., :3])[:, HERO_WIDTH:].reshape(-1))
        self.right = np.stack(right)


@cache
def _templates(size: int) -> _Templates:
    return _Templates(size)


def _resized(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Resize pixels of a small panel as images of that size are."""
    if len(pixels) == TEMPLATE_SIZE:
        return pixels
    return _pixels(Image.fromarray((pixels * 255 + 0.5).astype(np.uint8)))


class Oracle:
    """Recognition of panels by their nearest template, and grades of sets. It measures, and is never a reward."""

    def read(self, images: Sequence[Image.Image]) -> list[Panel | None]:
        """Recognise the panel of each image; None if it is farther than VALID_DISTANCE from every template."""
        return [panel if distance <= VALID_DISTANCE else None for panel, distance in self.nearest(images)]

    def nearest(self, images: Sequence[Image.Image]) -> list[tuple[Panel, float]]:
        """Return the nearest template of each image and its distance.

        Hero and prop are on different sides, so that the nearest of all 27,648 panels is the nearest pair of halves
        with one background.
        """
        sizes = {SMALL if image.width == SMALL else TEMPLATE_SIZE for image in images}
        if len(sizes) > 1:
            return [self.nearest([image])[0] for image in images]
        templates = _templates(*sizes)
        pixels = np.stack([_pixels(image) for image in images])
        left = _squared(pixels[:, :, :HERO_WIDTH].reshape(len(images), -1), templates.left)
        right = _squared(pixels[:, :, HERO_WIDTH:].reshape(len(images), -1), templates.right)
        # Both products begin with palette and place, the background (K).
        backgrounds = len(VALUES["palette"]) * len(VALUES["place"])
        left_BKH = left.reshape(len(images), backgrounds, -1)
        right_BKS = right.reshape(len(images), backgrounds, -1)
        total_BK = left_BKH.min(-1) + right_BKS.min(-1)

        nearest = []
        for image, background in enumerate(total_BK.argmin(1)):
            hero = int(left_BKH[image, background].argmin()) + background * left_BKH.shape[2]
            side = int(right_BKS[image, background].argmin()) + background * right_BKS.shape[2]
            palette, place, colour, shape, hat, pose = templates.heroes[hero]
            panel = Panel(colour, shape, hat, palette, place, pose, templates.sides[side][2])
            mean = total_BK[image, background] / pixels[image].size
            nearest.append((panel, float(np.sqrt(mean))))
        return nearest


def _squared(pixels: NDArray[np.float32], templates: NDArray[np.float32]) -> NDArray[np.float32]:
    """Squared distances of images to templates, by one matrix product."""
    squared: NDArray[np.float32] = (
        (pixels**2).sum(1)[:, None] - 2 * pixels @ templates.T + (templates**2).sum(1)[None, :]
    ).clip(min=0)
    return squared


def _pixels(image: Image.Image) -> NDArray[np.float32]:
    small = image.convert("RGB").resize((TEMPLATE_SIZE, TEMPLATE_SIZE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / np.float32(255)


# --- measures --------------------------------------------------------------------------------------------------


def agreement(sets: Sequence[Sequence[Panel | None]]) -> dict[str, tuple[float, float]]:
    """Measure each look's agreement within sets and across sets, over valid panels.

    Returns:
        Look → (share of equal pairs of panels within sets, share of equal pairs of panels of different sets).
    """
    measured = {}
    for name in LOOKS:
        within_equal = within = 0.0
        # Across: all pairs but those of one set, counted by value.
        total: dict[str, int] = {}
        own_equal = own = 0.0
        for panels in sets:
            values = [getattr(panel, name) for panel in panels if panel]
            pairs = list(itertools.combinations(values, 2))
            within += len(pairs)
            within_equal += sum(first == second for first, second in pairs)
            own += len(values) ** 2
            own_equal += sum(values.count(value) for value in values)
            for value in values:
                total[value] = total.get(value, 0) + 1
        everything = sum(total.values()) ** 2 - own
        across_equal = sum(count**2 for count in total.values()) - own_equal
        measured[name] = (within_equal / max(1, within), across_equal / max(1, everything))
    return measured


def kappa(within: float, across: float) -> float:
    """Chance-corrected agreement: 1 if sets agree within and not by chance, 0 if no more than different sets do."""
    return (within - across) / (1 - across) if across < 1 else 0.0


def with_another(panel: Panel, name: str, rng: Random) -> Panel:
    """Change one attribute to another value."""
    return replace(panel, **{name: rng.choice([value for value in VALUES[name] if value != getattr(panel, name)])})
