"""The tiny editor and the judge of edits: `python -m tools.tiny edits|kontext|edit-judge`.

The editor starts from the tiny FLUX, whose VAE and text encoders it keeps; its transformer learns to generate a source
with one attribute changed. Its last teacher is unreliable: it changes what should stay, so that reinforcement learning
has something to mend. The judge learns the two questions of `rewards.consistency` on drawn pairs.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from pacorl.core import questions
from pacorl.data import characters
from pacorl.data.character_edits import Edit, character_edits, draw_edit, write_edits
from pacorl.data.characters import EDITS, INSTRUCTIONS, VALUES, Panel, Split, with_another
from pacorl.policies.flux import TRAINED_WITH
from pacorl.policies.kontext import KONTEXT, tiny_kontext
from pacorl.policies.pipeline import PipelinePolicy, pack
from pacorl.types import Conditioning, Size
from tools.tiny.pretrain import Stage, flow_matching_loss, panel_latents, publish, training_panels
from tools.tiny.pretrain_judge import ImageBank, TrainingExample, changed, differences, training_examples

PIXELS = 32
"""Sides of sources and edits: a panel of a 64-pixel grid."""
COUNTS: dict[Split, int] = {"train": 288, "dev": 48, "test": 96}


def draw_edits(out: Path) -> list[Path]:
    """Writes the world's edits for training, development and test as `{split}.jsonl`, each beside its sources."""
    return [
        write_edits(out, character_edits(split, count), name=split, pixels=PIXELS) for split, count in COUNTS.items()
    ]


# --- the editor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EditPhase:
    """One phase of the editor's training."""

    steps: int
    spoil: float
    """Chance with which the teacher redraws each attribute that should stay."""
    ignore: float = 0.0
    """Chance with which it leaves the attribute that should change."""


FAULTLESS = EditPhase(steps=1200, spoil=0.0)
"""After it the editor makes every held-out edit without a fault: nothing would be left to mend."""
UNRELIABLE = EditPhase(steps=600, spoil=0.35, ignore=0.08)


def taught_edits(rng: random.Random, phase: EditPhase) -> Iterator[tuple[Edit, Panel]]:
    """Endless edits of training characters, and what the teacher makes of each."""
    pool = training_panels()
    while True:
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        start = edit.before if rng.random() < phase.ignore else edit.after
        spoilt = {name: rng.choice(VALUES[name]) for name in edit.others if rng.random() < phase.spoil}
        yield edit, replace(start, **spoilt)


def pretrain_kontext(out: Path, *, start: Path, share: float) -> None:
    """Trains a tiny Kontext by flow matching, from the tiny FLUX in `start`; `share` scales the steps."""
    from diffusers import FluxPipeline

    torch.manual_seed(0)
    rng = random.Random(0)
    out.mkdir(parents=True, exist_ok=True)
    pipeline = tiny_kontext(FluxPipeline.from_pretrained(start, dtype=torch.float32))
    policy = KONTEXT.over(pipeline, **TRAINED_WITH)
    pipeline.transformer.requires_grad_(True).train()  # a policy freezes what it is given
    # Text encoders and VAE stay as they are, so every text and panel is encoded once.
    with torch.no_grad():
        texts = dict(zip(INSTRUCTIONS, policy.encoded_texts(INSTRUCTIONS), strict=True))
    tokens = pack(panel_latents(pipeline.vae, PIXELS))
    index = {panel: number for number, panel in enumerate(characters.all_panels())}
    for phase in (FAULTLESS, UNRELIABLE):
        steps, teacher = round(share * phase.steps), taught_edits(rng, phase)
        stage = Stage([pipeline.transformer], lr=1.5e-3, steps=steps, log=out / "log.jsonl", ema=0.998)
        while stage.step < steps:
            edits, panels = zip(*(next(teacher) for _ in range(32)), strict=True)
            read = {name: torch.cat([texts[edit.instruction][name] for edit in edits]) for name in ("tokens", "pooled")}
            conditioning = Conditioning({**read, "source": tokens[[index[edit.before] for edit in edits]]})
            stage.update(edit_loss(policy, conditioning, tokens[[index[panel] for panel in panels]]))
            if stage.step % 300 == 0:
                stage.save_average(pipeline, out)
        stage.use_average()
    publish(pipeline.to(torch.float16), out)


def edit_loss(policy: PipelinePolicy, conditioning: Conditioning, clean_BNC: Tensor) -> Tensor:
    """The flow matching loss of edits, beside their sources."""
    side = math.isqrt(clean_BNC.shape[1]) * policy.token_pixels
    velocity = partial(policy.velocity, conditioning=conditioning, size=Size(side, side))
    return flow_matching_loss(velocity, clean_BNC, shift=1.5)


# --- the judge -------------------------------------------------------------------------------------------------


def edit_examples(bank: ImageBank, *, split: Split, rng: random.Random, captions: float) -> Iterator[TrainingExample]:
    """Endless examples about edits of one split's characters, half of them with the answer Yes.

    `captions` is the share of plain descriptions and questions about pairs of a set, which teach a judge to look.
    """
    pool = [panel for panel in bank.panels if characters.split_of(panel) == split]
    plain = training_examples(bank, split=split, rng=rng, captions=captions)
    while True:
        if rng.random() < captions:
            yield next(plain)
            continue
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        seen = _attempt(edit, rng)
        example = rng.choice((_kept_example, _followed_example))(edit, seen)
        if rng.random() < 0.1:
            ask = rng.choice((questions.edit_kept, questions.edit_followed))
            images = (bank.of(edit.before, rng), bank.of_negative(rng))
            yield TrainingExample(images, ask(edit.instruction), "No. The second shows nothing.")
        else:
            yield replace(example, images=(bank.of(edit.before, rng), bank.of(seen, rng)))


def _attempt(edit: Edit, rng: random.Random) -> Panel:
    """What an editor might make of it: followed or not, the rest kept or not, each as often."""
    panel = edit.after if rng.random() < 0.5 else edit.before
    if panel is edit.before and rng.random() < 0.5:
        panel = with_another(edit.after, edit.attribute, rng)  # changed, but to what nobody asked for
    if rng.random() < 0.5:
        return panel
    return changed(panel, edit.others, rng.choices((1, 2, 3), weights=(6, 3, 1))[0], rng)


def _kept_example(edit: Edit, seen: Panel) -> TrainingExample:
    reasons = differences(edit.before, seen, edit.others)
    kept = ", ".join(getattr(edit.before, name) for name in edit.others)
    answer = f"No. {reasons}" if reasons else f"Yes. Both show {kept}."
    return TrainingExample((), questions.edit_kept(edit.instruction), answer)


def _followed_example(edit: Edit, seen: Panel) -> TrainingExample:
    shown = getattr(seen, edit.attribute)
    answer = f"{'Yes' if shown == edit.value else 'No'}. The {edit.attribute} is {shown}."
    return TrainingExample((), questions.edit_followed(edit.instruction), answer)
