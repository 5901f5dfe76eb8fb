"""Training of the tiny autoencoder on grid images, half of them encoded panel by panel like the generator's data."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.twins import parts as twins
from torch.nn import functional as F

from pacorl.types import Grid
from research.tiny.pretrain import STATE, Stage, encode_panels
from research.world.panels import compose, random_panels, tile

GRID = Grid(2, 2)
STEPS = 2600
GRIDS = {16: 16, 32: 8, 64: 2, 96: 1}
"""Grids of a step by the panel's size."""
TURNS = (32, 64, 32, 96, 32, 16, 32, 64)


def pretrain_vae(out: Path, *, share: float = 1.0) -> None:
    """Train the autoencoder; `share` scales the steps."""
    steps = round(share * STEPS)
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    vae = twins.tiny_vae().to(memory_format=torch.channels_last)
    stage = Stage([vae], lr=2e-3, steps=steps, log=out / "log.jsonl", ema=0.995)
    stage.resume(out / STATE)
    while stage.step < steps:
        torch.manual_seed(stage.step)
        size = TURNS[stage.step % len(TURNS)]
        count = GRIDS[size]
        panels = compose(random_panels(4 * count), size)
        grids = tile(panels.unflatten(0, (count, 4)), GRID)

        # The generator learns from joined latents of panels, while policies decode whole grids.
        if (stage.step // len(TURNS) + stage.step) % 2:
            code = vae.encode(panels).latent_dist
            latents = tile(code.sample().unflatten(0, (count, 4)), GRID)
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
    codes = torch.cat([encode_panels(vae, compose(random_panels(512), size)).flatten() for size in (32, 64)])
    vae.register_to_config(shift_factor=codes.mean().item(), scaling_factor=1 / codes.std().item())
    vae.save_pretrained(out)


if __name__ == "__main__":
    import sys

    pretrain_vae(Path(sys.argv[1]))
