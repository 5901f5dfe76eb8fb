"""Training of the tiny editor, from the generator.

It learns edits of one attribute, and to draw a hero from stitched references. The last teacher is unreliable, so that
reinforcement learning can improve on it. A LoRA by faultless teachers is for people who draw with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from diffusers import FluxPipeline
from tests.twins import tiny_kontext
from torch import Tensor

from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.lora import save_lora
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import PipelinePolicy, pack, stitch
from pacorl.tiny.words import INSTRUCTIONS
from pacorl.tiny.world import IDENTITY, VALUES, Panel, draw
from pacorl.types import Conditioning, Size
from research.tiny.edits import Edit, draw_edit
from research.tiny.generator import GUIDANCE, LENGTH, Latents
from research.tiny.heroes import HeroTask, draw_task, heroes_of, panel_of
from research.tiny.panels import indices_of
from research.tiny.stage import STATE, Stage, flow_matching_loss, publish, seeded

SIZES = {64: 24, 96: 12}
"""Pixels of source and edit → examples of a step of each kind."""
SHARES = (0.65, 0.35)
"""Shares of the steps of SIZES."""
REFERENCE = 96
"""Pixels of a reference."""
RANK = 16
OPTIONS = {"guidance_scale": GUIDANCE, "max_sequence_length": LENGTH}


class Lesson(NamedTuple):
    """One phase of the training, and how unreliable its teacher is."""

    steps: int
    spoil: float = 0.0  # probability that it redraws an attribute that should stay, or a hero's trait
    ignore: float = 0.0  # probability that it leaves the attribute that should change
    paste: float = 0.0  # probability that it copies a reference
    lr: float = 1.5e-3
    ema: float = 0.998


LESSONS = (Lesson(1800), Lesson(300, spoil=0.25, ignore=0.05, paste=0.12, lr=8e-4, ema=0.98))
STEADY = Lesson(600, lr=3e-3, ema=0.99)


def taught_edits(rng: Random, lesson: Lesson) -> Iterator[tuple[Edit, Panel]]:
    """Yield edits of training heroes without end, and the teacher's result of each."""
    heroes = heroes_of("train")
    while True:
        edit = draw_edit(panel_of(rng.choice(heroes), rng), rng.choice(tuple(INSTRUCTIONS)), rng)
        drawn = edit.before if rng.random() < lesson.ignore else edit.after
        for name in edit.others:
            if rng.random() < lesson.spoil:
                drawn = replace(drawn, **{name: rng.choice(VALUES[name])})
        yield edit, drawn


def taught_heroes(rng: Random, lesson: Lesson) -> Iterator[tuple[HeroTask, Panel]]:
    """Yield tasks about training heroes without end, and the teacher's panel of each."""
    heroes = heroes_of("train")
    while True:
        task = draw_task(rng.choice(heroes), rng)
        if rng.random() < lesson.paste:
            yield task, rng.choice(task.references)
            continue
        drawn = task.asked
        for name in IDENTITY:
            if rng.random() < lesson.spoil:
                drawn = replace(drawn, **{name: rng.choice(VALUES[name])})
        yield task, drawn


class Examples:
    """Draws edits and heroes for a tiny Kontext, whose frozen encoders read every instruction once."""

    def __init__(self, policy: PipelinePolicy) -> None:
        self.policy = policy
        self.latents = Latents(policy.pipeline.vae)
        self.texts: dict[str, dict[str, Tensor]] = {}

    def loss(self, rng: Random, lesson: Lesson) -> Tensor:
        """Compute the flow matching loss of newly drawn examples of one size, as many heroes as edits."""
        (side,) = rng.choices(tuple(SIZES), SHARES)
        size = Size(side, side)
        asked, edited = zip(*islice(taught_edits(rng, lesson), SIZES[side]), strict=True)
        tasks, heroes = zip(*islice(taught_heroes(rng, lesson), SIZES[side]), strict=True)

        # What the editor is shown: the source, or the references in one image.
        sources = pack(self.latents.of(indices_of([edit.before for edit in asked]), side))
        stitched = []
        for task in tasks:
            stitched.append(stitch([draw(panel, REFERENCE) for panel in task.references], size))
        with torch.no_grad():
            references = self.policy.encode_pixels(self.policy.pipeline.image_processor.preprocess(stitched))

        # The texts.
        texts = [self._read(text) for text in (*(edit.instruction for edit in asked), *(task.text for task in tasks))]
        read = {name: torch.cat([text[name] for text in texts]) for name in ("tokens", "pooled")}

        conditioning = Conditioning({**read, "source": torch.cat([sources, references])})
        velocity = partial(self.policy.velocity, conditioning=conditioning, size=size)
        clean = pack(self.latents.of(indices_of([*edited, *heroes]), side))
        # Who the hero is is decided in much noise.
        return flow_matching_loss(velocity, clean, shift=3.0 * max(1.0, side / 64))

    def _read(self, text: str) -> dict[str, Tensor]:
        if text not in self.texts:
            with torch.no_grad():
                (self.texts[text],) = self.policy.encoded_texts([text])
        return self.texts[text]


def pretrain_editor(out: Path, *, start: Path) -> None:
    """Train a tiny Kontext from the tiny FLUX in `start`; a stopped training goes on from `out`/state.pt."""
    out.mkdir(parents=True, exist_ok=True)
    pipeline = tiny_kontext(FluxPipeline.from_pretrained(start, dtype=torch.float32))
    policy = KONTEXT.over(pipeline, **OPTIONS)
    pipeline.transformer.requires_grad_(True).train()  # `over` froze it
    examples = Examples(policy)
    done = 0
    for lesson in LESSONS:
        stage = Stage([pipeline.transformer], lr=lesson.lr, steps=lesson.steps, log=out / "log.jsonl", ema=lesson.ema)
        stage.resume(out / STATE, first=done)
        while stage.step < lesson.steps:
            stage.update(examples.loss(seeded(done + stage.step), lesson))
            if stage.step % 100 == 0:
                stage.save(out / STATE, first=done)
        stage.use_average()
        done += lesson.steps
    publish(pipeline.to(torch.float16), out)


def train_steady(out: Path, *, start: Path) -> None:
    """Train a LoRA of the tiny Kontext in `start` by faultless teachers, so that it keeps what is not to change."""
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    policy = KONTEXT.load(KONTEXT.options_for(str(start), dtype="float32", **OPTIONS))
    transformer, targets = policy.pipeline.transformer, policy.lora_targets
    add_lora(transformer, rank=RANK, alpha=RANK, targets=targets)
    examples = Examples(policy)
    stage = Stage([transformer], lr=STEADY.lr, steps=STEADY.steps, log=out / "log.jsonl", ema=STEADY.ema)
    while stage.step < STEADY.steps:
        stage.update(examples.loss(seeded(stage.step), STEADY))
    stage.use_average()
    state = {name: value.half() for name, value in adapter_state(transformer).items()}
    save_lora(out, state, rank=RANK, alpha=RANK, targets=targets)
