"""Negatives of the tiny world: images without a hero, for training its judge and the judge's domain.

The judge learns from drawn noise, flat and dark fields, blurs and shuffles, and a policy's failures. The domain learns
from textures, scenes and documents, drawn so that its training needs no photographs: noise of natural spectra, cells,
grain, gradients, overlapping shapes, bricks, documents and lights, then composed, coloured and blurred as photographs
are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.policies.flux import FLUX, TRAINED_WITH
from pacorl.tiny import characters
from pacorl.tiny.characters import Oracle
from pacorl.types import Size
from research.tiny.pretrain import PANEL_SIZES, encode_panels

SIDE = 128  # pixels of every drawn texture
Y, X = np.mgrid[:SIDE, :SIDE] / SIDE
WORDS = ("who", "paints", "light", "house", "sea", "must", "know", "how", "waves", "leave", "marks", "on", "stone")

Array = NDArray[np.float64]
Texture = Callable[[Random, Generator], Image.Image]


# --- for the judge ---------------------------------------------------------------------------------------------


def policy_failures(checkpoint: Path, *, count: int) -> list[Image.Image]:
    """Generate panels in one or two steps, and return the ones that the oracle finds invalid."""
    policy = FLUX.from_pretrained(checkpoint, max_sequence_length=TRAINED_WITH["max_sequence_length"])
    cache = ConditioningCache(policy)
    prompts = characters.character_prompts("train", count)
    panels = []
    for steps in (1, 2):
        sampler = Sampler(size=Size(64, 64), steps=steps)
        # The word is part of the seeds: with another one the committed judge could not be trained again.
        seeds = [seed_of("junk", steps, prompt.id) for prompt in prompts]
        grids = sample_images(policy, prompts, sampler=sampler, cache=cache, seeds=seeds, batch=24)
        for prompt, grid in zip(prompts, grids, strict=True):
            panels += split(grid, prompt.grid)

    # Whatever the oracle does not recognise.
    failures = []
    for panel, seen in zip(panels, Oracle().read(panels), strict=True):
        if seen is None:
            failures.append(panel)
    return failures


def draw_negatives(count: int, *, seed: int, vae: AutoencoderKL) -> list[Image.Image]:
    """Draw noise, flat and dark fields, blurs, shuffles and, for a third, half-denoised latents."""
    rng = Random(seed)
    noise = np.random.default_rng(seed)
    makers = [_noise, _flat, _dark, _soft_noise, _blurred, _shuffled, _blended]

    negatives = []
    for _ in range(count * 2 // 3):
        negatives.append(rng.choice(makers)(rng, noise))

    # All panels before the noise of any: a single loop would draw in another order, and change the images of a seed.
    panels = [_panel(rng) for _ in range(count - len(negatives))]
    return negatives + [_half_denoised(panel, vae, rng) for panel in panels]


def _panel(rng: Random, size: int | None = None) -> Image.Image:
    return characters.draw(rng.choice(characters.all_panels()), size or rng.choice(PANEL_SIZES))


def _noise(rng: Random, noise: Generator) -> Image.Image:
    size = rng.choice(PANEL_SIZES)
    mean = _colour(noise)
    std = noise.uniform(5, 120)
    return _image(noise.normal(mean, std, (size, size, 3)))


def _flat(rng: Random, noise: Generator) -> Image.Image:
    size = rng.choice(PANEL_SIZES)
    start = _colour(noise)
    end = _colour(noise)
    ramp = np.linspace(0, rng.choice([0, 0, 1]), size)[:, None, None]
    return _image(np.broadcast_to(start + (end - start) * ramp, (size, size, 3)))


def _dark(rng: Random, noise: Generator) -> Image.Image:
    pixels = np.asarray(_panel(rng), dtype=float)
    return _image(pixels * noise.uniform(0, 0.25) + noise.normal(0, noise.uniform(0, 12), pixels.shape))


def _soft_noise(rng: Random, noise: Generator) -> Image.Image:
    cells = rng.choice((2, 3, 4, 6, 8))
    pixels = noise.uniform(0, 255, (cells, cells, 3))
    return _image(pixels).resize((rng.choice(PANEL_SIZES),) * 2, Image.Resampling.BICUBIC)


def _blurred(rng: Random, noise: Generator) -> Image.Image:
    blurred = _panel(rng, 64).filter(ImageFilter.GaussianBlur(rng.uniform(7, 16)))
    return blurred.resize((rng.choice(PANEL_SIZES),) * 2)


def _shuffled(rng: Random, noise: Generator) -> Image.Image:
    pixels = np.asarray(_panel(rng))
    side = rng.choice((4, 8))

    blocks = []
    for strip in np.split(pixels, side):
        blocks += np.split(strip, side, axis=1)

    # Put the blocks together again, in rows.
    rng.shuffle(blocks)
    strips = []
    for start in range(0, len(blocks), side):
        strips.append(np.concatenate(blocks[start : start + side], axis=1))
    return _image(np.concatenate(strips))


def _blended(rng: Random, noise: Generator) -> Image.Image:
    panels = []
    for panel in rng.sample(characters.all_panels(), 5):
        panels.append(np.asarray(characters.draw(panel, 64), dtype=float))

    return _image(np.mean(panels, axis=0)).resize((rng.choice(PANEL_SIZES),) * 2)


@torch.no_grad()
def _half_denoised(panel: Image.Image, vae: AutoencoderKL, rng: Random) -> Image.Image:
    """Imitate a broken policy: decode a latent with much noise left."""
    pixels = torch.from_numpy(np.asarray(panel).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    # Noise of the scale of the latents, of which 45 % or more replace the panel.
    clean = encode_panels(vae, pixels)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    noise = torch.randn(clean.shape, generator=generator) / vae.config.scaling_factor
    noisy = torch.lerp(clean, noise, rng.uniform(0.45, 1.0)) * rng.uniform(0.6, 1.6)
    return next(to_images(vae.decode(noisy).sample))


def to_images(pixels_B3HW: Tensor) -> Iterator[Image.Image]:
    """Convert (B, 3, H, W) in −1..1 to RGB images."""
    for pixels in ((pixels_B3HW.clamp(-1, 1) + 1) * 127.5).round().byte():
        yield Image.fromarray(pixels.permute(1, 2, 0).numpy())


# --- for the domain --------------------------------------------------------------------------------------------


def draw_textures(count: int, *, seed: int) -> list[Image.Image]:
    """Draw `count` images: half of one texture, half of several overlapping ones; most of them graded and blurred."""
    rng = Random(seed)
    noise = np.random.default_rng(seed)
    return [_photographed(_scene(rng, noise), rng, noise) for _ in range(count)]


def _scene(rng: Random, noise: Generator) -> Image.Image:
    """Draw a texture, perhaps with objects of other textures in front of it."""
    scene = rng.choice(TEXTURES)(rng, noise)
    for _ in range(rng.choice((0, 0, 0, 1, 2, 4))):
        # Objects with the outlines of clouds, from compact to torn.
        outline = _cloud(noise, rng.uniform(1.5, 3.0))
        inside = outline > np.quantile(outline, rng.uniform(0.4, 0.9))
        mask = Image.fromarray((inside * 255).astype(np.uint8))
        scene = Image.composite(rng.choice(TEXTURES)(rng, noise), scene, mask)
    return scene


def _photographed(scene: Image.Image, rng: Random, noise: Generator) -> Image.Image:
    """Give a scene the colours, contrast, light, grain, focus and framing of a photograph."""
    pixels = np.asarray(scene, dtype=float)

    # Colours, contrast, light and grain.
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

    # Focus and framing.
    image = _image(pixels)
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 4.0)))
    if rng.random() < 0.4:
        side = rng.randint(SIDE // 3, SIDE)
        left = rng.randint(0, SIDE - side)
        top = rng.randint(0, SIDE - side)
        image = image.crop((left, top, left + side, top + side))
    return image


def _white_noise(rng: Random, noise: Generator) -> Image.Image:
    channels = rng.choice((1, 3))
    grains = noise.normal(rng.uniform(80, 180), rng.uniform(15, 90), (SIDE, SIDE, channels))
    return _image(np.broadcast_to(grains, (SIDE, SIDE, 3)))


def _coarse_noise(rng: Random, noise: Generator) -> Image.Image:
    cells = rng.choice((4, 8, 16, 24, 32, 48, 64, 128))
    resampling = rng.choice((Image.Resampling.BICUBIC, Image.Resampling.NEAREST))
    return _image(noise.uniform(0, 255, (cells, cells, 3))).resize((SIDE, SIDE), resampling)


def _clouds(rng: Random, noise: Generator) -> Image.Image:
    return _coloured(_cloud(noise, rng.uniform(0.8, 2.2)), noise, colours=rng.choice((2, 3, 5)))


def _coloured_clouds(rng: Random, noise: Generator) -> Image.Image:
    slope = rng.uniform(0.5, 2.0)
    layers = np.stack([_cloud(noise, slope) for _ in range(3)], axis=-1)
    mixed = (layers / layers.std((0, 1))) @ noise.normal(0, 1, (3, 3))
    return _image(noise.uniform(50, 200, 3) + mixed * rng.uniform(10, 50))


def _cells(rng: Random, noise: Generator) -> Image.Image:
    """Draw Worley noise: the distance of every pixel to the nearest of some points, or to the borders between them."""
    points = noise.uniform(0, 1, (rng.choice((6, 15, 30, 60)), 2))
    distances = np.sort(np.stack([np.hypot(X - across, Y - down) for across, down in points]), axis=0)
    values = distances[0]
    if rng.random() < 0.5:
        values = distances[1] - distances[0]
    return _coloured(values, noise, colours=3)


def _marble(rng: Random, noise: Generator) -> Image.Image:
    cloud = _cloud(noise, rng.uniform(1.3, 2.0))
    phase = rng.uniform(2, 12) * (X + rng.random() * Y)
    waves = np.sin(phase + rng.uniform(1, 6) * cloud / cloud.std())
    return _coloured(np.abs(waves), noise, colours=3)


def _gradient(rng: Random, noise: Generator) -> Image.Image:
    angle = rng.uniform(0, 2 * np.pi)
    linear = X * np.cos(angle) + Y * np.sin(angle)
    radial = np.hypot(X - rng.random(), Y - rng.random())
    return _coloured(linear if rng.random() < 0.5 else radial, noise, colours=rng.choice((2, 3)))


def _dots(rng: Random, noise: Generator) -> Image.Image:
    image, pen = _canvas(_colour(noise))
    fill = _rgb(_colour(noise))
    pitch = SIDE / rng.choice((4, 6, 10, 16))
    radius = pitch * rng.uniform(0.15, 0.45)
    for x in np.arange(pitch / 2, SIDE, pitch):
        for y in np.arange(pitch / 2, SIDE, pitch):
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
    return image


def _dead_leaves(rng: Random, noise: Generator) -> Image.Image:
    """Draw overlapping shapes of every size, with the statistics of natural scenes (doi 10.1023/A:1016083017292)."""
    image, pen = _canvas(np.zeros(3))
    base = noise.uniform(60, 190, 3)
    spread = noise.normal(0, rng.uniform(20, 60), (3, 3))
    for _ in range(300):
        radius = SIDE * 0.5 / (1 + 8 * rng.expovariate(1))
        x = rng.uniform(0, SIDE)
        y = rng.uniform(0, SIDE)
        fill = _rgb(base + noise.normal(0, 1, 3) @ spread)
        shape = rng.choice((pen.ellipse, pen.ellipse, pen.rectangle))
        below = radius if shape == pen.ellipse else radius * rng.uniform(-0.4, 1)
        shape((x - radius, y - radius, x + radius, y + below), fill=fill)
    return image


def _confetti(rng: Random, noise: Generator) -> Image.Image:
    """Draw many small bright rectangles."""
    image, pen = _canvas(_colour(noise))
    size = rng.uniform(2, 9)
    for _ in range(int(SIDE**2 / size**2)):
        x, y = noise.uniform(0, SIDE, 2)
        width, height = noise.uniform(0.3, 1.5, 2) * size
        pen.rectangle((x, y, x + width, y + height), fill=_rgb(_colour(noise)))
    return image


def _crowd(rng: Random, noise: Generator) -> Image.Image:
    """Draw many small outlined shapes on a light ground, like an illustration."""
    image, pen = _canvas(noise.uniform(180, 256, 3))
    size = rng.uniform(3, 14)
    for _ in range(int(rng.uniform(0.5, 2) * SIDE**2 / size**2)):
        x, y = noise.uniform(0, SIDE, 2)
        width, height = noise.uniform(0.4, 1.4, 2) * size
        shape = rng.choice((pen.ellipse, pen.rectangle))
        fill = _rgb(_colour(noise))
        outline = rng.choice(((30, 26, 30), None))
        shape((x, y, x + width, y + height), fill=fill, outline=outline)
    return image


def _bricks(rng: Random, noise: Generator) -> Image.Image:
    image, pen = _canvas(_colour(noise))
    colour = _colour(noise)
    height = SIDE // rng.choice((5, 8, 12))
    for row in range(SIDE // height + 1):
        for column in range(-1, SIDE // (2 * height) + 1):
            x = column * 2 * height + (row % 2) * height
            y = row * height
            box = (x + 1, y + 1, x + 2 * height - 1, y + height - 1)
            pen.rectangle(box, fill=_rgb(colour + noise.normal(0, 14, 3)))
    return image


def _window(rng: Random, noise: Generator) -> Image.Image:
    """Draw a program's window: bars, boxes and text."""
    image, pen = _canvas(np.array(rng.choice(((250, 250, 250), (236, 240, 244), (28, 30, 36)))))
    font = ImageFont.load_default(size=rng.choice((7, 9, 12)))
    pen.rectangle((0, 0, SIDE, SIDE // 10), fill=_rgb(_colour(noise)))
    if rng.random() < 0.5:
        pen.rectangle((0, SIDE // 10, SIDE // 4, SIDE), fill=_rgb(_colour(noise)))
    for top in range(SIDE // 7, SIDE, rng.choice((14, 20, 30))):
        if rng.random() < 0.5:
            pen.rectangle((SIDE // 3, top, SIDE - 10, top + 12), outline=(140, 140, 150))
        pen.text((SIDE // 3 + 3, top + 2), " ".join(rng.choices(WORDS, k=4)), fill=(120, 120, 125), font=font)
    return image


def _lights(rng: Random, noise: Generator) -> Image.Image:
    # Discs of light, which add up, on a dark ground.
    pixels = np.broadcast_to(noise.uniform(0, 70, 3), (SIDE, SIDE, 3)).copy()
    for _ in range(rng.randint(6, 40)):
        distance = np.hypot(X - rng.random(), Y - rng.random())
        lit = distance < rng.uniform(0.01, 0.1)
        pixels += lit[..., None] * noise.uniform(10, 200, 3)
    return _image(pixels).filter(ImageFilter.GaussianBlur(1))


# Repeated entries are drawn more often: dead leaves for natural scenes, crowds for illustrations.
TEXTURES: tuple[Texture, ...] = (
    _white_noise, _coarse_noise, _clouds, _coloured_clouds, _coloured_clouds, _cells, _marble, _gradient, _dots,
    _dead_leaves, _dead_leaves, _dead_leaves, _confetti, _confetti, _crowd, _crowd, _bricks, _window, _lights,
)  # fmt: skip


def _cloud(noise: Generator, slope: float) -> Array:
    """Draw noise with amplitude ∝ frequency^−`slope`; photographs have slopes near 1."""
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(SIDE), np.fft.fftfreq(SIDE)))
    # The mean has the frequency 0, by which the spectrum cannot be divided.
    frequency[0, 0] = 1 / SIDE
    spectrum = np.fft.fft2(noise.normal(size=(SIDE, SIDE)))
    return np.asarray(np.fft.ifft2(spectrum / frequency**slope).real)


def _coloured(values: Array, noise: Generator, *, colours: int) -> Image.Image:
    """Map values to colours of a random scale."""
    scaled = (values - values.min()) / (np.ptp(values) + 1e-9)
    scale = noise.uniform(0, 255, (colours, 3))
    stops = np.linspace(0, 1, colours)
    channels = [np.interp(scaled, stops, channel) for channel in scale.T]
    return _image(np.stack(channels, axis=-1))


def _canvas(colour: NDArray[Any]) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (SIDE, SIDE), _rgb(colour))
    return image, ImageDraw.Draw(image)


def _colour(noise: Generator) -> Array:
    return noise.uniform(0, 255, 3)


def _rgb(colour: NDArray[Any]) -> tuple[int, ...]:
    return tuple(int(channel) for channel in colour.clip(0, 255))


def _image(pixels: NDArray[Any]) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))
