"""Makes the tiny checkpoints: `python -m tools.tiny vae|generator|judge|all`.

Everything learns from images that `data.characters` draws, so nothing is downloaded. Every stage prints its loss and
writes it to `log.jsonl` beside the weights; `docs/tiny.md` tells how the committed ones were made.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl import twins as tiny
from pacorl.data import characters
from pacorl.data.characters import Panel
from pacorl.io.documents import append_jsonl, read_json, write_json
from pacorl.policies.flux import tiny_flux
from pacorl.policies.tokens import pack
from pacorl.types import Grid

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FluxPipeline

PANEL_SIZES = (32, 64)
"""Panels of 64 px and of 128 px grids."""
GRID = Grid(2, 2)


class Stage:
    """The bookkeeping of one training: schedule, optimizer step, EMA, log."""

    def __init__(self, modules: Sequence[nn.Module], *, lr: float, steps: int, log: Path, ema: float = 0.0) -> None:
        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: _warm_cosine(step, steps))
        self.average = [p.detach().clone() for p in self.parameters] if ema else []
        self.ema, self.step, self.steps, self.log, self.started = ema, 0, steps, log, time.time()
        self.recent: list[float] = []

    def update(self, loss: Tensor, **extra: float) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.recent.append(loss.item())
        if self.average:
            decay = min(self.ema, self.step / (self.step + 10))
            torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        if self.step % 100 == 0 or self.step == self.steps:
            line = {"step": self.step, "loss": sum(self.recent) / len(self.recent), **extra}
            line["seconds"] = round(time.time() - self.started, 1)
            self.recent.clear()
            append_jsonl(self.log, line)
            print(line, flush=True)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within the block the modules hold their averaged weights."""
        last = [p.detach().clone() for p in self.parameters]
        self.use_average()
        yield
        torch._foreach_copy_([p.detach() for p in self.parameters], last)

    def use_average(self) -> None:
        """Puts the averaged weights in place of the last ones."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.average)


def _warm_cosine(step: int, steps: int) -> float:
    warm = max(1, steps // 50)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps)) + 0.01)


def panel_pixels(size: int) -> Tensor:
    """Every panel of the world at one size: (5184, 3, size, size) in −1..1, fp32."""
    pixels = np.stack([np.asarray(characters.draw(panel, size)) for panel in characters.all_panels()])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


def tile(panels_BPCHW: Tensor) -> Tensor:
    """Four panels → one 2×2 sheet: (B, 4, C, H, W) → (B, C, 2H, 2W); pictures and latents alike."""
    top_left, top_right, bottom_left, bottom_right = panels_BPCHW.unbind(1)
    top, bottom = torch.cat([top_left, top_right], -1), torch.cat([bottom_left, bottom_right], -1)
    return torch.cat([top, bottom], -2)


# --- the autoencoder -------------------------------------------------------------------------------------------


def pretrain_vae(
    out: Path, *, share: float = 1.0, steps: int = 1800, batch: int = 8, lr: float = 2e-3, seed: int = 0
) -> AutoencoderKL:
    """Trains the tiny VAE on sheets, half of them encoded panel by panel (as the generator's data is).

    `share` scales the number of steps, for a quick try.
    """
    steps = round(share * steps)
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    vae = tiny.tiny_vae().to(memory_format=torch.channels_last)
    pixels = {size: panel_pixels(size) for size in PANEL_SIZES}
    stage = Stage([vae], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.995)
    for step in range(steps):
        size, count = (PANEL_SIZES[0], batch) if step % 4 else (PANEL_SIZES[1], batch // 4)
        panels = pixels[size][torch.randint(len(pixels[size]), (count, 4))]
        sheet = tile(panels)
        if step % 2:
            code = vae.encode(panels.flatten(0, 1)).latent_dist
            latents = tile(code.sample().unflatten(0, (count, 4)))
        else:
            code = vae.encode(sheet).latent_dist
            latents = code.sample()
        painted = vae.decode(latents).sample
        distance = F.l1_loss(painted, sheet) + F.mse_loss(painted, sheet)
        stage.update(distance + 1e-4 * code.kl().mean() / latents[0].numel(), distance=distance.item())
    stage.use_average()
    with torch.no_grad():
        codes = torch.cat([encode_panels(vae, pixels[size][::8]).flatten() for size in PANEL_SIZES])
    vae.register_to_config(shift_factor=codes.mean().item(), scaling_factor=1 / codes.std().item())
    vae.save_pretrained(out)
    return vae


@torch.no_grad()
def encode_panels(vae: AutoencoderKL, pixels: Tensor, *, batch: int = 64) -> Tensor:
    """Latent modes of many pictures, unscaled."""
    return torch.cat([vae.encode(part).latent_dist.mode() for part in pixels.split(batch)])


# --- the generator ---------------------------------------------------------------------------------------------


def imperfect_sets(rng: random.Random, *, redraw: float) -> Iterator[tuple[str, list[Panel]]]:
    """Endless (prompt text, panels) of training characters, painted by an unreliable painter."""
    subjects = sorted({panel.kept for panel in characters.all_panels() if characters.split_of(panel) == "train"})
    while True:
        wanted = characters.set_of(rng.choice(subjects), GRID.count, rng)
        prompt = characters.write_prompt(0, wanted, GRID)
        yield prompt.text, characters.redrawn(wanted, chance=redraw, rng=rng)


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """One part of the generator's training."""

    steps: int
    large_share: float
    """Share of steps at 128 px."""
    redraw: float
    """Chance with which the painter redraws each kept attribute of each panel."""


WORDS = TrainingPhase(steps=1500, large_share=0.15, redraw=0.0)
"""First a faultless teacher, mostly at 64 px: words and images are matched early."""
SETS = TrainingPhase(steps=2200, large_share=0.55, redraw=0.27)
"""Then an unreliable one, at both sizes: the generator is to be able, but inconsistent."""
BATCH = {32: 32, 64: 12}
"""Grid images per step by panel size; one of 128 px has four times the tokens."""


def pretrain_generator(
    out: Path,
    *,
    vae: AutoencoderKL,
    phases: Sequence[TrainingPhase] = (WORDS, SETS),
    start: Path | None = None,
    share: float = 1.0,
    lr: float = 2e-3,
    max_sequence_length: int = 48,
    save_every: int = 300,
    seed: int = 0,
) -> FluxPipeline:
    """Trains transformer and text encoders together by flow matching, on grid images of 64 px and of 128 px.

    `start` is a checkpoint to go on from, with the phases that are left; `share` scales their steps, for a quick try.
    """
    from diffusers import FluxPipeline

    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    pipeline = FluxPipeline.from_pretrained(start) if start else tiny_flux(characters.vocabulary(), vae=vae)
    scale, shift = vae.config.scaling_factor, vae.config.shift_factor
    latents = {size: (encode_panels(vae, panel_pixels(size)) - shift) * scale for size in PANEL_SIZES}
    index = {panel: number for number, panel in enumerate(characters.all_panels())}
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    for phase in phases:
        steps = round(share * phase.steps)
        teacher = imperfect_sets(rng, redraw=phase.redraw)
        stage = Stage(modules, lr=lr, steps=steps, log=out / "log.jsonl", ema=0.998)
        while stage.step < steps:
            size = PANEL_SIZES[rng.random() < phase.large_share]
            texts, sets = zip(*(next(teacher) for _ in range(BATCH[size])), strict=True)
            rows = torch.tensor([[index[panel] for panel in panels] for panels in sets])
            clean = pack(tile(latents[size][rows]))
            loss = flow_matching_loss(pipeline, texts, clean, max_sequence_length=max_sequence_length)
            stage.update(loss, **{f"loss_{2 * size}px": loss.item()})
            if stage.step % save_every == 0:
                with stage.averaged():
                    pipeline.save_pretrained(out)
        stage.use_average()
    publish(pipeline.to(torch.float16), out)
    return pipeline


def publish(model: Any, out: Path) -> None:
    """Saves a model or pipeline without the path that it came from."""
    model.save_pretrained(out)
    for file in out.rglob("*.json"):
        config = read_json(file)
        if isinstance(config, dict) and config.pop("_name_or_path", None):
            write_json(file, config)


def flow_matching_loss(
    pipeline: FluxPipeline, texts: Sequence[str], clean_BNC: Tensor, *, max_sequence_length: int
) -> Tensor:
    """Mean squared error of the velocity at times that favour noise, where a set's content is decided."""
    batch, tokens, _ = clean_BNC.shape
    side = math.isqrt(tokens)
    words = pipeline.tokenizer_2(
        list(texts), padding="max_length", max_length=max_sequence_length, truncation=True, return_tensors="pt"
    )
    pooled_words = pipeline.tokenizer(
        list(texts), padding="max_length", max_length=77, truncation=True, return_tensors="pt"
    )
    # Half logit-normal, half uniform, then shifted towards noise.
    t = torch.where(torch.rand(batch) < 0.5, torch.rand(batch), torch.sigmoid(torch.randn(batch)))
    shift = 1.5 if side <= 8 else 3.0
    t = shift * t / (1 + (shift - 1) * t)
    noise = torch.randn_like(clean_BNC)
    noisy = torch.lerp(clean_BNC, noise, t[:, None, None])
    predicted = pipeline.transformer(
        hidden_states=noisy,
        timestep=t,
        guidance=torch.full((batch,), 3.5),
        pooled_projections=pipeline.text_encoder(pooled_words.input_ids).pooler_output,
        encoder_hidden_states=pipeline.text_encoder_2(words.input_ids)[0],
        txt_ids=torch.zeros(max_sequence_length, 3),
        img_ids=pipeline._prepare_latent_image_ids(batch, side, side, "cpu", torch.float32),
        return_dict=False,
    )[0]
    return F.mse_loss(predicted, noise - clean_BNC)
