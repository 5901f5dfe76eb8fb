"""Faulty panels for the tiny judge: palettes that changed by half, damaged heroes and props, colours of no hero.

A `Mixed` panel has parts of two palettes. A `Defect` names its fault in words, which the judge learns as its reason.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw, ImageFilter

from pacorl.io.images import open_image
from pacorl.tiny.characters import CANVAS, COLOURS, Panel, Split, draw, panels_of, with_another
from research.tiny.negatives import to_images

SIZES = (16, 24, 32, 48, 64)
"""Panels that the judge sees: of 2×2 grids of 32, 48, 64, 96 and 128 px."""
HORIZON = 188
"""Row of the canvas where the ground begins."""
LEGIBLE = (32, 48)
"""Sizes of reconstructed panels: smaller ones cannot be recognised, and one of 64 px is almost its drawing."""
RECONSTRUCTED = 0.5
"""Share of the faulty panels of LEGIBLE sizes that pass through the autoencoder, as a generator's do."""
FAR = 90
"""Least distance of a foreign colour to each of the world's, of 442."""
HAT_BOX = (24, 0, 168, 128)
"""Part of the canvas with every hat."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A panel of which a part has another palette."""

    panel: Panel
    other: str
    """The other palette."""
    image: Image.Image


@dataclass(frozen=True, slots=True)
class Defect:
    """A damaged panel."""

    panel: Panel
    name: str
    """What is wrong, as in "The second shows a smear."."""
    spoils_hero: bool
    """False if only the prop is wrong, which says nothing about identity and style."""
    image: Image.Image


def by_kind(faulty: Sequence[Mixed | Defect]) -> tuple[list[Mixed], list[Defect]]:
    """Divide faulty panels into mixed ones and defects, in their order."""
    mixed: list[Mixed] = []
    defects: list[Defect] = []
    for panel in faulty:
        if isinstance(panel, Mixed):
            mixed.append(panel)
        else:
            defects.append(panel)
    return mixed, defects


def draw_mixed(count: int, *, split: Split, rng: Random, vae: AutoencoderKL) -> list[Mixed]:
    """Draw panels whose sky, ground, half or tint comes from another palette."""
    pool = panels_of(split)
    mixed = []
    for _ in range(count):
        panel = rng.choice(pool)
        other = with_another(panel, "palette", rng)
        mixed.append(Mixed(panel, other.palette, rng.choice(MIXES)(draw(panel, CANVAS), draw(other, CANVAS), rng)))

    images = finished([each.image for each in mixed], rng, vae)
    return [replace(each, image=image) for each, image in zip(mixed, images, strict=True)]


def draw_defects(count: int, *, split: Split, rng: Random, vae: AutoencoderKL) -> list[Defect]:
    """Draw damaged panels; the kinds of DEFECTS take turns."""
    pool = panels_of(split)
    kinds = tuple(DEFECTS.items())
    defects = []
    for number in range(count):
        panel = rng.choice(pool)
        name, damage = kinds[number % len(kinds)]
        defects.append(Defect(panel, name, name not in OF_THE_PROP, damage(panel, rng)))

    images = finished([defect.image for defect in defects], rng, vae)
    return [replace(defect, image=image) for defect, image in zip(defects, images, strict=True)]


def finished(canvases: Sequence[Image.Image], rng: Random, vae: AutoencoderKL) -> list[Image.Image]:
    """Shrink canvases to one of SIZES each, and reconstruct some of them by the autoencoder."""
    images = []
    for canvas in canvases:
        images.append(canvas.resize((rng.choice(SIZES),) * 2, Image.Resampling.BOX))
    chosen = [number for number in range(len(images)) if rng.random() < RECONSTRUCTED]
    for size in LEGIBLE:
        numbers = [number for number in chosen if images[number].width == size]
        for number, image in zip(numbers, reconstructed([images[number] for number in numbers], vae), strict=True):
            images[number] = image
    return images


def worn(image: Image.Image, rng: Random) -> Image.Image:
    """Add faint noise, or compress the image as JPEG: neither is a fault."""
    if rng.random() < 0.5:
        noise = np.random.default_rng(rng.randrange(2**32)).normal(0, rng.uniform(1, 8), (*image.size, 3))
        return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))
    file = io.BytesIO()
    image.save(file, "jpeg", quality=rng.randint(60, 95))
    return open_image(file.getvalue())


@torch.no_grad()
def reconstructed(images: Sequence[Image.Image], vae: AutoencoderKL, *, batch: int = 64) -> list[Image.Image]:
    """Encode and decode images of one size."""
    results: list[Image.Image] = []
    for start in range(0, len(images), batch):
        pixels = np.stack([np.asarray(image) for image in images[start : start + batch]])
        encoded = vae.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1)
        results += to_images(vae.decode(encoded.latent_dist.mode()).sample)
    return results


# --- palettes ----------------------------------------------------------------------------------------------------


def _sky(first: Image.Image, second: Image.Image, rng: Random) -> Image.Image:
    return _pasted(first, second, (0, 0, CANVAS, HORIZON))


def _ground(first: Image.Image, second: Image.Image, rng: Random) -> Image.Image:
    return _pasted(first, second, (0, HORIZON, CANVAS, CANVAS))


def _side(first: Image.Image, second: Image.Image, rng: Random) -> Image.Image:
    middle = rng.randint(CANVAS // 3, 2 * CANVAS // 3)
    return _pasted(first, second, rng.choice(((0, 0, middle, CANVAS), (middle, 0, CANVAS, CANVAS))))


def _upper_sky(first: Image.Image, second: Image.Image, rng: Random) -> Image.Image:
    return _pasted(first, second, (0, 0, CANVAS, rng.randint(HORIZON // 2, HORIZON)))


def _tinted(first: Image.Image, second: Image.Image, rng: Random) -> Image.Image:
    # Hero and prop are equal in both images, and stay.
    return Image.blend(first, second, rng.uniform(0.4, 0.6))


def _pasted(first: Image.Image, second: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    image = first.copy()
    image.paste(second.crop(box), box[:2])
    return image


MIXES: tuple[Callable[[Image.Image, Image.Image, Random], Image.Image], ...] = (
    _sky, _sky, _ground, _side, _upper_sky, _tinted,
)  # fmt: skip


# --- damage ------------------------------------------------------------------------------------------------------


def _hatless(panel: Panel, rng: Random) -> Image.Image:
    return draw(panel, CANVAS, without="hat")


def _half_a_hat(panel: Panel, rng: Random) -> Image.Image:
    """Draw a part of the hat, or parts of two."""
    other = draw(with_another(panel, "hat", rng), CANVAS)
    if rng.random() < 0.5:
        other = _hatless(panel, rng)
    left, _, right, bottom = HAT_BOX
    middle = rng.randint(84, 108)
    return _pasted(draw(panel, CANVAS), other, rng.choice(((left, 0, middle, bottom), (middle, 0, right, bottom))))


def _hole(panel: Panel, rng: Random) -> Image.Image:
    """Let the sky or the ground show through the hero."""
    image = draw(panel, CANVAS)
    fill = image.getpixel(rng.choice(((CANVAS - 6, 6), (4, CANVAS - 4))))
    mask = _blot(rng, centre=_on_the_hero(rng), radius=rng.uniform(24, 44))
    return Image.composite(Image.new("RGB", image.size, fill), image, mask)


def _blob(panel: Panel, rng: Random) -> Image.Image:
    """Cover a part of the hero with one colour."""
    image = draw(panel, CANVAS)
    fill = tuple(rng.randrange(256) for _ in range(3))
    mask = _blot(rng, centre=_on_the_hero(rng), radius=rng.uniform(26, 48))
    return Image.composite(Image.new("RGB", image.size, fill), image, mask)


def _smear(panel: Panel, rng: Random) -> Image.Image:
    """Blur the hero, or drag it along a line."""
    image = draw(panel, CANVAS)
    if rng.random() < 0.5:
        spoiled = image.filter(ImageFilter.GaussianBlur(rng.uniform(14, 30)))
    else:
        steps = rng.randint(8, 14)
        dx = rng.choice((-1, 1)) * rng.uniform(4, 8)
        dy = rng.uniform(-5, 5)
        copies = []
        for step in range(steps):
            moved = image.transform(image.size, Image.Transform.AFFINE, (1, 0, dx * step, 0, 1, dy * step))
            copies.append(np.asarray(moved, dtype=float))
        spoiled = Image.fromarray(np.mean(copies, axis=0).astype(np.uint8))
    mask = _blot(rng, centre=_on_the_hero(rng), radius=rng.uniform(50, 80))
    return Image.composite(spoiled, image, mask)


def _noise_patch(panel: Panel, rng: Random) -> Image.Image:
    """Replace a part of the hero by coarse noise."""
    image = draw(panel, CANVAS)
    cells = rng.choice((16, 24, 32, 64))
    noise = np.random.default_rng(rng.randrange(2**32)).integers(0, 256, (cells, cells, 3), dtype=np.uint8)
    grains = Image.fromarray(noise).resize(image.size, Image.Resampling.NEAREST)
    mask = _blot(rng, centre=_on_the_hero(rng), radius=rng.uniform(30, 55))
    return Image.composite(grains, image, mask)


def _two_heroes(panel: Panel, rng: Random) -> Image.Image:
    """Draw the hero a second time, partly behind the first."""
    image = draw(panel, CANVAS)
    mask = _difference(image, draw(panel, CANVAS, without="hero"))
    return _stamped(image, image, mask, (rng.randint(48, 110), rng.randint(-12, 12)))


def _foreign_colour(panel: Panel, rng: Random) -> Image.Image:
    """Paint the body in a colour that no hero has."""
    known = np.array([*COLOURS.values()])
    while True:
        paint = np.array([rng.randrange(256) for _ in range(3)])
        if np.linalg.norm(known - paint, axis=1).min() > FAR:
            break
    # The canvas has no soft edges: every pixel of the body has the colour itself.
    pixels = np.asarray(draw(panel, CANVAS))
    body = (pixels == np.array(COLOURS[panel.colour])).all(-1, keepdims=True)
    return Image.fromarray(np.where(body, paint, pixels).astype(np.uint8))


def _no_prop(panel: Panel, rng: Random) -> Image.Image:
    return draw(panel, CANVAS, without="prop")


def _two_props(panel: Panel, rng: Random) -> Image.Image:
    """Draw the prop a second time, or another one in front of it."""
    image = draw(panel, CANVAS)
    drawn = panel
    shift = (0, 0)
    if rng.random() < 0.5:
        drawn = with_another(panel, "prop", rng)
    else:
        shift = (rng.randint(-64, -28), rng.randint(-60, 16))
    stamp = draw(drawn, CANVAS)
    mask = _difference(stamp, draw(drawn, CANVAS, without="prop"))
    return _stamped(image, stamp, mask, shift)


DEFECTS: dict[str, Callable[[Panel, Random], Image.Image]] = {
    "no hat": _hatless,
    "half a hat": _half_a_hat,
    "a hole": _hole,
    "a blob": _blob,
    "a smear": _smear,
    "a patch of noise": _noise_patch,
    "two heroes": _two_heroes,
    "another colour": _foreign_colour,
    "no prop": _no_prop,
    "two props": _two_props,
}
OF_THE_PROP = ("no prop", "two props")


def _on_the_hero(rng: Random) -> tuple[float, float]:
    return rng.uniform(70, 122), rng.uniform(96, 180)


def _blot(rng: Random, *, centre: tuple[float, float], radius: float) -> Image.Image:
    """Draw a mask with a wavy outline."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    waves = np.ones_like(angles)
    for frequency in (2, 3, 5):
        waves += rng.uniform(0, 0.18) * np.sin(frequency * angles + rng.uniform(0, 2 * np.pi))
    x = centre[0] + radius * waves * np.cos(angles)
    y = centre[1] + radius * waves * np.sin(angles)
    mask = Image.new("L", (CANVAS, CANVAS))
    ImageDraw.Draw(mask).polygon(list(zip(x.tolist(), y.tolist(), strict=True)), fill=255)
    return mask


def _difference(first: Image.Image, second: Image.Image) -> Image.Image:
    """Mask the pixels in which two images differ."""
    differs = (np.asarray(first) != np.asarray(second)).any(-1)
    return Image.fromarray((differs * 255).astype(np.uint8))


def _stamped(image: Image.Image, stamp: Image.Image, mask: Image.Image, shift: tuple[int, int]) -> Image.Image:
    """Paste the masked part of another image, moved by `shift`."""
    result = image.copy()
    result.paste(stamp, shift, mask)
    return result
