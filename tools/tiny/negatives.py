"""Pictures that show nothing, for a judge that is to say No to them: drawn ones, and a policy's failures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from pacorl.core.grid import split
from pacorl.core.sampling import Sampler
from pacorl.core.schedule import seed_of
from pacorl.data import characters
from pacorl.data.characters import Oracle
from pacorl.engine.rollout import ConditioningCache, sample_images
from pacorl.policies.flux import FLUX
from pacorl.types import Size
from tools.tiny.pretrain import PANEL_SIZES, encode_panels

if TYPE_CHECKING:
    from diffusers import AutoencoderKL


def policy_failures(checkpoint: Path, *, count: int) -> list[Image.Image]:
    """Panels that a generator spoils when it is given one or two steps: those that the oracle finds invalid."""
    policy = FLUX.from_pretrained(checkpoint, max_sequence_length=48)
    cache, oracle = ConditioningCache(policy), Oracle()
    prompts = characters.character_prompts("train", count)
    failed = []
    for steps in (1, 2):
        sheets = sample_images(
            policy,
            prompts,
            sampler=Sampler(size=Size(64, 64), steps=steps),
            cache=cache,
            seeds=[seed_of("junk", steps, prompt.id) for prompt in prompts],
            batch=24,
        )
        panels = [panel for prompt, sheet in zip(prompts, sheets, strict=True) for panel in split(sheet, prompt.grid)]
        failed += [panel for panel, seen in zip(panels, oracle.read(panels), strict=True) if seen is None]
    return failed


def draw_negatives(count: int, *, seed: int, vae: AutoencoderKL) -> list[Image.Image]:
    """Pictures that show nothing: noise, flat and dark fields, blurs, shuffles, half-denoised latents."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    makers = [_noise, _flat, _dark, _soft_noise, _blurred, _shuffled, _blended]
    negatives = [rng.choice(makers)(rng, noise) for _ in range(count * 2 // 3)]
    panels = [
        characters.draw(rng.choice(characters.all_panels()), rng.choice(PANEL_SIZES))
        for _ in range(count - len(negatives))
    ]
    return negatives + [_half_denoised(panel, vae, rng) for panel in panels]


def _size(rng: random.Random) -> int:
    return rng.choice(PANEL_SIZES)


def _noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    size = _size(rng)
    mean, std = noise.uniform(0, 255, 3), noise.uniform(5, 120)
    return _image(noise.normal(mean, std, (size, size, 3)))


def _flat(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    size = _size(rng)
    start, end = noise.uniform(0, 255, 3), noise.uniform(0, 255, 3)
    ramp = np.linspace(0, rng.choice([0, 0, 1]), size)[:, None, None]
    return _image(np.broadcast_to(start + (end - start) * ramp, (size, size, 3)))


def _dark(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    panel = np.asarray(characters.draw(rng.choice(characters.all_panels()), _size(rng)), dtype=float)
    return _image(panel * noise.uniform(0, 0.25) + noise.normal(0, noise.uniform(0, 12), panel.shape))


def _soft_noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    cells = rng.choice((2, 3, 4, 6, 8))
    return _image(noise.uniform(0, 255, (cells, cells, 3))).resize((_size(rng),) * 2, Image.Resampling.BICUBIC)


def _blurred(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    panel = characters.draw(rng.choice(characters.all_panels()), 64).filter(
        ImageFilter.GaussianBlur(rng.uniform(7, 16))
    )
    return panel.resize((_size(rng),) * 2)


def _shuffled(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    pixels = np.asarray(characters.draw(rng.choice(characters.all_panels()), _size(rng)))
    side = rng.choice((4, 8))
    blocks = [row for strip in np.split(pixels, side) for row in np.split(strip, side, axis=1)]
    rng.shuffle(blocks)
    return _image(np.concatenate([np.concatenate(blocks[i * side : (i + 1) * side], axis=1) for i in range(side)]))


def _blended(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    several = [np.asarray(characters.draw(panel, 64), dtype=float) for panel in rng.sample(characters.all_panels(), 5)]
    return _image(np.mean(several, axis=0)).resize((_size(rng),) * 2)


@torch.no_grad()
def _half_denoised(panel: Image.Image, vae: AutoencoderKL, rng: random.Random) -> Image.Image:
    """What a policy that lost its way paints: a latent that still holds much noise."""
    pixels = torch.from_numpy(np.asarray(panel).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    clean = encode_panels(vae, pixels)
    noise = (
        torch.randn(clean.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        / vae.config.scaling_factor
    )
    noisy = torch.lerp(clean, noise, rng.uniform(0.45, 1.0)) * rng.uniform(0.6, 1.6)
    return next(to_images(vae.decode(noisy).sample))


def to_images(pixels: Tensor) -> Iterator[Image.Image]:
    """(B, 3, height, width) in −1..1 → RGB images."""
    for picture in ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte():
        yield Image.fromarray(picture.permute(1, 2, 0).numpy())


def _image(pixels: Any) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))
