"""Images that show nothing of the tiny world, for a domain that is to tell them apart: textures, scenes, documents.

They are drawn, so that the domain can be made again without a single photograph: noise of natural spectra, cells,
grain, gradients, overlapping shapes, bricks, documents and lights, then composed, coloured and blurred as photographs
are.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

SIDE = 128  # pixels of every drawn texture
WORDS = ("who", "paints", "light", "house", "sea", "must", "know", "how", "waves", "leave", "marks", "on", "stone")

Array = NDArray[np.float64]
Texture = Callable[[random.Random, np.random.Generator], Image.Image]


def draw_textures(count: int, *, seed: int) -> list[Image.Image]:
    """`count` images: half of one texture, half of several laid over one another; most of them graded and blurred."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    return [_photographed(_scene(rng, noise), rng, noise) for _ in range(count)]


def _scene(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """A texture, perhaps with objects of other textures in front of it."""
    scene = rng.choice(TEXTURES)(rng, noise)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
        outline = _cloud(noise, rng.uniform(1.5, 3.0))
        mask = Image.fromarray(((outline > np.quantile(outline, rng.uniform(0.4, 0.9))) * 255).astype(np.uint8))
        scene = Image.composite(rng.choice(TEXTURES)(rng, noise), scene, mask)
    return scene


def _photographed(scene: Image.Image, rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """The scene with the colours, contrast, light, grain, focus and framing of a photograph."""
    pixels = np.asarray(scene, dtype=float)
    if rng.random() < 0.6:
        grey = pixels.mean(-1, keepdims=True)
        pixels = grey + (pixels - grey) * rng.choice((0.0, rng.random(), rng.random()))
    if rng.random() < 0.4:
        pixels = 255 * (pixels.clip(0, 255) / 255) ** rng.uniform(0.5, 2.0)
    if rng.random() < 0.5:
        pixels = (pixels - 128) * rng.uniform(0.3, 1.2) + 128 + noise.uniform(-40, 40, 3)
    if rng.random() < 0.4:
        light = _cloud(noise, 2.5)
        pixels = pixels * (1 + rng.uniform(0.1, 0.5) * light / light.std())[..., None].clip(0.1, 2)
    if rng.random() < 0.3:
        pixels = pixels + noise.normal(0, rng.uniform(2, 25), pixels.shape)
    image = _image(pixels)
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 4.0)))
    if rng.random() < 0.4:
        side = rng.randint(SIDE // 3, SIDE)
        left, top = rng.randint(0, SIDE - side), rng.randint(0, SIDE - side)
        image = image.crop((left, top, left + side, top + side))
    return image


# --- textures --------------------------------------------------------------------------------------------------


def _white_noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    channels = rng.choice((1, 3))
    grains = noise.normal(rng.uniform(80, 180), rng.uniform(15, 90), (SIDE, SIDE, channels))
    return _image(np.broadcast_to(grains, (SIDE, SIDE, 3)))


def _coarse_noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    cells = rng.choice((4, 8, 16, 24, 32, 48, 64, 128))
    how = rng.choice((Image.Resampling.BICUBIC, Image.Resampling.NEAREST))
    return _image(noise.uniform(0, 255, (cells, cells, 3))).resize((SIDE, SIDE), how)


def _clouds(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    return _coloured(_cloud(noise, rng.uniform(0.8, 2.2)), noise, colours=rng.choice((2, 3, 5)))


def _coloured_clouds(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    slope = rng.uniform(0.5, 2.0)
    layers = np.stack([_cloud(noise, slope) for _ in range(3)], axis=-1)
    mixed = (layers / layers.std((0, 1))) @ noise.normal(0, 1, (3, 3))
    return _image(noise.uniform(50, 200, 3) + mixed * rng.uniform(10, 50))


def _cells(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    distance = _distances(noise, rng.choice((6, 15, 30, 60)))
    value = distance[1] - distance[0] if rng.random() < 0.5 else distance[0]
    return _coloured(value, noise, colours=3)


def _marble(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    y, x = _axes()
    cloud = _cloud(noise, rng.uniform(1.3, 2.0))
    waves = np.sin(rng.uniform(2, 12) * (x + rng.random() * y) + rng.uniform(1, 6) * cloud / cloud.std())
    return _coloured(np.abs(waves), noise, colours=3)


def _gradient(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    y, x = _axes()
    angle = rng.uniform(0, 2 * np.pi)
    linear, radial = x * np.cos(angle) + y * np.sin(angle), np.hypot(x - rng.random(), y - rng.random())
    return _coloured(linear if rng.random() < 0.5 else radial, noise, colours=rng.choice((2, 3)))


def _dots(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), _colour(noise))
    pen, fill, pitch = ImageDraw.Draw(image), _colour(noise), SIDE / rng.choice((4, 6, 10, 16))
    radius = pitch * rng.uniform(0.15, 0.45)
    for x in np.arange(pitch / 2, SIDE, pitch):
        for y in np.arange(pitch / 2, SIDE, pitch):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    return image


def _dead_leaves(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """Overlapping shapes of every size, whose statistics are those of natural scenes (doi 10.1023/A:1016083017292)."""
    image = Image.new("RGB", (SIDE, SIDE))
    pen, base, spread = ImageDraw.Draw(image), noise.uniform(60, 190, 3), noise.normal(0, rng.uniform(20, 60), (3, 3))
    for _ in range(300):
        radius = SIDE * 0.5 / (1 + 8 * rng.expovariate(1))
        x, y = rng.uniform(0, SIDE), rng.uniform(0, SIDE)
        red, green, blue = (int(v) for v in np.clip(base + noise.normal(0, 1, 3) @ spread, 0, 255))
        shape = rng.choice((pen.ellipse, pen.ellipse, pen.rectangle))
        shape((x - radius, y - radius, x + radius, y + radius * rng.uniform(-0.4, 1)
               if shape != pen.ellipse else y + radius), fill=(red, green, blue))  # fmt: skip
    return image


def _confetti(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """A crowd of small bright things."""
    image = Image.new("RGB", (SIDE, SIDE), _colour(noise))
    pen, size = ImageDraw.Draw(image), rng.uniform(2, 9)
    for _ in range(int(SIDE**2 / size**2)):
        x, y = noise.uniform(0, SIDE, 2)
        width, height = noise.uniform(0.3, 1.5, 2) * size
        pen.rectangle((x, y, x + width, y + height), fill=_colour(noise))
    return image


def _crowd(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """Many small outlined things on a light ground, as an illustration has them."""
    red, green, blue = (int(value) for value in noise.uniform(180, 256, 3))
    image = Image.new("RGB", (SIDE, SIDE), (red, green, blue))
    pen, size = ImageDraw.Draw(image), rng.uniform(3, 14)
    for _ in range(int(rng.uniform(0.5, 2) * SIDE**2 / size**2)):
        x, y = noise.uniform(0, SIDE, 2)
        width, height = noise.uniform(0.4, 1.4, 2) * size
        shape = rng.choice((pen.ellipse, pen.rectangle))
        shape((x, y, x + width, y + height), fill=_colour(noise), outline=rng.choice(((30, 26, 30), None)))
    return image


def _bricks(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), _colour(noise))
    pen, colour, height = ImageDraw.Draw(image), noise.uniform(0, 255, 3), SIDE // rng.choice((5, 8, 12))
    for row in range(SIDE // height + 1):
        for column in range(-1, SIDE // (2 * height) + 1):
            x, y = column * 2 * height + (row % 2) * height, row * height
            red, green, blue = (int(v) for v in np.clip(colour + noise.normal(0, 14, 3), 0, 255))
            pen.rectangle((x + 1, y + 1, x + 2 * height - 1, y + height - 1), fill=(red, green, blue))
    return image


def _window(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    """A program's window: bars, boxes and text."""
    image = Image.new("RGB", (SIDE, SIDE), rng.choice(((250, 250, 250), (236, 240, 244), (28, 30, 36))))
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(size=rng.choice((7, 9, 12)))
    pen.rectangle((0, 0, SIDE, SIDE // 10), fill=_colour(noise))
    if rng.random() < 0.5:
        pen.rectangle((0, SIDE // 10, SIDE // 4, SIDE), fill=_colour(noise))
    for top in range(SIDE // 7, SIDE, rng.choice((14, 20, 30))):
        if rng.random() < 0.5:
            pen.rectangle((SIDE // 3, top, SIDE - 10, top + 12), outline=(140, 140, 150))
        pen.text((SIDE // 3 + 3, top + 2), " ".join(rng.choices(WORDS, k=4)), fill=(120, 120, 125), font=font)
    return image


def _lights(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    y, x = _axes()
    pixels = np.broadcast_to(noise.uniform(0, 70, 3), (SIDE, SIDE, 3)).copy()
    for _ in range(rng.randint(6, 40)):
        distance = np.hypot(x - rng.random(), y - rng.random())
        pixels += (distance < rng.uniform(0.01, 0.1))[..., None] * noise.uniform(10, 200, 3)
    return _image(pixels).filter(ImageFilter.GaussianBlur(1))


TEXTURES: tuple[Texture, ...] = (
    _white_noise, _coarse_noise, _clouds, _coloured_clouds, _coloured_clouds, _cells, _marble, _gradient, _dots,
    _dead_leaves, _dead_leaves, _dead_leaves, _confetti, _confetti, _crowd, _crowd, _bricks, _window, _lights,
)  # fmt: skip


# --- what they are made of -------------------------------------------------------------------------------------


def _cloud(noise: np.random.Generator, slope: float) -> Array:
    """Noise whose amplitude falls as frequency to the power of −`slope`; photographs have slopes near 1."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    frequency[0, 0] = 1 / SIDE
    return np.asarray(np.fft.ifft2(np.fft.fft2(noise.normal(size=(SIDE, SIDE))) / frequency**slope).real)


def _distances(noise: np.random.Generator, count: int) -> Array:
    """(count, SIDE, SIDE): the distance of every pixel to `count` points, nearest first."""
    y, x = _axes()
    points = noise.uniform(0, 1, (count, 2))
    return np.sort(np.stack([np.hypot(x - across, y - down) for across, down in points]), axis=0)


def _axes() -> tuple[Array, Array]:
    y, x = np.mgrid[:SIDE, :SIDE] / SIDE
    return y, x


def _coloured(values: Array, noise: np.random.Generator, *, colours: int) -> Image.Image:
    """Values → colours of a random scale."""
    scaled = (values - values.min()) / (np.ptp(values) + 1e-9)
    scale = noise.uniform(0, 255, (colours, 3))
    stops = np.linspace(0, 1, colours)
    return _image(np.stack([np.interp(scaled, stops, scale[:, channel]) for channel in range(3)], axis=-1))


def _colour(noise: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(value) for value in noise.uniform(0, 255, 3))
    return red, green, blue


def _image(pixels: Array) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))
