"""Draws the images of rankings.csv, and writes it: animals in three styles, none of them the tiny world's.

    python examples/rankings/draw.py examples/rankings

Each folder holds one animal: a reference, the same animal elsewhere, the same with another thing to wear, the same in
another style, and another animal in its place. That is also the order in which `ann` ranks them, while the files are
named by letters at random; `ben` minds a change of style less than other clothes, or as much, in some. The images are
the project's own, under its licence (Apache-2.0).
"""

from __future__ import annotations

import csv
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter

SIDE, SCALE = 192, 4
Point = tuple[float, float]


@dataclass(frozen=True)
class Scene:
    """Everything that an image shows."""

    animal: str
    wears: str
    style: str
    pose: str = "stand"
    beside: str = "tree"


FUR = {"fox": "#d9742b", "owl": "#7d5ba6", "cat": "#4b4e57", "hare": "#c9ab8a", "bear": "#8a5a3b", "frog": "#5a9a4a",
       "mouse": "#9aa3ad", "pig": "#e59aa5"}  # fmt: skip
CLOTH = {"scarf": "#2a7f62", "hat": "#2f5fa8", "crown": "#e0b020", "glasses": "#20242c", "bow": "#b5305a"}
POSES = {"stand": ((-26, 18), (26, 18)), "wave": ((-26, 18), (30, -26)), "cheer": ((-30, -26), (30, -26))}
"""Where the hands are, from the middle of the body."""
GROUND = {"flat": ("#bfe3f2", "#7fb77e"), "ink": ("#fbfaf5", "#fbfaf5"), "chalk": ("#2c3a47", "#3d4f5e")}
"""Of each style: the sky and the ground."""


class Pen:
    """Fills and outlines shapes as a style does, on a canvas whose middle is (0, 0) and whose side is 192."""

    def __init__(self, style: str) -> None:
        self.style = style
        sky, ground = GROUND[style]
        self.image = Image.new("RGB", (SIDE * SCALE, SIDE * SCALE), sky)
        self.draw = ImageDraw.Draw(self.image)
        self.draw.rectangle((0, 150 * SCALE, SIDE * SCALE, SIDE * SCALE), fill=ground)
        if style == "ink":
            self.line([(-96, 54), (96, 54)], "black", 2)

    def colour(self, colour: str, *, spot: bool) -> str:
        """Ink leaves all white but a spot of colour; chalk is paler than paint."""
        if self.style == "ink" and not spot:
            return "white"
        return colour

    def shape(self, points: list[Point], colour: str, *, spot: bool = False) -> None:
        pixels = [((x + 96) * SCALE, (y + 96) * SCALE) for x, y in points]
        fill = self.colour(colour, spot=spot)
        if self.style == "chalk":
            self.draw.polygon(pixels, fill=_mixed(fill, GROUND["chalk"][0], 0.35))
            self.draw.line([*pixels, pixels[0]], fill=_mixed(fill, "#ffffff", 0.45), width=3 * SCALE, joint="curve")
        else:
            self.draw.polygon(pixels, fill=fill)
        if self.style == "ink":
            self.draw.line([*pixels, pixels[0]], fill="black", width=2 * SCALE, joint="curve")

    def oval(self, x: float, y: float, wide: float, high: float, colour: str, *, spot: bool = False) -> None:
        turns = [2 * math.pi * step / 48 for step in range(48)]
        self.shape([(x + wide * math.cos(turn), y + high * math.sin(turn)) for turn in turns], colour, spot=spot)

    def line(self, points: list[Point], colour: str, width: float) -> None:
        pixels = [((x + 96) * SCALE, (y + 96) * SCALE) for x, y in points]
        colour = "black" if self.style == "ink" else colour
        self.draw.line(pixels, fill=colour, width=round(width * SCALE), joint="curve")

    def limb(self, start: Point, end: Point, colour: str) -> None:
        self.line([start, end], _mixed(colour, "#ffffff", 0.3) if self.style == "chalk" else colour, 8)
        if self.style == "ink":
            self.draw.line([((x + 96) * SCALE, (y + 96) * SCALE) for x, y in (start, end)], "white", 4 * SCALE)

    def finished(self) -> Image.Image:
        image = self.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        return _grained(image) if self.style == "chalk" else image.quantize(48, dither=Image.Dither.NONE)


def _mixed(first: str, second: str, share: float) -> str:
    pairs = zip(*(bytes.fromhex(colour[1:]) for colour in (first, second)), strict=True)
    return "#" + "".join(f"{round(a * (1 - share) + b * share):02x}" for a, b in pairs)


def _grained(image: Image.Image) -> Image.Image:
    """The grain of a blackboard."""
    rng = random.Random(1)
    noise = Image.frombytes("L", (SIDE // 2, SIDE // 2), bytes(rng.randrange(188, 256) for _ in range(SIDE**2 // 4)))
    grain = noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC).filter(ImageFilter.SMOOTH)
    return ImageChops.multiply(image, grain.convert("RGB"))


def draw(scene: Scene) -> Image.Image:
    pen, fur = Pen(scene.style), FUR[scene.animal]
    BESIDE[scene.beside](pen)
    for side, (x, y) in zip((-1, 1), POSES[scene.pose], strict=True):
        pen.limb((side * 14, 28), (x, 28 + y), fur)
        pen.oval(x, 28 + y, 6, 6, fur)
        pen.oval(side * 12, 66, 10, 7, fur)
    pen.oval(0, 36, 24, 30, fur)
    pen.oval(0, 42, 13, 18, "#f6ead8")
    EARS[scene.animal](pen, fur)
    pen.oval(0, -14, 32, 27, fur)
    _face(pen, scene.animal)
    WORN[scene.wears](pen, CLOTH[scene.wears])
    return pen.finished()


def _face(pen: Pen, animal: str) -> None:
    big = animal in {"owl", "frog"}
    for side in (-1, 1):
        pen.oval(side * 12, -20, 8 if big else 5, 9 if big else 6, "#ffffff")
        pen.oval(side * 12, -19, 4 if big else 3, 4, "#1c1c1c", spot=True)
    if animal == "owl":
        pen.shape([(-5, -10), (5, -10), (0, 0)], "#e8a33d")
    elif animal == "frog":
        pen.line([(-16, -2), (0, 4), (16, -2)], "#24401c", 2.5)
    else:
        pen.oval(0, -4, 12, 8, "#f6ead8")
        pen.oval(0, -8, 4, 3, "#1c1c1c", spot=True)


def _pointed(pen: Pen, fur: str) -> None:
    for side in (-1, 1):
        pen.shape([(side * 30, -22), (side * 27, -58), (side * 8, -36)], fur)


def _round(radius: float) -> Callable[[Pen, str], None]:
    def ears(pen: Pen, fur: str) -> None:
        for side in (-1, 1):
            pen.oval(side * 25, -36, radius, radius, fur)

    return ears


def _long(pen: Pen, fur: str) -> None:
    for side in (-1, 1):
        pen.oval(side * 13, -52, 7, 26, fur)


EARS: dict[str, Callable[[Pen, str], None]] = {
    "fox": _pointed, "cat": _pointed, "owl": _pointed, "hare": _long, "bear": _round(10), "mouse": _round(17),
    "frog": _round(9), "pig": _pointed,
}  # fmt: skip


def _scarf(pen: Pen, colour: str) -> None:
    pen.oval(0, 12, 22, 6, colour, spot=True)
    pen.shape([(10, 12), (20, 12), (24, 40), (12, 40)], colour, spot=True)


def _hat(pen: Pen, colour: str) -> None:
    pen.shape([(-18, -38), (18, -38), (14, -68), (-14, -68)], colour, spot=True)
    pen.oval(0, -38, 28, 4, colour, spot=True)


def _crown(pen: Pen, colour: str) -> None:
    pen.shape([(-20, -36), (20, -36), (22, -60), (10, -46), (0, -64), (-10, -46), (-22, -60)], colour, spot=True)


def _glasses(pen: Pen, colour: str) -> None:
    for side in (-1, 1):
        ring = [2 * math.pi * step / 32 for step in range(33)]
        pen.line([(side * 12 + 11 * math.cos(turn), -20 + 11 * math.sin(turn)) for turn in ring], colour, 3)
    pen.line([(-3, -20), (3, -20)], colour, 3)


def _bow(pen: Pen, colour: str) -> None:
    for side in (-1, 1):
        pen.shape([(0, 14), (side * 18, 4), (side * 18, 24)], colour, spot=True)
    pen.oval(0, 14, 4, 4, colour, spot=True)


WORN = {"scarf": _scarf, "hat": _hat, "crown": _crown, "glasses": _glasses, "bow": _bow}


def _tree(pen: Pen) -> None:
    pen.shape([(60, 54), (68, 54), (68, 10), (60, 10)], "#7a5230")
    pen.oval(64, 0, 20, 26, "#3f8f4f")


def _house(pen: Pen) -> None:
    pen.shape([(-90, 54), (-46, 54), (-46, 14), (-90, 14)], "#d8c3a0")
    pen.shape([(-94, 14), (-42, 14), (-68, -14)], "#b4452f")


def _moon(pen: Pen) -> None:
    pen.oval(64, -64, 14, 14, "#f3e7a1")


def _boat(pen: Pen) -> None:
    pen.shape([(-92, 50), (-44, 50), (-54, 66), (-82, 66)], "#a0522d")
    pen.shape([(-68, 48), (-68, 10), (-46, 42)], "#eef2f5")


def _lamp(pen: Pen) -> None:
    pen.line([(66, 54), (66, -6)], "#565d66", 4)
    pen.oval(66, -14, 9, 9, "#f7d560")


BESIDE = {"tree": _tree, "house": _house, "moon": _moon, "boat": _boat, "lamp": _lamp}

REFERENCES = [
    Scene("fox", "scarf", "flat"),
    Scene("owl", "glasses", "ink"),
    Scene("cat", "hat", "chalk"),
    Scene("hare", "bow", "flat"),
    Scene("bear", "crown", "ink"),
    Scene("frog", "crown", "chalk"),
    Scene("mouse", "scarf", "ink"),
    Scene("pig", "hat", "flat"),
]
OTHERS = ["cat", "bear", "frog", "mouse", "owl", "pig", "fox", "hare"]
"""The animal of each folder's last image."""
BEN = {"fox": "0 1 3 2 4", "owl": "0 1 2=3 4", "hare": "0 1 2 3 4", "pig": "0 1 2=3 4"}
"""His orders, of the folders that he ranked; the reference comes first."""


def folder_scenes(index: int) -> list[Scene]:
    """The five scenes of a folder."""
    one = REFERENCES[index]
    poses, places, worn, styles = list(POSES), list(BESIDE), list(WORN), list(GROUND)
    pose, place = poses[index % 3], places[index % 5]
    other = worn[(worn.index(one.wears) + 1 + index) % 5]
    other = other if other != one.wears else worn[(worn.index(one.wears) + 1) % 5]
    return [
        replace(one, pose=pose, beside=place),
        replace(one, pose=poses[(index + 1) % 3], beside=places[(index + 1) % 5]),
        replace(one, pose=poses[(index + 2) % 3], beside=places[(index + 2) % 5], wears=other),
        replace(one, pose=pose, beside=places[(index + 3) % 5], style=styles[(styles.index(one.style) + 1) % 3]),
        replace(one, pose=pose, beside=places[(index + 4) % 5], animal=OTHERS[index], wears=other),
    ]


def main(folder: Path) -> None:
    rows = []
    for index, one in enumerate(REFERENCES):
        names: list[str] = []
        letters = ["reference", *random.Random(one.animal).sample("abcd", 4)]
        for number, scene in enumerate(folder_scenes(index)):
            suffix = "jpg" if scene.style == "chalk" else "png"  # grain makes large PNGs
            names.append(f"images/{one.animal}/{letters[number]}.{suffix}")
            path = folder / names[-1]
            path.parent.mkdir(parents=True, exist_ok=True)
            draw(scene).save(path, **({"quality": 82} if suffix == "jpg" else {"optimize": True}))
        theme = f"One {one.animal} with {'glasses' if one.wears == 'glasses' else f'a {one.wears}'} in several scenes"
        for who, order in (("ann", "0 1 2 3 4"), ("ben", BEN.get(one.animal, ""))):
            if order:
                reference, *tiers = [" = ".join(names[int(n)] for n in tier.split("=")) for tier in order.split()]
                rows.append([reference, " | ".join(tiers), theme, who])
    with (folder / "rankings.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["reference", "candidates", "theme", "annotator"], *rows])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
