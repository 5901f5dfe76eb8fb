"""The tiny world: procedurally drawn characters with known attributes, so that every set can be graded.

A panel shows one hero. Four attributes should stay the same over a set, its identity (colour, shape, hat) and its
style (palette). Two may change from panel to panel, its scene (pose, prop). `draw` draws a panel, `character_prompts`
writes prompts in the T2IS form with every attribute named, and the `Oracle` recognises a panel. The oracle measures
and is never a reward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from random import Random
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from pacorl.core.contrast import equal_shares, kappa
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
    """Attributes of one panel."""

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
        """The values of KEPT."""
        return (self.colour, self.shape, self.hat, self.palette)

    @property
    def text(self) -> str:
        """The panel in words, every attribute named: `red round hero, crown, sunset, jumping, boat`."""
        return f"{self.subject}, {self.pose}, {self.prop}"

    @property
    def subject(self) -> str:
        """The part of `text` that a set shares."""
        return f"{self.colour} {self.shape} hero, {self.hat}, {self.palette}"

    @property
    def scene_text(self) -> str:
        """The panel for a generator with reference images of the hero, whose traits it does not name."""
        return f"hero, {self.palette}, {self.pose}, {self.prop}."

    def in_scene(self, text: str) -> Panel:
        """Return this hero in the scene of a `scene_text`."""
        _, palette, pose, prop = text.rstrip(".").split(", ")
        return replace(self, palette=palette, pose=pose, prop=prop)

    @classmethod
    def parse(cls, text: str) -> Panel:
        """Invert `text`.

        Raises:
            ValueError: if `text` is not a panel of this world.
        """
        try:
            subject, hat, palette, pose, prop = text.strip().rstrip(".").split(", ")
            colour, shape, _ = subject.split(" ")
        except ValueError:
            raise ValueError(f"{text!r} does not describe a panel of the tiny world") from None
        return cls(colour=colour, shape=shape, hat=hat, palette=palette, pose=pose, prop=prop)


@lru_cache(maxsize=1)
def all_panels() -> tuple[Panel, ...]:
    """List every panel of the world (5,184). Seeds and the oracle's templates depend on the order."""
    return tuple(Panel(*values) for values in itertools.product(*VALUES.values()))


def split_of(panel: Panel) -> Split:
    """Return the split of a panel's character (colour, shape, hat)."""
    colour = VALUES["colour"].index(panel.colour)
    shape = VALUES["shape"].index(panel.shape)
    hat = VALUES["hat"].index(panel.hat)
    # Twice the hat: heroes that differ in their hat alone (0, 2, 4) fall into three classes.
    return SPLIT_OF_CLASS[(colour + shape + 2 * hat) % 6]


@cache
def panels_of(split: Split) -> tuple[Panel, ...]:
    """List the panels of a split's characters, in the order of `all_panels`."""
    return tuple(panel for panel in all_panels() if split_of(panel) == split)


@cache
def subjects_of(split: Split) -> tuple[tuple[str, ...], ...]:
    """List the values of KEPT in a split, sorted: the order of a set of texts differs from process to process."""
    return tuple(sorted({panel.kept for panel in panels_of(split)}))


# --- drawing -------------------------------------------------------------------------------------------------

CANVAS = 256  # drawn large, then shrunk: soft edges at any size
INK = (38, 32, 44)
WHITE = (255, 255, 255)
PINK = (230, 60, 120)
BLACK = (24, 22, 26)
GREY = (120, 120, 128)


def draw(panel: Panel, size: int, *, without: Literal["", "hat", "hero", "prop"] = "") -> Image.Image:
    """Draw a panel as an RGB image of `size` × `size` pixels, or a faulty one `without` its hat, hero or prop."""
    canvas = Image.new("RGB", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(canvas)
    sky, ground, light = PALETTES[panel.palette]
    pen.rectangle((0, 0, CANVAS, CANVAS), fill=sky)
    pen.rectangle((0, 188, CANVAS, CANVAS), fill=ground)
    pen.ellipse((12, 12, 54, 54), fill=light)
    if panel.palette == "night":
        pen.ellipse((26, 6, 64, 44), fill=sky)  # a crescent
    if without != "prop":
        _draw_prop(pen, panel.prop)
    if without != "hero":
        _draw_hero(pen, panel, hat="" if without == "hat" else panel.hat)
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
            box = (180, 166, 240, 226)
            pen.ellipse(box, fill=WHITE, outline=INK, width=5)
            pen.pieslice(box, 300, 60, fill=PINK, outline=INK, width=4)
            pen.pieslice(box, 120, 240, fill=PINK, outline=INK, width=4)
        case "flag":
            pen.rectangle((184, 58, 194, 206), fill=INK)
            pen.polygon([(194, 62), (252, 86), (194, 112)], fill=(240, 90, 30), outline=INK, width=4)
        case "lamp":
            pen.rectangle((208, 96, 218, 206), fill=INK)
            pen.ellipse((186, 56, 240, 110), fill=(255, 244, 150), outline=INK, width=6)
        case "boat":
            pen.polygon([(166, 178), (254, 178), (236, 214), (184, 214)], fill=(150, 92, 50), outline=INK, width=5)
            pen.polygon([(212, 98), (212, 172), (250, 172)], fill=(250, 250, 250), outline=INK, width=5)


def _draw_hero(pen: ImageDraw.ImageDraw, panel: Panel, *, hat: str) -> None:
    # The place and size of the body; a jump lifts it off its shadow.
    x = 96
    bottom = 200
    half_widths = {"round": 50, "square": 50, "pointed": 62, "tall": 30}
    tops = {"round": 100, "square": 104, "pointed": 92, "tall": 80}
    half_width = half_widths[panel.shape]
    top = tops[panel.shape]
    if panel.pose == "jumping":
        top -= 34
        bottom -= 34
        pen.ellipse((x - 23, 222, x + 23, 236), fill=INK)
    else:
        pen.ellipse((x - 40, 222, x + 40, 236), fill=INK)
    middle = (top + bottom) // 2

    # Legs and arms, behind the body.
    fill = COLOURS[panel.colour]
    for side in (-1, 1):
        pen.line((x + side * 20, bottom - 10, x + side * 24, bottom + 26), fill=INK, width=14)
        hand = middle + 40
        if panel.pose == "jumping" or (panel.pose == "waving" and side == -1):
            hand = middle - 46
        shoulder = x + side * (half_width - 8)
        arm = (shoulder, middle + 6, shoulder + side * 34, hand)
        pen.line(arm, fill=INK, width=22)
        pen.line(arm, fill=fill, width=12)

    # The body.
    left = x - half_width
    right = x + half_width
    box = (left, top, right, bottom)
    match panel.shape:
        case "round":
            pen.ellipse(box, fill=fill, outline=INK, width=6)
        case "square":
            pen.rectangle(box, fill=fill, outline=INK, width=6)
        case "pointed":
            pen.polygon([(left, bottom), (x, top - 16), (right, bottom)], fill=fill, outline=INK, width=6)
        case "tall":
            pen.rounded_rectangle(box, radius=28, fill=fill, outline=INK, width=6)

    # Eyes and hat. A pointed body ends in a tip, over which the hat is pulled down.
    for side in (-1, 1):
        eye = x + side * 15
        pen.ellipse((eye - 9, middle - 11, eye + 9, middle + 7), fill=WHITE, outline=INK, width=3)
        pen.ellipse((eye - 4, middle - 5, eye + 4, middle + 4), fill=INK)
    brim = top + 8
    if panel.shape == "pointed":
        brim += 8
    _draw_hat(pen, hat, x=x, brim=brim)


def _draw_hat(pen: ImageDraw.ImageDraw, hat: str, *, x: int, brim: int) -> None:
    match hat:
        case "cap":
            pen.pieslice((x - 36, brim - 34, x + 36, brim + 34), 180, 360, fill=(0, 172, 172), outline=INK, width=5)
            pen.rectangle((x - 66, brim - 8, x + 8, brim + 4), fill=(0, 120, 128), outline=INK, width=3)
        case "crown":
            spikes = [(-36, 4), (-40, -42), (-18, -18), (0, -50), (18, -18), (40, -42), (36, 4)]
            pen.polygon([(x + dx, brim + dy) for dx, dy in spikes], fill=(255, 196, 20), outline=INK, width=5)
        case "top-hat":
            pen.rectangle((x - 28, brim - 62, x + 28, brim), fill=BLACK, outline=GREY, width=3)
            pen.rectangle((x - 28, brim - 22, x + 28, brim - 8), fill=(206, 40, 60))
            pen.rectangle((x - 48, brim - 8, x + 48, brim + 4), fill=BLACK, outline=GREY, width=3)


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
    """Draw `count` prompts about characters of one split, in the T2IS form.

    Characters and palettes take turns (no two of the first 48 test prompts share both). Each prompt has new scenes.
    """
    rng = Random(f"{split}-{seed}")
    subjects = list(subjects_of(split))
    prompts = []
    for index in range(count):
        turn = index % len(subjects)
        if turn == 0:
            rng.shuffle(subjects)
        panels = set_of(subjects[turn], grid.count, rng)
        prompts.append(write_prompt(index, panels, grid))
    return prompts


def set_of(subject: Sequence[str], count: int, rng: Random) -> list[Panel]:
    """Draw `count` panels of one subject (values of KEPT) in different scenes, which repeat only beyond all scenes."""
    scenes: list[tuple[str, str]] = []
    while len(scenes) < count:
        scenes += rng.sample(SCENES, len(SCENES))

    panels = []
    for scene in scenes[:count]:
        panels.append(Panel(*subject, *scene))  # type: ignore[call-arg]
    return panels


def write_prompt(number: int, panels: Sequence[Panel], grid: Grid, *, subject: str = "") -> Prompt:
    """Write the T2IS prompt of these panels.

    Args:
        subject: the shared character; by default that of all panels, which must then be equal.
    """
    if not subject:
        subject = panels[0].subject
        assert all(panel.subject == subject for panel in panels)

    # The subject comes first: CLIP reads only 77 tokens of a prompt.
    sentences = [f"{grid} grid layout of {subject}."]
    for tag, panel in zip(panel_tags(grid), panels, strict=True):
        sentences.append(f"{tag}: {panel.text}.")

    return Prompt(
        id=number,
        text=" ".join(sentences),
        theme=subject,
        grid=grid,
        panels=tuple(panel.text for panel in panels),
        criteria=CRITERIA,
    )


def redrawn(panels: Sequence[Panel], *, chance: float, rng: Random) -> list[Panel]:
    """Imitate an unreliable generator: redraw each kept attribute with probability `chance`."""
    drawn = []
    for panel in panels:
        changes = {}
        for name in KEPT:
            if rng.random() < chance:
                changes[name] = rng.choice(VALUES[name])
        drawn.append(replace(panel, **changes))
    return drawn


def redrawn_once(panel: Panel, rng: Random, *, names: Sequence[str] = KEPT) -> Panel:
    """Change one attribute of `names` to another value."""
    return with_another(panel, rng.choice(names), rng)


def with_another(panel: Panel, name: str, rng: Random) -> Panel:
    """Change one attribute to another value."""
    current = getattr(panel, name)
    values = [value for value in VALUES[name] if value != current]
    return replace(panel, **{name: rng.choice(values)})


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
    """Return the training texts of the tiny tokenizers, with every word about as often as in prompts."""
    texts = [prompt.text for prompt in character_prompts("train", 288)]
    return [*texts, *4 * INSTRUCTIONS]


# --- grading -------------------------------------------------------------------------------------------------

TEMPLATE_SIZE = 32
VALID_DISTANCE = 0.11
"""Root mean squared difference (pixels in 0..1) beyond which an image is no panel of this world. It is about the
median change of a drawing if one identity attribute changes: beyond that distance from every template, no template is
recognisable (`tests/tiny/test_characters.py` measures it)."""

GRADES = ("attribute_agreement", "all_equal_pairs", "prompt_match", "valid")


UNEVEN = (24, 48)
"""Sizes of panels that are blurred on their way to TEMPLATE_SIZE: their templates are drawn at these sizes, too."""


@lru_cache(maxsize=2)  # over a second of drawing, which all oracles of a process share
def _templates(size: int = TEMPLATE_SIZE) -> NDArray[np.float32]:
    """Draw all panels: (5184, pixels), in the order of `all_panels`."""
    return np.stack([_pixels(draw(panel, size)) for panel in all_panels()])


class Oracle:
    """Recognition of panels by their nearest template, and grades of sets. It measures, and is never a reward."""

    def read(self, images: Sequence[Image.Image]) -> list[Panel | None]:
        """Recognise the panel of each image; None if it is farther than VALID_DISTANCE from every template."""
        # The nearest template always exists; beyond the distance it means nothing.
        panels = []
        for panel, distance in self.nearest(images):
            panels.append(panel if distance <= VALID_DISTANCE else None)
        return panels

    def nearest(self, images: Sequence[Image.Image]) -> list[tuple[Panel, float]]:
        """Return the nearest template of each image and its distance."""
        sizes = {image.width if image.width == image.height in UNEVEN else TEMPLATE_SIZE for image in images}
        if len(sizes) > 1:
            return [self.nearest([image])[0] for image in images]
        pixels = np.stack([_pixels(image) for image in images])
        templates = _templates(*sizes)
        # |a − b|² = |a|² − 2ab + |b|², one matrix product instead of 5,184 differences of 3,072 numbers per image.
        # Clipped: in float32 the distance to an image's own template comes out below 0.
        squared = (pixels**2).sum(1)[:, None] - 2 * pixels @ templates.T + (templates**2).sum(1)[None, :]
        mean = squared.clip(min=0) / pixels.shape[1]

        panels = all_panels()
        nearest = []
        for row, best in zip(mean, mean.argmin(1), strict=True):
            nearest.append((panels[best], float(np.sqrt(row[best]))))
        return nearest

    def grade(self, prompt: Prompt, panels: Sequence[Image.Image]) -> dict[str, float]:
        """Return the GRADES of one set, each in 0..1; an invalid panel agrees and matches with none."""
        described = [Panel.parse(text) for text in prompt.panels]
        return grade(described, self.read(panels))


def grade(described: Sequence[Panel], shown: Sequence[Panel | None]) -> dict[str, float]:
    """Return the GRADES of a set.

    Args:
        described: panels of the prompt.
        shown: recognised panels of the image.

    Returns:
        attribute_agreement: share of kept attributes that two panels share, mean over pairs of panels.
        all_equal_pairs: share of pairs that share all of them.
        prompt_match: share of the six attributes that a panel's text names and the panel shows, mean over panels.
        valid: share of recognised panels.
    """
    # Between panels, then between each panel and its text.
    agreement = []
    for first, second in itertools.combinations(shown, 2):
        agreement.append(_share_equal(first, second, KEPT))
    # A single panel has no pairs, and cannot disagree with itself.
    agreement = agreement or [1.0]

    matches = []
    for expected, panel in zip(described, shown, strict=True):
        matches.append(_share_equal(expected, panel, tuple(VALUES)))

    return {
        "attribute_agreement": float(np.mean(agreement)),
        "all_equal_pairs": float(np.mean([share == 1 for share in agreement])),
        "prompt_match": float(np.mean(matches)),
        "valid": float(np.mean([panel is not None for panel in shown])),
    }


def agreement_of_looks(sets: Sequence[Sequence[Panel | None]]) -> dict[str, float]:
    """Measure the agreement of each kept attribute, over valid panels.

    Returns:
        `within/NAME` and `across/NAME`, the shares of equal pairs of panels of one set and of different sets, and
        `kappa/NAME`, agreement corrected for chance. No mean over attributes, which would hide one that has collapsed.
    """
    measured: dict[str, float] = {}
    for name in KEPT:
        within, across = equal_shares([[getattr(panel, name) for panel in panels if panel] for panels in sets])
        measured |= {f"within/{name}": within, f"across/{name}": across, f"kappa/{name}": kappa(within, across)}
    return measured


def _share_equal(first: Panel | None, second: Panel | None, names: Sequence[str]) -> float:
    if first is None or second is None:
        return 0.0
    return float(np.mean([getattr(first, name) == getattr(second, name) for name in names]))


Majority = tuple[str | None, ...]
"""The commonest value of each kept attribute among a set's valid panels; None if there are none."""


def majority(panels: Sequence[Panel | None]) -> Majority:
    """Return the majority of a set; of equally common values the first in the alphabet."""
    valid = [panel.kept for panel in panels if panel]
    if not valid:
        return (None,) * len(KEPT)

    commonest = []
    for values in zip(*valid, strict=True):
        commonest.append(max(sorted(set(values)), key=values.count))
    return tuple(commonest)


def evenness(majorities: Sequence[Majority]) -> float:
    """Return the diversity of sets: the normalised entropy of their majorities, mean over the kept attributes.

    It is 1 if all values are equally common among the sets, and 0 if every set shows the same value.
    """
    # Per attribute: an even mix of hats must not hide a single colour.
    entropies = []
    for name, values in zip(KEPT, zip(*majorities, strict=True), strict=True):
        counts = np.array([values.count(value) for value in VALUES[name]], dtype=float)
        # At least 1: sets without a valid panel have no majority to count.
        shares = counts[counts > 0] / max(counts.sum(), 1)
        entropy = -(shares * np.log(shares)).sum()
        entropies.append(float(entropy / np.log(len(counts))))
    return float(np.mean(entropies))


def _pixels(image: Image.Image) -> NDArray[np.float32]:
    small = image.convert("RGB").resize((TEMPLATE_SIZE, TEMPLATE_SIZE), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32).reshape(-1) / np.float32(255)
