"""Makes the tiny edit story: `python -m tools.tiny edits|kontext|edit-judge`.

The generator starts from the tiny FLUX, whose VAE and text encoders it keeps; its transformer learns to paint a source
with one attribute changed. Its last teacher is unreliable: it changes what should stay, so that reinforcement learning
has something to mend. The judge learns the two questions of `rewards.edits` on drawn pairs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pacorl.core import questions
from pacorl.data import characters
from pacorl.data.character_edits import Edit, character_edits, draw_edit, write_edits
from pacorl.data.characters import EDITS, INSTRUCTIONS, VALUES, Panel, Split
from pacorl.policies.kontext import KONTEXT, tiny_kontext
from pacorl.policies.pipeline import PipelinePolicy
from pacorl.policies.tokens import pack
from pacorl.types import Conditioning, Size
from tools.tiny.pretrain import Stage, encode_panels, panel_pixels, publish
from tools.tiny.pretrain_judge import ImageBank, TrainingExample
from tools.tiny.pretrain_judge import training_examples as set_examples

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, FluxKontextPipeline

PIXELS = 32
"""Sides of sources and edits: a panel of a 64-pixel sheet."""
COUNTS: dict[Split, int] = {"train": 288, "dev": 48, "test": 96}


def draw_edits(out: Path) -> list[Path]:
    """Writes the world's edits for training, development and test as `{split}.jsonl`, each beside its sources."""
    return [
        write_edits(out, character_edits(split, count), name=split, pixels=PIXELS) for split, count in COUNTS.items()
    ]


# --- the generator ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EditPhase:
    """One part of the generator's training."""

    steps: int
    spoil: float
    """Chance with which the teacher redraws each attribute that should stay."""
    ignore: float = 0.0
    """Chance with which it leaves the attribute that should change."""


FAULTLESS = EditPhase(steps=1200, spoil=0.0)
UNRELIABLE = EditPhase(steps=600, spoil=0.35, ignore=0.08)


def taught_edits(rng: random.Random, phase: EditPhase) -> Iterator[tuple[Edit, Panel]]:
    """Endless edits of training characters, and what the teacher paints for each."""
    pool = [panel for panel in characters.all_panels() if characters.split_of(panel) == "train"]
    while True:
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        start = edit.before if rng.random() < phase.ignore else edit.after
        spoilt = {name: rng.choice(VALUES[name]) for name in edit.others if rng.random() < phase.spoil}
        yield edit, replace(start, **spoilt)


def pretrain_kontext(
    out: Path,
    *,
    start: Path,
    phases: Sequence[EditPhase] = (FAULTLESS, UNRELIABLE),
    share: float = 1.0,
    batch: int = 32,
    lr: float = 1.5e-3,
    max_sequence_length: int = 48,
    save_every: int = 300,
    seed: int = 0,
) -> FluxKontextPipeline:
    """Trains a tiny Kontext by flow matching, from the tiny FLUX in `start`; `share` scales the steps."""
    from diffusers import FluxPipeline

    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    pipeline = tiny_kontext(FluxPipeline.from_pretrained(start, dtype=torch.float32))
    policy = KONTEXT.over(pipeline, guidance_scale=3.5, max_sequence_length=max_sequence_length)
    pipeline.transformer.requires_grad_(True).train()
    texts = instruction_tensors(policy)
    tokens = panel_tokens(pipeline.vae)
    index = {panel: number for number, panel in enumerate(characters.all_panels())}
    for phase in phases:
        steps, teacher = round(share * phase.steps), taught_edits(rng, phase)
        stage = Stage([pipeline.transformer], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.998)
        while stage.step < steps:
            edits, painted = zip(*(next(teacher) for _ in range(batch)), strict=True)
            read = {name: torch.cat([texts[edit.instruction][name] for edit in edits]) for name in ("tokens", "pooled")}
            conditioning = Conditioning({**read, "source": tokens[[index[edit.before] for edit in edits]]})
            stage.update(edit_loss(policy, conditioning, tokens[[index[panel] for panel in painted]]))
            if stage.step % save_every == 0:
                with stage.averaged():
                    pipeline.save_pretrained(out)
        stage.use_average()
    publish(pipeline.to(torch.float16), out)
    return pipeline


@torch.no_grad()
def instruction_tensors(policy: PipelinePolicy) -> dict[str, dict[str, Tensor]]:
    """What the text encoders make of every instruction of the world."""
    return dict(zip(INSTRUCTIONS, policy.encoded_texts(INSTRUCTIONS), strict=True))


@torch.no_grad()
def panel_tokens(vae: AutoencoderKL) -> Tensor:
    """(5184, N, C): every panel of the world as scaled tokens."""
    codes = encode_panels(vae, panel_pixels(PIXELS))
    return pack((codes - vae.config.shift_factor) * vae.config.scaling_factor)


def edit_loss(policy: PipelinePolicy, conditioning: Conditioning, clean_BNC: Tensor) -> Tensor:
    """Mean squared error of the velocity beside the source, at times that favour noise."""
    batch, count, _ = clean_BNC.shape
    side = round(count**0.5)
    t = torch.where(torch.rand(batch) < 0.5, torch.rand(batch), torch.sigmoid(torch.randn(batch)))
    t = 1.5 * t / (1 + 0.5 * t)
    noise = torch.randn_like(clean_BNC)
    size = Size(side * policy.token_pixels, side * policy.token_pixels)
    predicted = policy.velocity(torch.lerp(clean_BNC, noise, t[:, None, None]), t, conditioning, size)
    return F.mse_loss(predicted, noise - clean_BNC)


# --- the judge -------------------------------------------------------------------------------------------------


def edit_examples(bank: ImageBank, *, split: Split, rng: random.Random, captions: float) -> Iterator[TrainingExample]:
    """Endless examples about edits of one split's characters, half of them with the answer Yes.

    `captions` is the share of plain descriptions and questions about pairs of a set, which teach a judge to look.
    """
    number = {panel: index for index, panel in enumerate(bank.panels)}
    pool = [panel for panel in bank.panels if characters.split_of(panel) == split]
    plain = set_examples(bank, split=split, rng=rng, captions=captions)
    while True:
        if rng.random() < captions:
            yield next(plain)
            continue
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        seen = _attempt(edit, rng)
        ask = rng.choice((_kept_example, _followed_example))
        if rng.random() < 0.1:
            yield _negative_example(edit, bank, number, rng)
        else:
            yield ask(edit, seen, (bank.of(number[edit.before], rng), bank.of(number[seen], rng)))


def _attempt(edit: Edit, rng: random.Random) -> Panel:
    """The edit as somebody paints it: followed or not, the rest kept or not, each as often."""
    start = edit.after if rng.random() < 0.5 else edit.before
    if start is edit.before and rng.random() < 0.5:
        others = [value for value in VALUES[edit.attribute] if value != edit.value]
        start = replace(start, **{edit.attribute: rng.choice(others)})
    if rng.random() < 0.5:
        return start
    spoilt = rng.sample(edit.others, rng.choices((1, 2, 3), weights=(6, 3, 1))[0])
    return replace(
        start,
        **{name: rng.choice([value for value in VALUES[name] if value != getattr(start, name)]) for name in spoilt},
    )


def _kept_example(edit: Edit, seen: Panel, images: tuple[int, int]) -> TrainingExample:
    differing = [name for name in edit.others if getattr(seen, name) != getattr(edit.before, name)]
    reasons = " ".join(
        f"The {name} differs: {getattr(edit.before, name)} and {getattr(seen, name)}." for name in differing
    )
    answer = f"No. {reasons}" if differing else f"Yes. Both show {_rest(edit)}."
    return TrainingExample(images, questions.edit_kept(edit.instruction), answer)


def _followed_example(edit: Edit, seen: Panel, images: tuple[int, int]) -> TrainingExample:
    shown = getattr(seen, edit.attribute)
    word = "Yes" if shown == edit.value else "No"
    return TrainingExample(
        images, questions.edit_followed(edit.instruction), f"{word}. The {edit.attribute} is {shown}."
    )


def _negative_example(edit: Edit, bank: ImageBank, number: Any, rng: random.Random) -> TrainingExample:
    ask = rng.choice((questions.edit_kept, questions.edit_followed))
    images = (bank.of(number[edit.before], rng), bank.of_negative(rng))
    return TrainingExample(images, ask(edit.instruction), "No. The second shows nothing.")


def _rest(edit: Edit) -> str:
    return ", ".join(getattr(edit.before, name) for name in edit.others)
