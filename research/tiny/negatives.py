"""Negatives of the tiny world: images without a hero, for training its judge.

They are drawn noise, flat and dark fields, blurs and shuffles, and a policy's failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageFilter
from torch import Tensor

from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.core.schedule import seed_of
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.models.policies.flux import FLUX
from pacorl.tiny import characters
from pacorl.tiny.characters import Oracle
from pacorl.tiny.generators import TRAINED_WITH
from pacorl.types import Size
from research.tiny.pretrain import PANEL_SIZES, encode_panels

Array = NDArray[np.float64]


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


def _colour(noise: Generator) -> Array:
    return noise.uniform(0, 255, 3)


def _image(pixels: Array) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))
