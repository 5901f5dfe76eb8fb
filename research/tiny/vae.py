"""Training of the tiny autoencoder on grid images, half of them encoded panel by panel like the generator's data.

It makes a side eight times smaller, as FLUX's own does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from tests.twins.parts import TINY
from torch import Tensor
from torch.nn import functional as F

from pacorl.io.pretrained import model_of
from pacorl.types import Grid
from research.tiny.panels import compose, random_panels, tile
from research.tiny.stage import STATE, Stage

CHANNELS = (8, 16, 32, 48)
"""At each resolution; the last is an eighth of the image's."""
STEPS = 3000
GRIDS = {32: (16, Grid(2, 2)), 64: (4, Grid(2, 2)), 96: (2, Grid(2, 2)), 192: (1, Grid(1, 1))}
"""Size of the panels → grids of a step and their form."""
TURNS = (64, 96, 64, 32, 64, 96, 64, 192)


def tiny_autoencoder() -> AutoencoderKL:
    """Build the twins' autoencoder with one more resolution, so that it is ×8."""
    vae: AutoencoderKL = model_of(
        TINY["vae"],
        block_out_channels=CHANNELS,
        down_block_types=["DownEncoderBlock2D"] * len(CHANNELS),
        up_block_types=["UpDecoderBlock2D"] * len(CHANNELS),
    )
    return vae


def pretrain_vae(out: Path) -> None:
    """Train the autoencoder; a stopped training goes on from `out`/state.pt."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    vae = tiny_autoencoder().to(memory_format=torch.channels_last)
    stage = Stage([vae], lr=2e-3, steps=STEPS, log=out / "log.jsonl", ema=0.995)
    stage.resume(out / STATE)
    while stage.step < STEPS:
        torch.manual_seed(stage.step)
        size = TURNS[stage.step % len(TURNS)]
        count, grid = GRIDS[size]
        panels = compose(random_panels(count * grid.count), size)
        grids = tile(panels.unflatten(0, (count, grid.count)), grid)

        # The generator learns from joined latents of panels, while policies decode whole grids.
        if (stage.step // len(TURNS)) % 2:
            code = vae.encode(panels).latent_dist
            latents = tile(code.sample().unflatten(0, (count, grid.count)), grid)
        else:
            code = vae.encode(grids).latent_dist
            latents = code.sample()
        decoded = vae.decode(latents).sample
        distance = F.l1_loss(decoded, grids) + F.mse_loss(decoded, grids)
        stage.update(distance + 1e-4 * code.kl().mean() / latents[0].numel(), **{f"distance_{size}": distance.item()})
        if stage.step % 200 == 0:
            stage.save(out / STATE)

    # The generator is trained on standardized latents, and policies invert that by these two numbers.
    stage.use_average()
    torch.manual_seed(1)
    codes = torch.cat([encoded(vae, compose(random_panels(256), size)).flatten() for size in (64, 96)])
    vae.register_to_config(shift_factor=codes.mean().item(), scaling_factor=1 / codes.std().item())
    vae.save_pretrained(out)


@torch.no_grad()
def encoded(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Encode panels, without the standardization."""
    return torch.cat([vae.encode(batch).latent_dist.mode() for batch in pixels.split(64)])


@torch.no_grad()
def reconstructed(
    images: Sequence[Image.Image], vae: AutoencoderKL, rng: Random, *, noise: float = 0.0
) -> list[Image.Image]:
    """Pass half of the images of 32, 64 and 96 px through the autoencoder, as a generator's are.

    Args:
        noise: Most noise in the latents of half of them, in their standard deviations. It looks like the texture of an
            imperfect generator.
    """
    result = list(images)
    for size in (32, 64, 96):
        chosen = [n for n, image in enumerate(images) if image.width == size and rng.random() < 0.5]
        if not chosen:
            continue
        pixels = np.stack([np.asarray(images[n]) for n in chosen])
        codes = vae.encode(torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1).latent_dist
        latents = codes.mode()
        if noise:
            noisy_B = torch.rand(len(chosen)) < 0.5
            scale_B = noisy_B * torch.rand(len(chosen)) * noise * latents.std()
            latents = latents + scale_B[:, None, None, None] * torch.randn_like(latents)
        decoded = vae.decode(latents).sample
        for n, values in zip(chosen, ((decoded.clamp(-1, 1) + 1) * 127.5).round().byte(), strict=True):
            result[n] = Image.fromarray(values.permute(1, 2, 0).numpy())
    return result
