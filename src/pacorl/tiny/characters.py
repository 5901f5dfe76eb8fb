"""The tiny world: procedurally drawn characters whose truth is known, so that everything here can be graded.

A panel shows one hero. Four attributes should stay the same over a set, its identity (colour, shape, hat) and its
style (palette); two are free to change from panel to panel, its scene (pose, prop). `draw` draws a panel,
`character_prompts` writes prompts in the T2IS form with every attribute named, and the `Oracle` reads a panel back.
The oracle grades and is never rewarded.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pacorl.core.grid import join, panel_tags
from pacorl.types import Grid, Prompt

COLOURS = {
    "red": (214, 48, 42),
    "yellow": (245, 208, 50),
    "green": (52, 150, 70),
    "blue": (48, 98, 210),
    "purple": (140, 70, 175),
    "white": (245, 243, 236),
}
PALETTES = {  # sky, ground, sun or moon
    "day": ((150, 208, 246), (118, 186, 88), (255, 236, 130)),
    "night": ((56, 62, 126), (40, 72, 84), (240, 238, 214)),
    "sunset": ((250, 158, 96), (132, 74, 96), (255, 226, 160)),
    "candy": ((252, 206, 224), (176, 226, 206), (255, 255, 255)),
}
VALUES: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": ("round", "square", "pointed", "tall"),
    "hat": ("cap", "crown", "top-hat"),
    "palette": tuple(PALETTES),
    "pose": ("standing", "waving", "jumping"),
    "prop": ("tree", "house", "ball", "flag", "lamp", "boat"),
}
IDENTITY = ("colour", "shape", "hat")
KEPT = (*IDENTITY, "palette")
"""The attributes that a consistent set shares."""

Split = Literal["train", "dev", "test"]
# Characters are dealt to splits by a Latin rule: every split has every colour, shape and hat, no character twice.
SPLIT_OF_CLASS: dict[int, Split] = {0: "test", 1: "dev", 2: "train", 3: "train", 4: "train", 5: "train"}


@dataclass(frozen=True, slots=True)
class Panel:
    """The truth about one panel."""

    colour: str
    shape: str
    hat: str
    palette: str
    pose: str
    prop: str

    def __post_init__(self) -> None:
        for name, values in VALUES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(values)}")

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(getattr(self, name) for name in KEPT)

    @property
    def text(self) -> str:
        """The panel in words, every attribute named: `red round hero, crown, sunset, jumping, boat`."""
        return f"{self.subject}, {self.pose}, {self.prop}"

    @property
    def subject(self) -> str:
        """The part of `text` that a set shares."""
        return f"{self.colour} {self.shape} hero, {self.hat}, {self.palette}"

    @classmethod
    def parse(cls, text: str) -> Panel:
        """The inverse of `text`. Raises ValueError if `text` is not a panel of this world."""
        try:
            subject, hat, palette, pose, prop = text.strip().rstrip(".").split(", ")
            colour, shape, _ = subject.split(" ")
        except ValueError:
            raise ValueError(f"{text!r} does not describe a panel of the tiny world") from None
        return cls(colour=colour, shape=shape, hat=hat, palette=palette, pose=pose, prop=prop)


@lru_cache(maxsize=1)
def all_panels() -> tuple[Panel, ...]:
    """Every panel of the world (5,184), in an order that seeds and the oracle's templates rest on."""
    return tuple(Panel(*values) for values in itertools.product(*VALUES.values()))


def split_of(panel: Panel) -> Split:
    """The split that a panel's character (colour, shape, hat) belongs to."""
    colour, shape, hat = (VALUES[name].index(getattr(panel, name)) for name in IDENTITY)
    # Twice the hat: heroes that differ in their hat alone (0, 2, 4) lie in three classes.
    return SPLIT_OF_CLASS[(colour + shape + 2 * hat) % 6]


@cache
def panels_of(split: Split) -> tuple[Panel, ...]:
    """The panels of a split's characters, in the order of `all_panels`."""
    return tuple(panel for panel in all_panels() if split_of(panel) == split)


@cache
def subjects_of(split: Split) -> tuple[tuple[str, ...], ...]:
    """The values of KEPT that a split has, sorted: the order of a set of texts differs from process to process."""
    return tuple(sorted({panel.kept for panel in panels_of(split)}))


# --- drawing -------------------------------------------------------------------------------------------------

CANVAS = 256  # drawn large, then shrunk: soft edges at any size
INK = (38, 32, 44)


def draw(panel: Panel, size: int) -> Image.Image:
    """Draw a panel as an RGB image of `size` × `size` pixels."""
    canvas = Image.new("RGB", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(canvas)
    sky, ground, light = PALETTES[panel.palette]
    pen.rectangle((0, 0, CANVAS, CANVAS), fill=sky)
    pen.rectangle((0, 188, CANVAS, CANVAS), fill=ground)
    pen.ellipse((12, 12, 54, 54), fill=light)
    if panel.palette == "night":
        pen.ellipse((26, 6, 64, 44), fill=sky)  # a crescent
    _draw_prop(pen, panel.prop)
    _draw_hero(pen, panel)
    return canvas.resize((size, size), Image.Resampling.BOX)


def draw_grid(panels: Sequence[Panel], grid: Grid, panel_size: int) -> Image.Image:
    """Draw a grid image."""
    return join([draw(panel, panel_size) for panel in panels], grid)


def _draw_prop(pen: ImageDraw.ImageDraw, prop: str) -> None:
    match prop:
        case "tree":
            pen.rectangle((203, 140, 219, 204), fill=(110, 74, 46))
            pen.ellipse((172, 66, 250, 158), fill=(30, 104, 60), outline=INK, width=5)
        case "house":
            pen.rectangle((176, 136, 246, 206), fill=(228, 216, 190), outline=INK, width=5)
            pen.polygon([(168, 138), (211, 84), (254, 138)], fill=(176, 62, 50), outline=INK, width=5)
            pen.rectangle((202, 168, 222, 206), fill=(90, 58, 44))
        case "ball":
            pen.ellipse((180, 166, 240, 226), fill=(255, 255, 255), outline=INK, width=5)
            pen.pieslice((180, 166, 240, 226), 300, 60, fill=(230, 60, 120), outline=INK, width=4)
            pen.pieslice((180, 166, 240, 226), 120, 240, fill=(230, 60, 120), outline=INK, width=4)
        case "flag":
            pen.rectangle((184, 58, 194, 206), fill=INK)
            pen.polygon([(194, 62), (252, 86), (194, 112)], fill=(240, 90, 30), outline=INK, width=4)
        case "lamp":
            pen.rectangle((208, 96, 218, 206), fill=INK)
            pen.ellipse((186, 56, 240, 110), fill=(255, 244, 150), outline=INK, width=6)
        case "boat":
            pen.polygon([(166, 178), (254, 178), (236, 214), (184, 214)], fill=(150, 92, 50), outline=INK, width=5)
            pen.polygon([(212, 98), (212, 172), (250, 172)], fill=(250, 250, 250), outline=INK, width=5)


def _draw_hero(pen: ImageDraw.ImageDraw, panel: Panel) -> None:
    x = 96
    lift = 34 if panel.pose == "jumping" else 0
    boxes = {"round": (50, 100, 200), "square": (50, 104, 200), "pointed": (62, 92, 200), "tall": (30, 80, 200)}
    half_width, top, bottom = boxes[panel.shape]
    top = top - lift
    bottom = bottom - lift
    middle = (top + bottom) // 2
    pen.ellipse((x - 40 + lift // 2, 222, x + 40 - lift // 2, 236), fill=INK)  # a shadow, smaller under a jump
    for side in (-1, 1):
        pen.line((x + side * 20, bottom - 10, x + side * 24, bottom + 26), fill=INK, width=14)
        up = panel.pose == "jumping" or (panel.pose == "waving" and side == -1)
        arm = (x + side * (half_width - 8), middle + 6, x + side * (half_width + 26), middle + (-46 if up else 40))
        pen.line(arm, fill=INK, width=22)
        pen.line(arm, fill=COLOURS[panel.colour], width=12)
    _draw_body(pen, panel, (x - half_width, top, x + half_width, bottom))
    for side in (-1, 1):
        eye = x + side * 15
        pen.ellipse((eye - 9, middle - 11, eye + 9, middle + 7), fill=(255, 255, 255), outline=INK, width=3)
        pen.ellipse((eye - 4, middle - 5, eye + 4, middle + 4), fill=INK)
    # A pointed body ends in a tip, over which the hat is pulled down.
    _draw_hat(pen, panel.hat, x=x, brim=top + (16 if panel.shape == "pointed" else 8))


def _draw_body(pen: ImageDraw.ImageDraw, panel: Panel, box: tuple[int, int, int, int]) -> None:
    fill = COLOURS[panel.colour]
    (left, top, right, bottom) = box
    match panel.shape:
        case "round":
            pen.ellipse(box, fill=fill, outline=INK, width=6)
        case "square":
            pen.rectangle(box, fill=fill, outline=INK, width=6)
        case "pointed":
            corners = [(left, bottom), ((left + right) // 2, top - 16), (right, bottom)]
            pen.polygon(corners, fill=fill, outline=INK, width=6)
        case "tall":
            pen.rounded_rectangle(box, radius=28, fill=fill, outline=INK, width=6)


def _draw_hat(pen: ImageDraw.ImageDraw, hat: str, *, x: int, brim: int) -> None:
    match hat:
        case "cap":
            pen.pieslice((x - 36, brim - 34, x + 36, brim + 34), 180, 360, fill=(0, 172, 172), outline=INK, width=5)
            pen.rectangle((x - 66, brim - 8, x + 8, brim + 4), fill=(0, 120, 128), outline=INK, width=3)
        case "crown":
            spikes = [(-36, 4), (-40, -42), (-18, -18), (0, -50), (18, -18), (40, -42), (36, 4)]
            pen.polygon([(x + dx, brim + dy) for dx, dy in spikes], fill=(255, 196, 20), outline=INK, width=5)
        case "top-hat":
            pen.rectangle((x - 28, brim - 62, x + 28, brim), fill=(24, 22, 26), outline=(120, 120, 128), width=3)
            pen.rectangle((x - 28, brim - 22, x + 28, brim - 8), fill=(206, 40, 60))
            pen.rectangle((x - 48, brim - 8, x + 48, brim + 4), fill=(24, 22, 26), outline=(120, 120, 128), width=3)


# --- prompts -------------------------------------------------------------------------------------------------

SCENES = tuple(itertools.product(VALUES["pose"], VALUES["prop"]))
CRITERIA = {
    "Identity": {
        "Colour": "The hero has the same colour in all images.",
        "Shape": "The hero has the same shape in all images.",
        "Hat": "The hero wears the same hat in all images.",
    },
    "Style": {"Palette": "All images share one palette and time of day."},
}


def character_prompts(split: Split, count: int, *, seed: int = 0, grid: Grid = Grid(2, 2)) -> list[Prompt]:
    """`count` prompts about characters of one split, in the T2IS form.

    Characters and palettes take turns (no two of the first 48 test prompts share both); scenes are drawn anew.
    """
    rng = random.Random(f"{split}-{seed}")
    subjects = list(subjects_of(split))
    prompts = []
    for index in range(count):
        if index % len(subjects) == 0:
            rng.shuffle(subjects)
        prompts.append(write_prompt(index, set_of(subjects[index % len(subjects)], grid.count, rng), grid))
    return prompts


def set_of(subject: Sequence[str], count: int, rng: random.Random) -> list[Panel]:
    """`count` panels of one subject (values of KEPT) in different scenes, which repeat only if there are too few."""
    scenes = []
    for _ in range(-(-count // len(SCENES))):
        for scene in rng.sample(SCENES, len(SCENES)):
            scenes.append(scene)

    return [Panel(*subject, *scene) for scene in scenes[:count]]  # type: ignore[call-arg]


def write_prompt(number: int, panels: Sequence[Panel], grid: Grid, *, subject: str = "") -> Prompt:
    """The T2IS prompt that asks for exactly these panels.

    Args:
        subject: what the set shares, from which a panel may depart; what all panels share if left out.
    """
    assert subject or len({panel.subject for panel in panels}) == 1
    # What the panels share comes first: CLIP reads 77 tokens of a prompt and nothing beyond.
    subject = subject or panels[0].subject

    scenes = []
    for tag, panel in zip(panel_tags(grid), panels, strict=True):
        scenes.append(f"{tag}: {panel.text}.")

    return Prompt(
        id=number,
        text=" ".join([f"{grid} grid layout of {subject}.", *scenes]),
        theme=subject,
        grid=grid,
        panels=tuple(panel.text for panel in panels),
        criteria=CRITERIA,
    )


def redrawn(panels: Sequence[Panel], *, chance: float, rng: random.Random) -> list[Panel]:
    """The panels as an unreliable generator would make them: each kept attribute redrawn with probability `chance`."""
    return [
        replace(panel, **{name: rng.choice(VALUES[name]) for name in KEPT if rng.random() < chance}) for panel in panels
    ]


def redrawn_once(panel: Panel, rng: random.Random, *, names: Sequence[str] = KEPT) -> Panel:
    """The panel with one attribute of `names` changed to another value."""
    return with_another(panel, rng.choice(names), rng)


def with_another(panel: Panel, name: str, rng: random.Random) -> Panel:
    """The panel with another value of one attribute."""
    return replace(panel, **{name: rng.choice([value for value in VALUES[name] if value != getattr(panel, name)])})


# The committed editor was trained on these words, so they stay as they are.
EDITS = {
    "colour": "Paint the hero {}.",
    "hat": "Give the hero a {}.",
    "palette": "Change the scene to {}.",
    "prop": "Put a {} beside the hero.",
}
"""Attribute → the instruction that changes it."""
INSTRUCTIONS = tuple(form.format(value) for name, form in EDITS.items() for value in VALUES[name])


def vocabulary() -> list[str]:
    """Texts that hold every word of this world about as often as its prompts do: what the tiny tokenizers read."""
    return [*(prompt.text for prompt in character_prompts("train", 288)), *4 * INSTRUCTIONS]


# --- grading -------------------------------------------------------------------------------------------------

TEMPLATE_SIZE = 32
VALID_DISTANCE = 0.11
"""Root mean squared difference (pixels in 0..1) beyond which a panel is nothing of this world. It is about the
median change that one redrawn identity attribute makes in a real drawing: farther than that from every template,
a panel cannot be said to show any of them (`tests/tiny/test_characters.py` measures it)."""

GRADES = ("attribute_agreement", "all_equal_pairs", "prompt_match", "valid")


@lru_cache(maxsize=1)  # over a second of drawing, which all oracles of a process share
def _templates() -> NDArray[np.float32]:
    """(5184, pixels), in the order of `all_panels`."""
    return np.stack([_pixels(draw(panel, TEMPLATE_SIZE)) for panel in all_panels()])


class Oracle:
    """Read panels back by their nearest template, and grade sets. It is used to measure, never as a reward."""

    def read(self, images: Sequence[Image.Image]) -> list[Panel | None]:
        """The panel that each image shows, None if it is farther than VALID_DISTANCE from every template."""
        return [panel if distance <= VALID_DISTANCE else None for panel, distance in self.nearest(images)]

    def nearest(self, images: Sequence[Image.Image]) -> list[tuple[Panel, float]]:
        """The closest template of each image and its distance."""
        pixels = np.stack([_pixels(image) for image in images])
        # |a − b|² = |a|² − 2ab + |b|², one matrix product instead of 5,184 differences of 3,072 numbers per image.
        templates = _templates()
        squared = ((pixels**2).sum(1)[:, None] - 2 * pixels @ templates.T + (templates**2).sum(1)[None, :]).clip(
            min=0
        ) / pixels.shape[1]  # in float32 the distance to an image's own template comes out below 0
        best = squared.argmin(1)
        return [(all_panels()[i], float(np.sqrt(squared[row, i]))) for row, i in enumerate(best)]

    def grade(self, prompt: Prompt, panels: Sequence[Image.Image]) -> dict[str, float]:
        """The GRADES of one set, each in 0..1; an invalid panel agrees with nothing and matches nothing."""
        return grade([Panel.parse(text) for text in prompt.panels], self.read(panels))


def grade(described: Sequence[Panel], shown: Sequence[Panel | None]) -> dict[str, float]:
    """The GRADES of a set by the panels that its prompt describes and those that it shows.

    attribute_agreement: share of kept attributes that two panels share, mean over pairs of panels.
    all_equal_pairs: share of pairs that share all of them.
    prompt_match: share of the six attributes that a panel's text names and the panel shows, mean over panels.
    valid: share of panels that show anything of this world.
    """
    # A single panel has no pairs, and cannot disagree with itself.
    agreement = [_share_equal(*pair, KEPT) for pair in itertools.combinations(shown, 2)] or [1.0]
    matches = [_share_equal(*pair, tuple(VALUES)) for pair in zip(described, shown, strict=True)]
    return {
        "attribute_agreement": float(np.mean(agreement)),
        "all_equal_pairs": float(np.mean([share == 1 for share in agreement])),
        "prompt_match": float(np.mean(matches)),
        "valid": float(np.mean([panel is not None for panel in shown])),
    }


def _share_equal(first: Panel | None, second: Panel | None, names: Sequence[str]) -> float:
    if first is None or second is None:
        return 0.0
    return float(np.mean([getattr(first, name) == getattr(second, name) for name in names]))


Majority = tuple[str | None, ...]
"""The commonest value of each kept attribute among a set's valid panels; None if there are none."""


def majority(panels: Sequence[Panel | None]) -> Majority:
    """The majority of a set; of values that are equally common the first in the alphabet."""
    values_by_name = zip(*[panel.kept for panel in panels if panel], strict=True)
    return tuple(max(sorted(set(values)), key=values.count) for values in values_by_name) or (None,) * len(KEPT)


def evenness(majorities: Sequence[Majority]) -> float:
    """The diversity of sets: mean over the kept attributes of the normalised entropy, over sets, of their majorities.

    1 if all values are equally common as a set's majority, 0 if every set shows the same value.
    """
    entropies = []
    for name, values in zip(KEPT, zip(*majorities, strict=True), strict=True):
        counts = np.array([values.count(value) for value in VALUES[name]], dtype=float)
        # At least 1: sets without a valid panel have no majority to count.
        shares = counts[counts > 0] / max(counts.sum(), 1)
        entropies.append(float(-(shares * np.log(shares)).sum() / np.log(len(VALUES[name]))))
    return float(np.mean(entropies))


def _pixels(image: Image.Image) -> NDArray[np.float32]:
    small = image.convert("RGB").resize((TEMPLATE_SIZE, TEMPLATE_SIZE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32).reshape(-1) / np.float32(255)
