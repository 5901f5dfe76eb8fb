"""The tiny judge's domain: `python -m research.tiny domain`.

Positive images are drawings of the tiny world, their reconstructions, and images of generators, from an untrained one
over damaged ones to the committed one. `research.tiny.negatives` draws the negative images. The threshold is set on
held-out images of the world.

Legend: B images, C latent channels, H and W sides of latents.
"""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from pacorl.core.grid import split
from pacorl.core.sampler import Sampler
from pacorl.grpo.conditioning import ConditioningCache
from pacorl.grpo.rollout import sample_images
from pacorl.io.images import open_image
from pacorl.judge.domain import Domain, DomainNet, thumbnail, to_pixels
from pacorl.models.lora.adapters import add_lora
from pacorl.models.policies.flux import FLUX, TRAINED_WITH, tiny_flux, tiny_flux_transformer
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import pack
from pacorl.models.policies.policy import Policy
from pacorl.records.prompts import prompts_from
from pacorl.tiny import characters
from pacorl.tiny.character_edits import character_edits, write_edits
from pacorl.types import Grid, Prompt, Size
from research.tiny.negatives import draw_textures, to_images
from research.tiny.pretrain import (
    GRID,
    PANEL_SIZES,
    WORDS,
    Stage,
    generator_loss,
    imperfect_sets,
    panel_latents,
    tile,
)

NAME = "the tiny world of drawn characters"
WIDTH = 24
SIDE = 32
"""Channels of the first convolution; pixels of its input, the size of the judge's own."""
DECLINED_SHARE = 0.001
"""Share of the held-out generated images beyond the threshold."""
LAYOUTS = (Grid(2, 2), Grid(2, 2), Grid(1, 2), Grid(2, 1), Grid(1, 3), Grid(2, 3), Grid(3, 3), Grid(1, 4))
EARLY_STEPS = (0, 15, 50, 100, 200)
ADAPTER_SPREADS = (0.05, 0.15, 0.3, 0.4)
"""Standard deviations of an adapter's second matrix: from a hardly visible change to pure noise."""
MIXES = (0.3, 0.5, 0.7, 0.85)
"""Shares of the trained weights in a mix with random weights."""


def pretrain_domain(out: Path, *, generator: Path, editor: Path, share: float, seed: int) -> None:
    """Write `domain.json` and `domain.safetensors` to `out`; `share` scales images and steps, for a quick try."""
    out.mkdir(parents=True, exist_ok=True)
    generated, spoiled = world_images(generator, editor, seed=seed, share=share)
    Random(seed).shuffle(generated)
    # The threshold is set on images of generators: latents that are spoiled by hand are farther from the world.
    held_out = generated[: len(generated) // 5]
    learned = [*generated[len(generated) // 5 :], *spoiled]
    Random(seed).shuffle(learned)
    textures = draw_textures(round(18000 * share), seed=seed)

    # Outside: drawn textures, and the world in other colours.
    outside = []
    for image in (*textures, *recoloured(learned[: round(800 * share)])):
        outside.append(thumbnail(image, size=SIDE))

    # The threshold, on logits of held-out images.
    net = fit(learned, outside, steps=round(12000 * share), log=out / "domain_log.jsonl", seed=seed)
    logits = Domain(net, NAME, SIDE, threshold=0.0).logits(held_out)
    Domain(net, NAME, SIDE, threshold=round(float(logits.quantile(1 - DECLINED_SHARE)), 3)).save(out)


def fit(
    inside: Sequence[Image.Image], outside: Sequence[Image.Image], *, steps: int, log: Path, seed: int, batch: int = 64
) -> DomainNet:
    """Train the classifier; half of each batch is inside, and half of it is mirrored."""
    torch.manual_seed(seed)

    groups = []
    for group in (inside, outside):
        groups.append(torch.from_numpy(np.stack([np.asarray(image) for image in group])))

    net = DomainNet(WIDTH)
    stage = Stage([net], lr=3e-3, steps=steps, log=log, ema=0.99)
    is_outside = torch.arange(2).repeat_interleave(batch // 2).float()
    for _ in range(steps):
        rows = [group[torch.randint(len(group), (batch // 2,))] for group in groups]
        batch_B3HW = to_pixels(torch.cat(rows))
        mirrored = torch.where(torch.rand(batch, 1, 1, 1) < 0.5, batch_B3HW.flip(-1), batch_B3HW)
        stage.update(F.binary_cross_entropy_with_logits(net(mirrored), is_outside))
    stage.use_average()
    # Through fp16, in which the weights are stored: the threshold must fit the loaded weights.
    return net.half().float().eval().requires_grad_(False)


# --- the world -------------------------------------------------------------------------------------------------


def world_images(
    generator: Path, editor: Path, *, seed: int, share: float
) -> tuple[list[Image.Image], list[Image.Image]]:
    """Make images of the world at the classifier's size, whole grids and single panels.

    Returns:
        Drawn or generated images, about 5,900 times `share`, and twice as many of artificially spoiled latents,
        farther from the world than any generator's.
    """
    rng = Random(seed)
    torch.manual_seed(seed)
    vae = FLUX.from_pretrained(generator, **TRAINED_WITH).pipeline.vae
    # Lazy: `drawn` and `handled` take turns with `rng`, and each kind is used up before the next draws.
    kinds = [
        drawn(rng, count=round(3000 * share)),
        sampled(generator, seed=seed, count=max(2, round(10 * share))),
        early(vae, seed=seed, share=share),
        edited(editor, seed=seed, count=max(2, round(60 * share))),
    ]

    generated = []
    for images in kinds:
        for image in images:
            generated.append(thumbnail(handled(image, rng), size=SIDE))

    spoiled = decoded(vae, rng, count=round(14000 * share))
    return generated, [thumbnail(handled(image, rng), size=SIDE) for image in spoiled]


def handled(image: Image.Image, rng: Random) -> Image.Image:
    """Imitate a web page or a chat: sometimes compress the image as JPEG, sometimes resize it."""
    draw = rng.random()
    if draw < 0.1:
        buffer = io.BytesIO()
        image.save(buffer, "jpeg", quality=rng.randint(70, 95))
        return open_image(buffer.getvalue())
    if draw < 0.25:
        factor = rng.uniform(0.8, 4.0)
        size = (max(16, round(image.width * factor)), max(16, round(image.height * factor)))
        return image.resize(size, rng.choice((Image.Resampling.BILINEAR, Image.Resampling.NEAREST)))
    return image


def drawn(rng: Random, *, count: int) -> Iterator[Image.Image]:
    """Yield panels and grids of `tiny.characters`."""
    panels = characters.panels_of("train")
    for _ in range(count):
        if rng.random() < 0.6:
            yield characters.draw(rng.choice(panels), rng.choice((32, 48, 64, 128, 256)))
        else:
            layout = rng.choice(LAYOUTS)
            shown = [rng.choice(panels) for _ in range(layout.count)]
            yield characters.draw_grid(shown, layout, rng.choice((32, 64, 128)))


@torch.no_grad()
def decoded(vae: AutoencoderKL, rng: Random, *, count: int, batch: int = 16) -> Iterator[Image.Image]:
    """Decode latents between a drawn grid and noise, and yield the grid or one of its panels."""
    # Latents of some panels at both sizes, encoded once.
    shown = rng.sample(characters.panels_of("train"), 400)
    scale = vae.config.scaling_factor
    shift = vae.config.shift_factor
    clean = {}
    for size in PANEL_SIZES:
        clean[size] = panel_latents(vae, size, shown)
    for _ in range(count // batch):
        latents = clean[rng.choice(PANEL_SIZES)]
        grids_BCHW = tile(latents[torch.randint(len(latents), (batch, GRID.count))])
        spoiled = rng.choice(SPOILERS)(grids_BCHW, rng)
        for grid in to_images(vae.decode(spoiled / scale + shift).sample):
            yield grid if rng.random() < 0.3 else rng.choice(split(grid, GRID))


def sampled(generator: Path, *, seed: int, count: int) -> Iterator[Image.Image]:
    """Yield images of the generator in few and in many steps, under random adapters, and with partly random weights.

    Args:
        count: grids of each kind at both sizes.
    """
    for steps in (10, 3, 2, 1):
        policy = FLUX.from_pretrained(generator, **TRAINED_WITH)
        yield from _grids(policy, seed=seed + steps, count=2 * count, steps=steps)
    # Adapters as RL makes them, from hardly visible to destructive.
    for number in range(8):
        for spread in ADAPTER_SPREADS:
            policy = FLUX.from_pretrained(generator, **TRAINED_WITH)
            random_adapter(policy.transformer, policy.lora_targets, spread=spread, seed=seed + number)
            yield from _grids(policy, seed=seed + number, count=max(2, count // 2))
    for mix in MIXES:
        policy = FLUX.from_pretrained(generator, **TRAINED_WITH)
        untrained = tiny_flux_transformer().state_dict()

        mixed = {}
        for name, w in policy.transformer.state_dict().items():
            mixed[name] = torch.lerp(untrained[name], w, mix)

        policy.transformer.load_state_dict(mixed)
        yield from _grids(policy, seed=seed, count=2 * count)


def early(vae: AutoencoderKL, *, seed: int, share: float) -> Iterator[Image.Image]:
    """Yield images of a generator at EARLY_STEPS of its training."""
    for pipeline in early_generators(vae, [round(step * share) for step in EARLY_STEPS], seed=seed):
        yield from _grids(FLUX.over(pipeline, **TRAINED_WITH), seed=seed, count=max(2, round(24 * share)))


def early_generators(vae: AutoencoderKL, steps: Sequence[int], *, seed: int) -> Iterator[FluxPipeline]:
    """Train a generator from scratch like the first steps of `pretrain.WORDS`, and yield it after each of `steps`."""
    torch.manual_seed(seed)
    pipeline = tiny_flux(characters.vocabulary(), vae=vae)
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=2e-3, betas=(0.9, 0.99))
    teacher = imperfect_sets(Random(seed), redraw=WORDS.redraw)
    # Without schedule or average: only the images of the first steps matter.
    for step in range(max(steps) + 1):
        if step in steps:
            yield copy.deepcopy(pipeline)  # a policy freezes its pipeline
        texts, sets = zip(*(next(teacher) for _ in range(16)), strict=True)
        latents = panel_latents(vae, PANEL_SIZES[0], [panel for panels in sets for panel in panels])
        grids = tile(latents.unflatten(0, (len(sets), GRID.count)))
        optimizer.zero_grad()
        generator_loss(pipeline, texts, pack(grids)).backward()
        optimizer.step()


def edited(editor: Path, *, seed: int, count: int) -> Iterator[Image.Image]:
    """Yield images of the editor, in few and in many steps, and under a random adapter."""
    with tempfile.TemporaryDirectory() as folder:
        edits = character_edits("train", count, seed=seed)
        prompts = prompts_from(str(write_edits(Path(folder), edits, name="edits")), limit=None)
        policy = KONTEXT.from_pretrained(editor, **TRAINED_WITH)
        # Good edits, and rough ones of too few steps.
        for steps in (10, 2, 1):
            yield from _samples(policy, prompts, seed=seed, size=PANEL_SIZES[0], steps=steps)
        random_adapter(policy.transformer, policy.lora_targets, spread=0.15, seed=seed)
        yield from _samples(policy, prompts, seed=seed, size=PANEL_SIZES[0], steps=10)


def random_adapter(transformer: torch.nn.Module, targets: Sequence[str], *, spread: float, seed: int) -> None:
    """Add a random adapter; `spread` is the standard deviation of its second matrices."""
    torch.manual_seed(seed)
    add_lora(transformer, rank=16, alpha=32, targets=targets)
    for name, parameter in transformer.named_parameters():
        if "lora_B" in name:  # it starts at zero, and the adapter changes nothing
            torch.nn.init.normal_(parameter.data, std=spread)


def _grids(policy: Policy, *, seed: int, count: int, steps: int = 10) -> Iterator[Image.Image]:
    """Yield `count` grids at each size, each with two of its panels."""
    prompts = characters.character_prompts("train", count, seed=seed)
    for size in PANEL_SIZES:
        for grid in _samples(policy, prompts, seed=seed, size=2 * size, steps=steps):
            yield from [grid, *split(grid, GRID)[:2]]


def _samples(policy: Policy, prompts: Sequence[Prompt], *, seed: int, size: int, steps: int) -> Sequence[Image.Image]:
    seeds = range(1000 * seed, 1000 * seed + len(prompts))
    sampler = Sampler(size=Size(size, size), steps=steps)
    cache = ConditioningCache(policy)
    return sample_images(policy, prompts, sampler=sampler, cache=cache, seeds=seeds, batch=12)


# --- latents of imperfect generators ---------------------------------------------------------------------------


def _clean(grids_BCHW: Tensor, rng: Random) -> Tensor:
    return grids_BCHW


def _half_denoised(grids_BCHW: Tensor, rng: Random) -> Tensor:
    return torch.lerp(grids_BCHW, torch.randn_like(grids_BCHW), _each(grids_BCHW)) * (0.6 + _each(grids_BCHW))


def _noise(grids_BCHW: Tensor, rng: Random) -> Tensor:
    return torch.randn_like(grids_BCHW) * (0.25 + 1.5 * _each(grids_BCHW))


def _soft_noise(grids_BCHW: Tensor, rng: Random) -> Tensor:
    batch, channels, side, _ = grids_BCHW.shape
    coarse = torch.randn(batch, channels, *(2 * [rng.choice((2, 4, 8))]))
    soft = F.interpolate(coarse, size=side, mode=rng.choice(("bilinear", "nearest")))
    return soft * (0.4 + _each(grids_BCHW)) + 0.6 * _each(grids_BCHW) * torch.randn_like(grids_BCHW)


def _mixed(grids_BCHW: Tensor, rng: Random) -> Tensor:
    """Blocks of two grids."""
    batch, _, side, _ = grids_BCHW.shape
    cells = side // rng.choice((1, 2, 4, 8))
    is_other = F.interpolate((torch.rand(batch, 1, cells, cells) < _each(grids_BCHW)).float(), size=side)
    mixed = torch.lerp(grids_BCHW, grids_BCHW[torch.randperm(batch)], is_other)
    return mixed + 0.5 * _each(grids_BCHW) * torch.randn_like(grids_BCHW)


def _shuffled(grids_BCHW: Tensor, rng: Random) -> Tensor:
    """Shuffle blocks, like a generator that learned details before the whole."""
    shuffled = shuffled_blocks(grids_BCHW, rng)
    return torch.lerp(shuffled, torch.randn_like(shuffled), 0.6 * _each(shuffled))


def shuffled_blocks(grids_BCHW: Tensor, rng: Random) -> Tensor:
    """Replace some or all blocks of each grid by others of it, in all grids alike."""
    side = grids_BCHW.shape[-1]
    block = rng.choice((1, 2, 2, 4))
    blocks = F.unfold(grids_BCHW, block, stride=block)  # (B, C · block², positions)
    positions = torch.arange(blocks.shape[2])
    moves = torch.rand(len(positions)) < rng.uniform(0.3, 1.0)
    blocks = blocks[:, :, torch.where(moves, torch.randint(len(positions), positions.shape), positions)]
    return F.fold(blocks, (side, side), block, stride=block)


def _periodic(grids_BCHW: Tensor, rng: Random) -> Tensor:
    """Add a small periodic pattern, like random adapters."""
    batch, channels, side, _ = grids_BCHW.shape
    period = rng.choice((2, 4))
    pattern = torch.randn(batch, channels, period, period).repeat(1, 1, side // period, side // period)
    noise = 0.6 * _each(grids_BCHW) * torch.randn_like(grids_BCHW)
    return _each(grids_BCHW) * grids_BCHW + 1.2 * _each(grids_BCHW) * pattern + noise


def _each(grids_BCHW: Tensor) -> Tensor:  # one number in 0..1 per image
    return torch.rand(len(grids_BCHW), 1, 1, 1)


Spoiler = Callable[[Tensor, Random], Tensor]
SPOILERS: tuple[Spoiler, ...] = (
    _clean, _half_denoised, _half_denoised, _noise, _noise, _soft_noise, _mixed, _shuffled, _shuffled, _periodic,
)  # fmt: skip


# --- near the world, and outside it ----------------------------------------------------------------------------


def recoloured(images: Sequence[Image.Image]) -> Iterator[Image.Image]:
    """Give images of the world colours that it does not have: swapped channels, or grey."""
    for number, image in enumerate(images):
        red, green, blue = image.split()
        orders = ((blue, green, red), (green, red, blue), (green, blue, red), 3 * (image.convert("L"),))
        yield Image.merge("RGB", orders[number % len(orders)])
