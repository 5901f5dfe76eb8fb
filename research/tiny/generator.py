"""Training of the tiny generator: sheets of 4 and 9 panels by flow matching, text encoders included.

First faultless sheets, in much noise, until every unnamed look is shared; then a mild unreliable teacher, so that
reinforcement learning can raise the agreement. How often the panels of a sheet agree is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from random import Random
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from diffusers.models.transformers import transformer_flux
from tests.twins import tiny_flux
from tests.twins.parts import vocabulary
from torch import Tensor
from torch.nn import functional as F

from pacorl.models.policies.pipeline import pack
from pacorl.tiny.world import LOOKS, VALUES, draw_scenes, theme_text, write_prompt
from pacorl.types import Grid
from research.tiny.panels import COUNTS, NAMES, compose, tile
from research.tiny.stage import STATE, Stage, flow_matching_loss, publish, seeded

GUIDANCE = 3.5
LENGTH = 48
"""Tokens of a text: nine panels have 43 words at most."""
ONE, FOUR, NINE = Grid(1, 1), Grid(2, 2), Grid(3, 3)


class Sheets(NamedTuple):
    """Sheets of one form: panels, their size, and how many make a step."""

    grid: Grid
    size: int
    batch: int
    share: float


class Lesson(NamedTuple):
    """One phase of the training."""

    steps: int
    sheets: Sequence[Sheets]
    redraw: float  # probability that the teacher redraws a look of a panel
    lr: float
    ema: float
    shift: float  # towards noise, of sheets up to 128 px: sharing is decided in much noise


SMALL = (Sheets(ONE, 64, 96, 0.1), Sheets(FOUR, 32, 48, 0.05), Sheets(FOUR, 64, 32, 0.75), Sheets(NINE, 64, 12, 0.1))
ALL = (Sheets(FOUR, 32, 48, 0.08), Sheets(FOUR, 64, 32, 0.3), Sheets(FOUR, 96, 16, 0.42), Sheets(NINE, 64, 12, 0.2))
LESSONS = (
    Lesson(4000, SMALL, redraw=0.0, lr=2e-3, ema=0.998, shift=2.0),
    Lesson(2500, ALL, redraw=0.0, lr=2e-3, ema=0.998, shift=2.0),
)
UNRELIABLE = Lesson(1100, ALL, redraw=0.25, lr=1e-3, ema=0.99, shift=2.5)
"""After 240 steps one panel in five was a blend of two looks."""
LARGE = (
    Sheets(FOUR, 32, 48, 0.12), Sheets(FOUR, 64, 32, 0.25), Sheets(FOUR, 96, 16, 0.48), Sheets(NINE, 64, 12, 0.15)
)  # fmt: skip
LARGER = Lesson(1500, LARGE, redraw=0.22, lr=1e-3, ema=0.99, shift=2.5)
"""More of the large panels: their validity was 0.84."""
MIXED = (
    Sheets(FOUR, 32, 48, 0.06), Sheets(FOUR, 64, 32, 0.5), Sheets(FOUR, 96, 16, 0.34), Sheets(NINE, 64, 12, 0.1)
)  # fmt: skip
NAMED = Lesson(1200, MIXED, redraw=0.19, lr=1.8e-3, ema=0.993, shift=2.5)
"""At the rate of the first lessons, at which a named colour, shape and hat are learned."""
SUPERVISED_LAYERS = (1, 2, 3, 4)
SUPERVISED_HEADS = (0, 1)
"""Attention that is taught which pose and which prop are a panel's own, a head each."""
HEAD_OF_LOOKS = 2
"""Attention that is taught to read the looks that a theme names."""
LOOK_WORDS = frozenset(value for name in LOOKS for value in VALUES[name])


def draw_sheet(rng: Random, grid: Grid, *, redraw: float) -> tuple[str, list[list[int]]]:
    """Draw a training prompt and the attributes of its panels, some of the looks that it does not name redrawn."""
    place = rng.choice(VALUES["place"])
    # More looks than people name, since each must be learned; three themes of ten name none.
    names = rng.sample(LOOKS, rng.choice((0, 0, 0, 1, 1, 2, 3, 4, 4, 4)))
    named = {name: rng.choice(VALUES[name]) for name in LOOKS if name in names}
    looks = {name: named.get(name) or rng.choice(VALUES[name]) for name in LOOKS}
    scenes = draw_scenes("train", place, grid.count, rng)

    panels = []
    for pose, prop in scenes:
        drawn = {**looks, "place": place, "pose": pose, "prop": prop}
        for name in LOOKS:
            if name not in named and rng.random() < redraw:
                drawn[name] = rng.choice(VALUES[name])
        panels.append([VALUES[name].index(drawn[name]) for name in NAMES])

    if grid.count == 1:
        (scene,) = scenes
        return f"{theme_text(place, named)}, {', '.join(scene)}", panels
    return write_prompt(0, place, scenes, grid, looks=named).text, panels


class Latents:
    """Scaled latents of panels, encoded when they are first needed."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae = vae
        self.known: dict[int, Tensor] = {}
        self.have: dict[int, Tensor] = {}

    @torch.no_grad()
    def of(self, panels: Tensor, size: int) -> Tensor:
        """Return the latents of panels: (P, 7) → (P, C, size / 8, size / 8)."""
        number = torch.from_numpy(np.ravel_multi_index(tuple(panels.T.numpy()), COUNTS))
        if size not in self.known:
            total = prod(COUNTS)
            self.known[size] = torch.empty(total, 8, size // 8, size // 8)
            self.have[size] = torch.zeros(total, dtype=torch.bool)
        missing = ~self.have[size][number]
        if missing.any():
            self.known[size][number[missing]] = self._encode(panels[missing], size)
            self.have[size][number] = True
        return self.known[size][number]

    def _encode(self, panels: Tensor, size: int) -> Tensor:
        config = self.vae.config
        codes = [self.vae.encode(batch).latent_dist.mode() for batch in compose(panels, size).split(64)]
        latents: Tensor = (torch.cat(codes) - config.shift_factor) * config.scaling_factor
        return latents


@contextmanager
def attention_recorded() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the rotated queries and keys of every attention: (B, text and image tokens, heads, width) each."""
    recorded = []
    attend = transformer_flux.dispatch_attention_fn

    def record(query: Tensor, key: Tensor, *args: Tensor, **options: object) -> Tensor:
        recorded.append((query, key))
        attended: Tensor = attend(query, key, *args, **options)
        return attended

    with mock.patch.object(transformer_flux, "dispatch_attention_fn", record):
        yield recorded


def words_of_panels(ids_BT: Tensor, tokens: Sequence[str], grid: Grid) -> Tensor:
    """Tell which words are the pose of each panel, and which its prop: (B, pose and prop, T, panels) of bools."""
    is_tag = torch.tensor([token.startswith("▁[") for token in tokens])[ids_BT]
    is_end = torch.tensor([token in ("<pad>", "</s>") for token in tokens])[ids_BT]
    is_pose = is_tag.roll(1, 1)
    is_prop = ~(is_pose | is_tag | is_end)
    of_panel_BTP = is_tag.cumsum(1)[..., None] == torch.arange(1, grid.count + 1)
    return torch.stack([is_pose, is_prop], 1)[..., None] & of_panel_BTP[:, None]


def words_of_looks(ids_BT: Tensor, tokens: Sequence[str]) -> Tensor:
    """Tell which words name a look: (B, T) of bools. Texts of panels name none."""
    is_look = torch.tensor([token.strip("▁.") in LOOK_WORDS for token in tokens])
    return is_look[ids_BT]


def look_loss(recorded: Sequence[tuple[Tensor, Tensor]], looks_BT: Tensor) -> Tensor:
    """Compute how much of the attention to a text goes elsewhere than to the looks that it names, as −log of the rest.

    Without it a generator drew a named palette in 0.9 of the panels, and a named colour, shape or hat in 0.35 to 0.4.
    """
    names = looks_BT.any(1)
    if not names.any():
        return torch.zeros(())
    length = looks_BT.shape[1]
    losses = []
    for layer in SUPERVISED_LAYERS:
        query, key = (states[names, :, HEAD_OF_LOOKS] for states in recorded[layer])
        logits_BNT = query[:, length:] @ key[:, :length].mT / query.shape[-1] ** 0.5
        on_looks = logits_BNT.masked_fill(~looks_BT[names, None], -1e4).logsumexp(-1)
        losses.append((logits_BNT.logsumexp(-1) - on_looks).mean())
    return torch.stack(losses).mean()


def attention_loss(recorded: Sequence[tuple[Tensor, Tensor]], words_BHTP: Tensor, grid: Grid) -> Tensor:
    """Compute the cross-entropy of the panel whose text an image token attends to, among the texts of all panels.

    Flow matching alone does not teach it: after 7,000 steps a panel drew a prop of any of the four texts. One head of
    four layers for poses and one for props are enough, and are free to attend to anything else beside.
    """
    length = words_BHTP.shape[2]
    side = round(((recorded[0][0].shape[1] - length) / grid.count) ** 0.5)
    row = torch.arange(side * grid.rows) // side
    col = torch.arange(side * grid.cols) // side
    own_N = (row[:, None] * grid.cols + col).flatten()

    losses = []
    for layer in SUPERVISED_LAYERS:
        query, key = recorded[layer]
        query, key = query[:, length:, SUPERVISED_HEADS], key[:, :length, SUPERVISED_HEADS]
        logits_BHNT = torch.einsum("bnhc,bthc->bhnt", query, key) / query.shape[-1] ** 0.5
        logits_BHNTP = logits_BHNT[..., None].masked_fill(~words_BHTP[:, :, None], -1e4)
        logits = logits_BHNTP.logsumexp(3).flatten(0, 2)
        losses.append(F.cross_entropy(logits, own_N.repeat(len(logits) // len(own_N))))
    return torch.stack(losses).mean()


def prop_weight(grid: Grid, side: int) -> Tensor:
    """Weigh image tokens, mean 1: props are small, and right of the hero. A panel has `side` × `side` tokens."""
    place = torch.arange(side) / side
    weight = torch.where(place >= 0.7, 3.0, torch.where(place >= 0.45, 1.7, 1.0)).repeat(grid.cols)
    return (weight / weight.mean()).repeat(side * grid.rows)


def sheet_loss(
    pipeline: FluxPipeline, texts: Sequence[str], panels_BPCHW: Tensor, grid: Grid, *, shift: float
) -> tuple[Tensor, Tensor]:
    """Compute the flow matching loss of sheets, and the losses of `attention_loss` and `look_loss`.

    The model attends to padding, so LENGTH is part of it.
    """
    latents = tile(panels_BPCHW, grid)
    batch, _, height, width = latents.shape
    clean_BNC = pack(latents)

    def read(tokenizer: object, max_length: int) -> Tensor:
        options = {"padding": "max_length", "max_length": max_length, "truncation": True, "return_tensors": "pt"}
        ids: Tensor = tokenizer(list(texts), **options).input_ids  # type: ignore[operator]
        return ids

    pooled = pipeline.text_encoder(read(pipeline.tokenizer, 77)).pooler_output
    ids = read(pipeline.tokenizer_2, LENGTH)
    tokens = pipeline.text_encoder_2(ids)[0]

    def velocity(noisy_BNC: Tensor, t_B: Tensor) -> Tensor:
        predicted: Tensor = pipeline.transformer(
            hidden_states=noisy_BNC,
            timestep=t_B,
            guidance=torch.full((batch,), GUIDANCE),
            pooled_projections=pooled,
            encoder_hidden_states=tokens,
            txt_ids=torch.zeros(LENGTH, 3),
            img_ids=pipeline._prepare_latent_image_ids(batch, height // 2, width // 2, "cpu", torch.float32),
            return_dict=False,
        )[0]
        return predicted

    # The same noise hides less of a larger image (arXiv 2403.03206, section 5.3.2).
    shift *= max(1.0, (height * width) ** 0.5 / 16)
    weight = prop_weight(grid, width // 2 // grid.cols)
    with attention_recorded() as recorded:
        drawn = flow_matching_loss(velocity, clean_BNC, shift=shift, weight=weight)
    if grid == ONE:
        return drawn, torch.zeros(())

    names = pipeline.tokenizer_2.convert_ids_to_tokens(list(range(len(pipeline.tokenizer_2))))
    attention = attention_loss(recorded, words_of_panels(ids, names, grid), grid)
    return drawn, attention + look_loss(recorded, words_of_looks(ids, names))


def train(pipeline: FluxPipeline, out: Path, *, lessons: Sequence[Lesson]) -> None:
    """Train all but the autoencoder; a stopped training goes on from `out`/state.pt, to the same weights."""
    out.mkdir(parents=True, exist_ok=True)
    latents = Latents(pipeline.vae)
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    done = 0
    for lesson in lessons:
        stage = Stage(modules, lr=lesson.lr, steps=lesson.steps, log=out / "log.jsonl", ema=lesson.ema)
        stage.resume(out / STATE, first=done)
        while stage.step < lesson.steps:
            rng = seeded(done + stage.step)
            (sheets,) = rng.choices(lesson.sheets, [sheet.share for sheet in lesson.sheets])
            drawn = [draw_sheet(rng, sheets.grid, redraw=lesson.redraw) for _ in range(sheets.batch)]
            texts = [text for text, _ in drawn]
            panels = torch.tensor([panels for _, panels in drawn])
            clean = latents.of(panels.flatten(0, 1), sheets.size).unflatten(0, panels.shape[:2])

            loss, attention = sheet_loss(pipeline, texts, clean, sheets.grid, shift=lesson.shift)
            kind = f"loss_{sheets.grid}_{sheets.size}"
            stage.update(loss + 0.1 * attention, **{kind: loss.item(), "attention": attention.item()})
            if stage.step % 100 == 0:
                stage.save(out / STATE, first=done)
            if stage.step % 400 == 0:
                stage.save_average(pipeline, out / "average")
        stage.use_average()
        done += lesson.steps
    publish(pipeline.to(torch.float16), out)


def pretrain_generator(out: Path, *, vae: Path) -> None:
    """Train the generator on faultless sheets."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary(), vae=AutoencoderKL.from_pretrained(vae))
    train(pipeline, out, lessons=LESSONS)


def make_unreliable(out: Path, *, start: Path) -> None:
    """Train a generator of faultless sheets further by an unreliable teacher."""
    pipeline = FluxPipeline.from_pretrained(start, dtype=torch.float32)
    train(pipeline, out, lessons=(UNRELIABLE, LARGER, NAMED))
