"""The tiny world: procedurally drawn sets of panels whose truth is known, so that every set can be graded.

A panel shows one hero in a place. Four *looks* must be the same over a set: colour, shape, hat and palette. No panel's
text names a look, and a theme names two at most, so that consistency does not follow from the text. The theme names
the place, and a panel's text its pose and prop. `draw` draws a panel, `set_prompts` writes prompts in the T2IS form,
and the `oracle` recognises a panel. It measures and is never a reward.
"""

import itertools
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from pacorl.core.grid import panel_tags
from pacorl.types import Grid, Prompt

VALUES: dict[str, tuple[str, ...]] = {
    "colour": ("red", "yellow", "green", "blue", "purple", "white"),
    "shape": ("round", "square", "pointed", "tall"),
    "hat": ("cap", "crown", "top-hat", "bow"),
    "palette": ("day", "night", "sunset", "candy"),
    "place": ("meadow", "beach", "town", "mountains"),
    "pose": ("standing", "waving", "jumping"),
    "prop": ("tree", "house", "ball", "flag", "lamp", "boat"),
}
IDENTITY = ("colour", "shape", "hat")
LOOKS = (*IDENTITY, "palette")
"""Attributes that a consistent set shares, named or not."""
SCENE = ("pose", "prop")
"""Attributes that each panel's text names."""

WHERE = {
    "place": {"meadow": "in a meadow", "beach": "at the beach", "town": "in town", "mountains": "in the mountains"},
    "palette": {"day": "by day", "night": "at night", "sunset": "at sunset", "candy": "in candy colours"},
}
"""Words of a place, and of a palette."""

Split = Literal["train", "dev", "test"]
SPLIT_OF: tuple[Split, ...] = ("test", "dev", "train", "train", "train", "train")
"""Split of a number, by its remainder by six."""


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

    @property
    def looks(self) -> tuple[str, ...]:
        """The values of LOOKS."""
        return (self.colour, self.shape, self.hat, self.palette)

    @property
    def scene(self) -> str:
        """The text of the panel: `waving, flag`."""
        return f"{self.pose}, {self.prop}"


def theme_text(place: str, looks: Mapping[str, str] = {}) -> str:
    """Write a theme: `a hero in town`, or with looks `a red hero with a crown in town at night`."""
    words = ["a", *(looks[name] for name in ("colour", "shape") if name in looks), "hero"]
    if "hat" in looks:
        words.append(f"with a {looks['hat']}")
    words.append(where_text({**looks, "place": place}))
    return " ".join(words)


def where_text(attributes: Mapping[str, str]) -> str:
    """Write the place and the palette, as far as they are named: `in town at night`."""
    return " ".join([words[attributes[name]] for name, words in WHERE.items() if name in attributes])


LAYERS = {
    "background": ("palette", "place"),
    "prop": ("prop",),
    "hero": ("colour", "shape", "pose"),
    "hat": ("hat", "shape", "pose"),
}
"""Kind of layer → the attributes that it depends on, from the farthest to the nearest. artwork.png has the kinds one
after the other, row by row."""
ARTWORK = Path(__file__).with_name("artwork.png")
TILE = 192
"""Pixels of a layer in artwork.png, and of the largest panel."""


@cache
def _artwork() -> dict[tuple[str, ...], NDArray[np.uint8]]:
    """Read every layer as RGBA: (kind, *values) → (TILE, TILE, 4)."""
    with Image.open(ARTWORK) as image:
        pixels = np.asarray(image.convert("RGBA"))
    tiles: list[NDArray[np.uint8]] = []
    for row in np.vsplit(pixels, len(pixels) // TILE):
        tiles += np.hsplit(row, row.shape[1] // TILE)

    layers = {}
    remaining = iter(tiles)
    for kind, names in LAYERS.items():
        for values in itertools.product(*(VALUES[name] for name in names)):
            layers[kind, *values] = next(remaining)
    return layers


@cache
def layer(kind: str, values: tuple[str, ...], size: int) -> NDArray[np.float32]:
    """Return a layer at a panel's size, which divides TILE, colours multiplied by alpha: (size, size, 4) in 0..1."""
    step = TILE // size
    pixels = _artwork()[kind, *values].astype(np.float32) / np.float32(255)
    pixels[..., :3] *= pixels[..., 3:]
    small: NDArray[np.float32] = pixels.reshape(size, step, size, step, 4).mean((1, 3))
    return small


def over(front: NDArray[np.float32], back: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compose two layers."""
    composed: NDArray[np.float32] = front + back * (1 - front[..., 3:])
    return composed


def draw(panel: Panel, size: int, *, without: Collection[str] = ()) -> Image.Image:
    """Draw a panel as an RGB image of `size` × `size` pixels, or a faulty one `without` some kinds of LAYERS."""
    composed = np.zeros((size, size, 4), np.float32)
    for kind, names in LAYERS.items():
        if kind not in without:
            values = tuple(getattr(panel, name) for name in names)
            composed = over(layer(kind, values, size), composed)
    return Image.fromarray((composed[..., :3] * 255 + 0.5).astype(np.uint8))


SCENES = tuple(itertools.product(VALUES["pose"], VALUES["prop"]))
CRITERIA = {
    "Identity": {
        "Colour": "The hero has the same colour in all images.",
        "Shape": "The hero has the same shape in all images.",
        "Hat": "The hero wears the same hat in all images.",
    },
    "Style": {"Palette": "All images share one palette and time of day."},
}


def split_of_hero(colour: str, shape: str, hat: str) -> Split:
    """Return the split of a hero: every split has every colour, shape and hat, and no hero twice."""
    indices = [VALUES[name].index(value) for name, value in zip(IDENTITY, (colour, shape, hat), strict=True)]
    return SPLIT_OF[(indices[0] + indices[1] + 2 * indices[2]) % 6]


def draw_scenes(split: Split, place: str, count: int, rng: Random) -> list[tuple[str, str]]:
    """Draw `count` scenes of one split; they repeat only beyond all scenes.

    The split follows from the place and the scenes, in any order: one of six is for tests, one for development.
    """
    while True:
        scenes: list[tuple[str, str]] = []
        while len(scenes) < count:
            scenes += rng.sample(SCENES, len(SCENES))
        text = f"{place}: {sorted(scenes[:count])}"
        if SPLIT_OF[zlib.crc32(text.encode()) % 6] == split:
            return scenes[:count]


def write_prompt(
    number: int, place: str, scenes: Sequence[tuple[str, str]], grid: Grid, *, looks: Mapping[str, str] = {}
) -> Prompt:
    """Write the T2IS prompt of a set."""
    theme = theme_text(place, looks)
    texts = tuple(f"{pose}, {prop}" for pose, prop in scenes)
    sentences = [f"{grid} grid layout of {theme}."]
    for tag, text in zip(panel_tags(grid), texts, strict=True):
        sentences.append(f"{tag}: {text}.")
    return Prompt(id=number, text=" ".join(sentences), theme=theme, grid=grid, panels=texts, criteria=CRITERIA)


def set_prompts(split: Split, count: int, *, seed: int = 0, grid: Grid = Grid(2, 2)) -> list[Prompt]:
    """Draw `count` prompts of one split in the T2IS form. Places take turns; half of the themes name a look or two."""
    rng = Random(f"{split}-{seed}")
    prompts = []
    for number in range(count):
        place = VALUES["place"][number % len(VALUES["place"])]
        scenes = draw_scenes(split, place, grid.count, rng)
        names = rng.sample(LOOKS, rng.choice((0, 0, 1, 2)))
        looks = {name: rng.choice(VALUES[name]) for name in LOOKS if name in names}
        prompts.append(write_prompt(number, place, scenes, grid, looks=looks))
    return prompts


def with_another(panel: Panel, name: str, rng: Random) -> Panel:
    """Change one attribute to another value."""
    return replace(panel, **{name: rng.choice([value for value in VALUES[name] if value != getattr(panel, name)])})


@cache
def all_panels() -> tuple[Panel, ...]:
    """List every panel of the world (27,648)."""
    return tuple(Panel(*values) for values in itertools.product(*VALUES.values()))


@cache
def panels_of(split: Split) -> tuple[Panel, ...]:
    """List the panels of a split's heroes, in the order of `all_panels`."""
    return tuple(panel for panel in all_panels() if split_of_hero(panel.colour, panel.shape, panel.hat) == split)
