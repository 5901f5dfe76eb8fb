"""Training of the tiny generator: sheets of 4 and 9 panels by flow matching, text encoders included.

First faultless sheets, in much noise, until every unnamed look is shared; then a mild unreliable teacher, so that
reinforcement learning can raise the agreement. How often the panels of a sheet agree is measured, not assumed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from diffusers import AutoencoderKL, FluxPipeline
from tests.twins import tiny_flux
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.models.policies.pipeline import pack
from pacorl.types import Grid
from research.world.panels import COUNTS, NAMES, compose, tile
from research.world.stage import STATE, Stage, flow_matching_loss, publish, seeded
from research.world.world import IDENTITY, LOOKS, VALUES, draw_scenes, set_prompts, theme_text, write_prompt

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
    shift: float  # towards noise, at 64 px: sharing is decided in much noise
    told: float = 0.0  # probability that one look of four panels is each one's own, named by its text


SMALL = (Sheets(FOUR, 16, 48, 0.06), Sheets(FOUR, 32, 32, 0.84), Sheets(NINE, 32, 12, 0.10))
WORDS = (Sheets(ONE, 32, 96, 0.5), Sheets(FOUR, 32, 32, 0.5))
ALL = (
    Sheets(ONE, 32, 64, 0.05),
    Sheets(ONE, 64, 32, 0.05),
    Sheets(FOUR, 16, 48, 0.06),
    Sheets(FOUR, 32, 32, 0.36),
    Sheets(FOUR, 48, 16, 0.08),
    Sheets(FOUR, 64, 10, 0.14),
    Sheets(FOUR, 96, 4, 0.06),
    Sheets(NINE, 16, 24, 0.04),
    Sheets(NINE, 32, 12, 0.10),
    Sheets(NINE, 64, 4, 0.06),
)
FEW = (Sheets(FOUR, 16, 48, 0.05), Sheets(FOUR, 32, 32, 0.6), Sheets(FOUR, 48, 16, 0.2), Sheets(NINE, 32, 12, 0.15))
"""Sizes that 2.3 M parameters can learn; an autoencoder of twice the scale can double them."""
LESSONS = (
    Lesson(2000, SMALL, redraw=0.0, lr=2e-3, ema=0.998, shift=2.0),
    # Without single panels the texts of panels are not read at all after 2,000 steps.
    Lesson(1400, WORDS, redraw=0.0, lr=2e-3, ema=0.998, shift=1.5),
    # Nor is it learnt by single panels which of four texts is a panel's own.
    Lesson(600, SMALL, redraw=0.0, lr=2e-3, ema=0.995, shift=1.5, told=0.7),
    Lesson(1600, ALL, redraw=0.0, lr=1.5e-3, ema=0.998, shift=3.0, told=0.15),
    Lesson(1400, FEW, redraw=0.0, lr=2e-3, ema=0.998, shift=2.0, told=0.1),
)
UNRELIABLE = Lesson(240, ALL, redraw=0.22, lr=7e-4, ema=0.98, shift=3.0)


def draw_sheet(rng: Random, grid: Grid, *, redraw: float, told: float = 0.0) -> tuple[str, list[list[int]]]:
    """Draw a training prompt and the attributes of its panels, some looks redrawn by the teacher.

    Which text belongs to which panel is learnt by looks that panels do not share: poses and props are few pixels.
    """
    place = rng.choice(VALUES["place"])
    # People name more looks than prompts do; half of the themes name none.
    names = rng.sample(LOOKS, rng.choice((0, 0, 0, 0, 0, 1, 1, 2, 3, 4)))
    named = {name: rng.choice(VALUES[name]) for name in LOOKS if name in names}
    scenes = draw_scenes("train", place, grid.count, rng)
    looks = {name: named.get(name) or rng.choice(VALUES[name]) for name in LOOKS}
    own = rng.choice(IDENTITY) if grid == FOUR and rng.random() < told else ""
    named.pop(own, None)
    panels, texts = [], []
    for pose, prop in scenes:
        drawn = {**looks, "place": place, "pose": pose, "prop": prop}
        texts.append((pose, prop))
        if own:
            drawn[own] = rng.choice(VALUES[own])
            texts[-1] = (f"{drawn[own]} {pose}", prop)
        for name in LOOKS:
            if rng.random() < redraw and name != own:
                drawn[name] = rng.choice(VALUES[name])
        panels.append([VALUES[name].index(drawn[name]) for name in NAMES])
    if grid.count == 1:
        (scene,) = scenes
        return f"{theme_text(place, named)}, {', '.join(scene)}", panels
    return write_prompt(0, place, texts, grid, named=named).text, panels


class Latents:
    """Scaled latents of panels, encoded when they are first needed."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae = vae
        self.known: dict[int, Tensor] = {}
        self.have: dict[int, Tensor] = {}

    @torch.no_grad()
    def of(self, panels: Tensor, size: int) -> Tensor:
        """Return the latents of panels: (P, 7) → (P, C, size / 4, size / 4)."""
        if size > 48:
            return self._encode(panels, size)
        weights = torch.tensor(COUNTS).flip(0).cumprod(0).roll(1)
        weights[0] = 1
        number = (panels * weights.flip(0)).sum(1)
        if size not in self.known:
            total = int(torch.tensor(COUNTS).prod())
            self.known[size] = torch.empty(total, 8, size // 4, size // 4)
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


class PanelOfWord(nn.Module):
    """Predicts from a word's code which panel's text it is in.

    Without it the T5 learns no places, and then no image token can attend to the text of its own panel: after 5,000
    steps a panel still drew a prop of any of the four texts.
    """

    def __init__(self, tokenizer: Any, width: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.places = nn.Linear(width, NINE.count)
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self.register_buffer("is_tag", torch.tensor([token.startswith("▁[") for token in tokens]))

    def loss(self, ids_BT: Tensor, codes_BTC: Tensor) -> Tensor:
        """Compute the cross-entropy over the words that follow a panel's tag."""
        tag_BT = self.is_tag[ids_BT]
        tags_BT = tag_BT.cumsum(1)
        ends = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        word_BT = (tags_BT > 0) & ~tag_BT & ~torch.isin(ids_BT, torch.tensor(ends))
        return F.cross_entropy(self.places(codes_BTC[word_BT]), tags_BT[word_BT] - 1)


def sheet_loss(
    pipeline: FluxPipeline, texts: Sequence[str], latents: Tensor, *, shift: float, words: PanelOfWord
) -> tuple[Tensor, Tensor]:
    """Compute the flow matching loss of whole sheets, and that of `words`.

    The model attends to padding, so LENGTH is part of it.
    """
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
    loss = flow_matching_loss(velocity, clean_BNC, shift=shift * max(1.0, (height * width) ** 0.5 / 16))
    return loss, words.loss(ids, tokens)


def train(pipeline: FluxPipeline, out: Path, *, lessons: Sequence[Lesson], share: float = 1.0) -> None:
    """Train all but the autoencoder; a stopped training goes on from `out`/state.pt, to the same weights."""
    out.mkdir(parents=True, exist_ok=True)
    latents = Latents(pipeline.vae)
    words = PanelOfWord(pipeline.tokenizer_2, pipeline.text_encoder_2.config.d_model)
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2, words]
    done = 0
    for lesson in lessons:
        steps = round(share * lesson.steps)
        stage = Stage(modules, lr=lesson.lr, steps=steps, log=out / "log.jsonl", ema=lesson.ema)
        stage.resume(out / STATE, first=done)
        while stage.step < steps:
            rng = seeded(done + stage.step)
            (sheets,) = rng.choices(lesson.sheets, [sheet.share for sheet in lesson.sheets])
            drawn = [draw_sheet(rng, sheets.grid, redraw=lesson.redraw, told=lesson.told) for _ in range(sheets.batch)]
            texts = [text for text, _ in drawn]
            panels = torch.tensor([panels for _, panels in drawn])
            clean = latents.of(panels.flatten(0, 1), sheets.size).unflatten(0, panels.shape[:2])
            drawn_loss, words_loss = sheet_loss(
                pipeline, texts, tile(clean, sheets.grid), shift=lesson.shift, words=words
            )
            kind = f"loss_{sheets.grid}_{sheets.size}"
            loss = drawn_loss if sheets.grid == ONE else drawn_loss + 0.1 * words_loss
            stage.update(loss, **{kind: drawn_loss.item(), "words": words_loss.item()})
            if stage.step % 100 == 0:
                stage.save(out / STATE, first=done)
            if stage.step % 400 == 0:
                stage.save_average(pipeline, out / "average")
        stage.use_average()
        done += steps
    publish(pipeline.to(torch.float16), out)


def vocabulary() -> list[str]:
    """Return the training texts of the tokenizers."""
    return [prompt.text for grid in (FOUR, NINE) for prompt in set_prompts("train", 288, grid=grid)]


def pretrain_generator(out: Path, *, vae: Path, share: float = 1.0) -> None:
    """Train the generator on faultless sheets."""
    torch.manual_seed(0)
    pipeline = tiny_flux(vocabulary(), vae=AutoencoderKL.from_pretrained(vae))
    train(pipeline, out, lessons=LESSONS, share=share)


def go_on(out: Path, *, vae: Path) -> None:
    """Go on from `words/`: all lessons but the last are done, and 200 steps of this one."""
    folder = Path(__file__).with_name("words")
    pipeline = FluxPipeline.from_pretrained(folder, vae=AutoencoderKL.from_pretrained(vae), dtype=torch.float32)
    train(pipeline, out, lessons=(LESSONS[-1]._replace(steps=LESSONS[-1].steps - 200),))


def make_unreliable(
    out: Path, *, start: Path, steps: int = UNRELIABLE.steps, redraw: float = UNRELIABLE.redraw
) -> None:
    """Train a generator of faultless sheets further by an unreliable teacher."""
    pipeline = FluxPipeline.from_pretrained(start, dtype=torch.float32)
    train(pipeline, out, lessons=(UNRELIABLE._replace(steps=steps, redraw=redraw),))


if __name__ == "__main__":
    import sys

    match sys.argv[1:]:
        case ["faultless", out, vae]:
            pretrain_generator(Path(out), vae=Path(vae))
        case ["words", out, vae]:
            go_on(Path(out), vae=Path(vae))
        case ["unreliable", out, start, steps, redraw]:
            make_unreliable(Path(out), start=Path(start), steps=int(steps), redraw=float(redraw))
        case _:
            print(json.dumps({"usage": "faultless OUT VAE | words OUT VAE | unreliable OUT START STEPS REDRAW"}))
