"""Faulty panels and panels without a hero, drawn at any size: what the tiny judge must say No to.

A *mixed* panel has parts of two palettes. A *defect* is a damaged hero. Junk shows nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from random import Random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from pacorl.tiny.world import VALUES, Panel, draw, with_another
from research.tiny.drawing import COLOURS

SIDE = 96
"""Pixels of a panel before it is damaged."""
HORIZON = 66
FAR = 90
"""Least distance of a foreign colour to each of the world's, of 442."""


def random_panel(rng: Random) -> Panel:
    """Draw any panel of the world."""
    return Panel(*(rng.choice(values) for values in VALUES.values()))


def mixed(panel: Panel, other: str, rng: Random) -> Image.Image:
    """Draw a panel whose sky, ground, half or tint is of another palette."""
    first = draw(panel, SIDE)
    second = draw(replace(panel, palette=other), SIDE)
    match rng.choice(("sky", "ground", "side", "upper", "tint")):
        case "sky":
            return _pasted(first, second, (0, 0, SIDE, HORIZON))
        case "ground":
            return _pasted(first, second, (0, HORIZON, SIDE, SIDE))
        case "side":
            middle = rng.randint(SIDE // 3, 2 * SIDE // 3)
            return _pasted(first, second, rng.choice(((0, 0, middle, SIDE), (middle, 0, SIDE, SIDE))))
        case "upper":
            return _pasted(first, second, (0, 0, SIDE, rng.randint(HORIZON // 2, HORIZON)))
        case _:
            return Image.blend(first, second, rng.uniform(0.4, 0.6))


def _pasted(first: Image.Image, second: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    image = first.copy()
    image.paste(second.crop(box), box[:2])
    return image


# --- defects of a hero -----------------------------------------------------------------------------------------


def _no_hat(panel: Panel, rng: Random) -> Image.Image:
    return draw(panel, SIDE, without={"hat"})


def _half_a_hat(panel: Panel, rng: Random) -> Image.Image:
    other = draw(with_another(panel, "hat", rng), SIDE) if rng.random() < 0.5 else _no_hat(panel, rng)
    middle = rng.randint(30, 38)
    box = rng.choice(((6, 0, middle, 54), (middle, 0, 64, 54)))
    return _pasted(draw(panel, SIDE), other, box)


def _hole(panel: Panel, rng: Random) -> Image.Image:
    image = draw(panel, SIDE)
    fill = image.getpixel(rng.choice(((SIDE - 30, 40), (3, SIDE - 4))))
    return _composed(image, Image.new("RGB", image.size, fill), rng, (9, 15))  # type: ignore[arg-type]


def _blob(panel: Panel, rng: Random) -> Image.Image:
    fill = (rng.randrange(256), rng.randrange(256), rng.randrange(256))
    image = draw(panel, SIDE)
    return _composed(image, Image.new("RGB", image.size, fill), rng, (10, 17))


def _smear(panel: Panel, rng: Random) -> Image.Image:
    image = draw(panel, SIDE)
    if rng.random() < 0.5:
        spoiled = image.filter(ImageFilter.GaussianBlur(rng.uniform(5, 10)))
    else:
        dx = rng.choice((-1, 1)) * rng.uniform(1.5, 3)
        dy = rng.uniform(-2, 2)
        copies = []
        for step in range(rng.randint(8, 14)):
            moved = image.transform(image.size, Image.Transform.AFFINE, (1, 0, dx * step, 0, 1, dy * step))
            copies.append(np.asarray(moved, dtype=float))
        spoiled = Image.fromarray(np.mean(copies, axis=0).astype(np.uint8))
    return _composed(image, spoiled, rng, (18, 30))


def _noise_patch(panel: Panel, rng: Random) -> Image.Image:
    image = draw(panel, SIDE)
    cells = rng.choice((8, 12, 16, 24, 32))
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    return _composed(image, Image.fromarray(noise).resize(image.size, Image.Resampling.NEAREST), rng, (11, 20))


def _two_heroes(panel: Panel, rng: Random) -> Image.Image:
    image = draw(panel, SIDE)
    differs = (np.asarray(image) != np.asarray(draw(panel, SIDE, without={"hero", "hat"}))).any(-1)
    result = image.copy()
    result.paste(image, (rng.randint(18, 40), rng.randint(-5, 5)), Image.fromarray((differs * 255).astype(np.uint8)))
    return result


def _foreign_colour(panel: Panel, rng: Random) -> Image.Image:
    known = np.array([*COLOURS.values()])
    while True:
        paint = np.array([rng.randrange(256) for _ in range(3)])
        if np.linalg.norm(known - paint, axis=1).min() > FAR:
            break
    # The body differs between two colours; its share of either is read off their difference.
    first = np.asarray(draw(panel, SIDE), dtype=float)
    other = with_another(panel, "colour", rng)
    second = np.asarray(draw(other, SIDE), dtype=float)
    change = np.array(COLOURS[other.colour], dtype=float) - np.array(COLOURS[panel.colour], dtype=float)
    share = ((second - first) @ change / (change @ change))[..., None].clip(0, 1)
    return Image.fromarray((first + share * (paint - np.array(COLOURS[panel.colour]))).clip(0, 255).astype(np.uint8))


DEFECTS: dict[str, Callable[[Panel, Random], Image.Image]] = {
    "no hat": _no_hat,
    "half a hat": _half_a_hat,
    "a hole": _hole,
    "a blob": _blob,
    "a smear": _smear,
    "a patch of noise": _noise_patch,
    "two heroes": _two_heroes,
    "another colour": _foreign_colour,
}


def _composed(image: Image.Image, over: Image.Image, rng: Random, radii: tuple[float, float]) -> Image.Image:
    """Cover a part of the hero by another image, within a wavy outline."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    waves = np.ones_like(angles)
    for frequency in (2, 3, 5):
        waves += rng.uniform(0, 0.18) * np.sin(frequency * angles + rng.uniform(0, 2 * np.pi))
    radius = rng.uniform(*radii)
    x = rng.uniform(26, 42) + radius * waves * np.cos(angles)
    y = rng.uniform(34, 68) + radius * waves * np.sin(angles)
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).polygon(list(zip(x.tolist(), y.tolist(), strict=True)), fill=255)
    return Image.composite(over, image, mask)


# --- junk ------------------------------------------------------------------------------------------------------


def junk(rng: Random) -> Image.Image:  # noqa: PLR0911 - one for each kind
    """Draw an image without a hero: noise, fields, blurs, shuffles and blends."""
    noise = np.random.default_rng(rng.randrange(2**32))
    match rng.randrange(7):
        case 0:
            return _image(noise.normal(noise.uniform(0, 255, 3), noise.uniform(5, 120), (SIDE, SIDE, 3)))
        case 1:
            start, end = noise.uniform(0, 255, 3), noise.uniform(0, 255, 3)
            ramp = np.linspace(0, rng.choice([0, 0, 1]), SIDE)[:, None, None]
            return _image(np.broadcast_to(start + (end - start) * ramp, (SIDE, SIDE, 3)))
        case 2:
            pixels = np.asarray(draw(random_panel(rng), SIDE), dtype=float)
            return _image(pixels * noise.uniform(0, 0.2) + noise.normal(0, noise.uniform(0, 12), pixels.shape))
        case 3:
            cells = rng.choice((2, 3, 4, 6, 8))
            return _image(noise.uniform(0, 255, (cells, cells, 3))).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        case 4:
            return draw(random_panel(rng), SIDE).filter(ImageFilter.GaussianBlur(rng.uniform(11, 24)))
        case 5:
            pixels = np.asarray(draw(random_panel(rng), SIDE))
            side = rng.choice((4, 8))
            blocks = [block for strip in np.split(pixels, side) for block in np.split(strip, side, axis=1)]
            rng.shuffle(blocks)
            strips = [np.concatenate(blocks[start : start + side], axis=1) for start in range(0, len(blocks), side)]
            return _image(np.concatenate(strips))
        case _:
            return _image(np.mean([np.asarray(draw(random_panel(rng), SIDE), dtype=float) for _ in range(5)], axis=0))


def worn(image: Image.Image, rng: Random) -> Image.Image:
    """Add faint noise, or compress the image as JPEG: neither is a fault."""
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(1, 8), (*image.size, 3))
        return _image(np.asarray(image) + noise)
    file = io.BytesIO()
    image.save(file, "jpeg", quality=rng.randint(60, 95))
    return Image.open(file).convert("RGB")


def _image(pixels: np.ndarray) -> Image.Image:  # type: ignore[type-arg]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
