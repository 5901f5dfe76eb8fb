"""Training of the tiny autoencoder, generator and editor: `python -m research.tiny vae|generator|sizes|kontext|…`.

All data are images of `tiny.characters`, so there are no downloads. A training prints its loss and writes it to
`log.jsonl` in the folder of the weights. `docs/tiny.md` has the commands of the committed checkpoints.

The editor starts from the generator, whose autoencoder and text encoders it keeps, and then learns to draw a hero from
references. Its last teacher is unreliable, so that reinforcement learning can improve on it; a LoRA with faultless
teachers is for people who draw with it in the studio.

Legend: B batch, P panels, N tokens, C channels, H height, W width.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxPipeline
from tests.twins import parts as twins
from tests.twins import tiny_flux, tiny_kontext
from torch import Tensor, nn
from torch.nn import functional as F

from pacorl.io.documents import append_jsonl, read_json, write_json
from pacorl.io.files import write_atomic
from pacorl.models.adapters import adapter_state, add_lora
from pacorl.models.lora import save_lora
from pacorl.models.policies.kontext import KONTEXT
from pacorl.models.policies.pipeline import PipelinePolicy, pack, stitch
from pacorl.records.prompts import save_prompts
from pacorl.tiny import characters
from pacorl.tiny.characters import EDITS, INSTRUCTIONS, VALUES, Panel, Split
from pacorl.tiny.generators import TRAINED_WITH
from pacorl.types import Conditioning, Grid, Size
from research.tiny.character_edits import Edit, character_edits, draw_edit, write_edits
from research.tiny.heroes import taught_heroes

PANEL_SIZES = (32, 64)
"""Panels of 64 px and of 128 px grids."""
STATE = "state.pt"
"""What a stopped training goes on from."""
GRID = Grid(2, 2)
LENGTH: int = TRAINED_WITH["max_sequence_length"]
NINE_LENGTH = 160
"""Tokens of a text about nine panels; one about four has 42."""


class Stage:
    """One training: schedule, optimizer, moving average of the weights, and log."""

    def __init__(self, modules: Sequence[nn.Module], *, lr: float, steps: int, log: Path, ema: float) -> None:
        def warm_cosine(step: int) -> float:
            cosine = 0.5 * (1 + math.cos(math.pi * min(step, steps) / steps))
            # The rate ends at 1 % instead of 0, so that the last steps still count.
            return min((step + 1) / max(1, steps // 50), cosine + 0.01)

        self.parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, warm_cosine)
        self.average = [p.detach().clone() for p in self.parameters]
        self.ema = ema
        self.step = 0
        self.steps = steps
        self.log = log
        self.started = time.time()
        self.recent: list[float] = []

    def update(self, loss: Tensor, **metrics: float) -> None:
        """Make an optimizer step; log every hundredth one, with the mean loss since the last."""
        # A step.
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1
        self.recent.append(loss.item())
        # The first steps are far from any good weights: the average must forget them.
        decay = min(self.ema, self.step / (self.step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.parameters], 1 - decay)
        # A line of the log.
        if self.step % 100 == 0 or self.step == self.steps:
            line = {"step": self.step, "loss": sum(self.recent) / len(self.recent), **metrics}
            line["seconds"] = round(time.time() - self.started, 1)
            self.recent.clear()
            append_jsonl(self.log, line)
            print(line, flush=True)

    def save_average(self, model: Any, out: Path) -> None:
        """Save `model`, which contains the modules, with averaged weights; training goes on from the last weights."""
        last = [p.detach().clone() for p in self.parameters]
        self.use_average()
        model.save_pretrained(out)
        torch._foreach_copy_([p.detach() for p in self.parameters], last)

    def save(self, path: Path, *, first: int = 0, rng: Random | None = None) -> None:
        """Write all that a resumed stage needs; `first`: steps before the stage; `rng` draws its data."""
        state = {
            "first": first,
            "step": self.step,
            "parameters": [p.detach() for p in self.parameters],
            "average": self.average,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": rng and rng.getstate(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_atomic(path, buffer.getvalue())

    def resume(self, path: Path, *, first: int = 0, rng: Random | None = None) -> None:
        """Go on from a file of `save`: one of an earlier stage is ignored, and one of a later stage ends this one."""
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["first"] < first:
            return
        torch._foreach_copy_([p.detach() for p in self.parameters], state["parameters"])
        torch._foreach_copy_(self.average, state["average"])
        if state["first"] > first:
            # The later stage, whose start is the average of this one, reads all of it again.
            self.step = self.steps
            return
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.step = state["step"]
        if rng:
            version, numbers, gauss = state["rng"]
            rng.setstate((version, tuple(numbers), gauss))

    def use_average(self) -> None:
        """Replace the last weights by the averaged ones."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.average)


def publish(model: Any, out: Path) -> None:
    """Save a model or pipeline without the path of its origin."""
    model.save_pretrained(out)
    for file in out.rglob("*.json"):
        config = read_json(file)
        if isinstance(config, dict) and config.pop("_name_or_path", None):
            write_json(file, config)


# --- panels and their latents ----------------------------------------------------------------------------------


def panel_pixels(size: int, panels: Sequence[Panel] | None = None) -> Tensor:
    """Draw `panels`, by default all 5,184: (P, 3, size, size) in −1..1, fp32."""
    drawings = []
    for panel in panels or characters.all_panels():
        drawings.append(np.asarray(characters.draw(panel, size)))
    return torch.from_numpy(np.stack(drawings)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)


@torch.no_grad()
def encode_panels(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Encode many images to unscaled latent modes."""
    return torch.cat([vae.encode(batch).latent_dist.mode() for batch in pixels.split(64)])


def panel_latents(vae: AutoencoderKL, size: int, panels: Sequence[Panel] | None = None) -> Tensor:
    """Encode `panel_pixels` to scaled latents: (P, C, size / 4, size / 4)."""
    codes = encode_panels(vae, panel_pixels(size, panels))
    latents: Tensor = (codes - vae.config.shift_factor) * vae.config.scaling_factor
    return latents


def tile(panels_BPCHW: Tensor, grid: Grid = GRID) -> Tensor:
    """Join panels to a grid of R × K, images or latents: (B, R·K, C, H, W) → (B, C, R·H, K·W)."""
    rows_BRKCHW: Tensor = panels_BPCHW.unflatten(1, (grid.rows, grid.cols))
    return rows_BRKCHW.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


# --- the autoencoder -------------------------------------------------------------------------------------------


def pretrain_vae(out: Path, *, share: float) -> None:
    """Train the tiny VAE on grid images, half of them encoded panel by panel like the generator's data.

    Args:
        share: factor of the 1,800 steps, for a quick try.
    """
    steps = round(share * 1800)
    batch = 8
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    vae = twins.tiny_vae().to(memory_format=torch.channels_last)
    pixels = {size: panel_pixels(size) for size in PANEL_SIZES}
    stage = Stage([vae], lr=2e-3, steps=steps, log=out / "log.jsonl", ema=0.995)
    for step in range(steps):
        # Every fourth batch is of 128 px grids, a quarter as many: each has four times the pixels.
        size = PANEL_SIZES[0]
        count = batch
        if step % 4 == 0:
            size = PANEL_SIZES[1]
            count = batch // 4
        # Four random panels per grid: the autoencoder must not learn which ones belong together.
        panels = pixels[size][torch.randint(len(pixels[size]), (count, 4))]
        grids = tile(panels)

        # The generator learns from joined latents of panels, while policies decode whole grids.
        if step % 2:
            code = vae.encode(panels.flatten(0, 1)).latent_dist
            latents = tile(code.sample().unflatten(0, (count, 4)))
        else:
            code = vae.encode(grids).latent_dist
            latents = code.sample()
        decoded = vae.decode(latents).sample
        distance = F.l1_loss(decoded, grids) + F.mse_loss(decoded, grids)
        stage.update(distance + 1e-4 * code.kl().mean() / latents[0].numel(), distance=distance.item())

    # The generator is trained on standardized latents, and policies invert that by these two numbers.
    stage.use_average()
    codes = torch.cat([encode_panels(vae, pixels[size][::8]).flatten() for size in PANEL_SIZES])
    vae.register_to_config(shift_factor=codes.mean().item(), scaling_factor=1 / codes.std().item())
    vae.save_pretrained(out)


# --- the generator ---------------------------------------------------------------------------------------------


def imperfect_sets(rng: Random, *, redraw: float, grid: Grid = GRID) -> Iterator[tuple[str, list[Panel]]]:
    """Yield (prompt text, panels) of training characters without end, some attributes redrawn by the teacher."""
    # Sorted, since a set of texts has another order in each process, and a seed would draw other subjects.
    subjects = characters.subjects_of("train")
    while True:
        panels = characters.set_of(rng.choice(subjects), grid.count, rng)
        prompt = characters.write_prompt(0, panels, grid)
        yield prompt.text, characters.redrawn(panels, chance=redraw, rng=rng)


class TrainingPhase(NamedTuple):
    """One phase of the generator's training."""

    steps: int
    shares: Mapping[int, float]  # size of the panels → share of the steps
    redraw: float  # probability that the teacher redraws a kept attribute of a panel
    lr: float = 2e-3
    ema: float = 0.998
    grid: Grid = GRID
    length: int = LENGTH


WORDS = TrainingPhase(steps=1500, shares={32: 0.85, 64: 0.15}, redraw=0.0)
"""First a faultless teacher, mostly at 64 px: words and images are matched early."""
SETS = TrainingPhase(steps=2200, shares={32: 0.45, 64: 0.55}, redraw=0.27)
"""Then an unreliable teacher, at both sizes: the generator becomes capable, but inconsistent."""
SIZES = TrainingPhase(steps=1500, shares={24: 0.25, 32: 0.15, 48: 0.35, 64: 0.25}, redraw=0.27, lr=1.5e-3, ema=0.995)
"""Last the sizes between, of grids of 48 and 96 px too."""
BATCH = {24: 40, 32: 32, 48: 20, 64: 12}
"""Grid images per step by panel size: about as many tokens in each."""
NINE = TrainingPhase(
    steps=1000, shares={32: 1.0}, redraw=0.27, lr=1.5e-3, ema=0.995, grid=Grid(3, 3), length=NINE_LENGTH
)
"""Sets of nine panels of 32 px, which the committed generator does not know."""


def pretrain_generator(out: Path, *, vae: AutoencoderKL, share: float) -> None:
    """Train transformer and text encoders together by flow matching, on grid images of 64 px and of 128 px."""
    torch.manual_seed(0)
    train_generator(tiny_flux(characters.vocabulary(), vae=vae), out, phases=(WORDS, SETS), share=share)


def pretrain_sizes(out: Path, *, start: Path, share: float) -> None:
    """Train the tiny FLUX in `start` further, on grid images of 48, 64, 96 and 128 px."""
    pipeline = FluxPipeline.from_pretrained(start, dtype=torch.float32)
    train_generator(pipeline, out, phases=(SIZES,), share=share)


def pretrain_nine(out: Path, *, start: Path, share: float) -> None:
    """Train the tiny FLUX in `start` further, on 3×3 grids of 96 px alone; its texts have up to 160 tokens.

    Its prompts are written beside it, as train.jsonl, dev.jsonl and test.jsonl.
    """
    out.mkdir(parents=True, exist_ok=True)
    for split, count in COUNTS.items():
        save_prompts(characters.character_prompts(split, count, grid=NINE.grid), out / f"{split}.jsonl")
    pipeline = FluxPipeline.from_pretrained(start, dtype=torch.float32)
    train_generator(pipeline, out, phases=(NINE,), share=share)


def train_generator(pipeline: FluxPipeline, out: Path, *, phases: Sequence[TrainingPhase], share: float) -> None:
    """Train all but the autoencoder; a stopped training goes on from `out`/state.pt, to the same weights."""
    out.mkdir(parents=True, exist_ok=True)
    # The autoencoder has no attention: a grid's latents are its panels' latents, and each panel is encoded once.
    sizes = sorted({size for phase in phases for size in phase.shares})
    latents = {size: panel_latents(pipeline.vae, size) for size in sizes}
    index = {panel: number for number, panel in enumerate(characters.all_panels())}
    modules = [pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]
    done = 0
    for phase in phases:
        steps = round(share * phase.steps)
        stage = Stage(modules, lr=phase.lr, steps=steps, log=out / "log.jsonl", ema=phase.ema)
        stage.resume(out / STATE, first=done)
        while stage.step < steps:
            rng = seeded(done + stage.step)
            (size,) = rng.choices(list(phase.shares), list(phase.shares.values()))
            teacher = imperfect_sets(rng, redraw=phase.redraw, grid=phase.grid)
            batch = BATCH[size] * GRID.count // phase.grid.count
            texts, sets = zip(*islice(teacher, batch), strict=True)
            rows = torch.tensor([[index[panel] for panel in panels] for panels in sets])
            clean = pack(tile(latents[size][rows], phase.grid))
            loss = generator_loss(pipeline, texts, clean, length=phase.length)
            stage.update(loss, **{f"loss_{phase.grid.cols * size}px": loss.item()})
            # A training takes more than an hour: an interruption must not lose it all.
            if stage.step % 100 == 0:
                stage.save(out / STATE, first=done)
        stage.use_average()
        done += steps
    publish(pipeline.to(torch.float16), out)
    (out / STATE).unlink(missing_ok=True)


def seeded(step: int) -> Random:
    """Seed torch and a generator of teachers by the step, so that a resumed training draws what it would have drawn."""
    torch.manual_seed(step)
    return Random(step)


def generator_loss(pipeline: FluxPipeline, texts: Sequence[str], clean_BNC: Tensor, *, length: int = LENGTH) -> Tensor:
    """Compute the flow matching loss of whole grids, text encoders included.

    The model attends to padding, so that inference must use the `length` and the guidance of training.
    """
    batch, tokens, _ = clean_BNC.shape
    side = math.isqrt(tokens)

    def read(tokenizer: Any, max_length: int) -> Tensor:
        options = {"padding": "max_length", "max_length": max_length, "truncation": True, "return_tensors": "pt"}
        ids: Tensor = tokenizer(list(texts), **options).input_ids
        return ids

    def velocity(noisy_BNC: Tensor, t_B: Tensor) -> Tensor:
        predicted: Tensor = pipeline.transformer(
            hidden_states=noisy_BNC,
            timestep=t_B,
            guidance=torch.full((batch,), TRAINED_WITH["guidance_scale"]),
            pooled_projections=pipeline.text_encoder(read(pipeline.tokenizer, 77)).pooler_output,
            encoder_hidden_states=pipeline.text_encoder_2(read(pipeline.tokenizer_2, length))[0],
            txt_ids=torch.zeros(length, 3),
            img_ids=pipeline._prepare_latent_image_ids(batch, side, side, "cpu", torch.float32),
            return_dict=False,
        )[0]
        return predicted

    # The same noise hides less of a larger image (arXiv 2403.03206, section 5.3.2): larger grids get more of it.
    return flow_matching_loss(velocity, clean_BNC, shift=1.5 * side / 8)


def flow_matching_loss(velocity: Callable[[Tensor, Tensor], Tensor], clean_BNC: Tensor, *, shift: float) -> Tensor:
    """Compute the mean squared error of `velocity` (noisy latents, times) at times that favour noise."""
    batch = len(clean_BNC)
    # Half logit-normal, half uniform, then shifted towards noise, where an image's content is decided.
    t = torch.where(torch.rand(batch) < 0.5, torch.rand(batch), torch.sigmoid(torch.randn(batch)))
    t = shift * t / (1 + (shift - 1) * t)
    noise = torch.randn_like(clean_BNC)
    return F.mse_loss(velocity(torch.lerp(clean_BNC, noise, t[:, None, None]), t), noise - clean_BNC)


# --- the editor ------------------------------------------------------------------------------------------------

PIXELS = 32
"""Sides of sources and edits: a panel of a 64-pixel grid."""
COUNTS: dict[Split, int] = {"train": 288, "dev": 48, "test": 96}


def draw_edits(out: Path) -> list[Path]:
    """Write the world's edits for training, development and test as `{split}.jsonl`, with their sources."""
    paths = []
    for split, count in COUNTS.items():
        edits = character_edits(split, count)
        paths.append(write_edits(out, edits, name=split, pixels=PIXELS))
    return paths


class EditPhase(NamedTuple):
    """One phase of the editor's training."""

    steps: int
    spoil: float  # probability that the teacher redraws an attribute that should stay
    ignore: float = 0.0  # probability that it leaves the attribute that should change


FAULTLESS = EditPhase(steps=1200, spoil=0.0)
"""After it the editor makes every held-out edit without a fault, so that RL could not improve it."""
UNRELIABLE = EditPhase(steps=600, spoil=0.35, ignore=0.08)


def taught_edits(rng: Random, phase: EditPhase) -> Iterator[tuple[Edit, Panel]]:
    """Yield edits of training characters without end, and the teacher's result of each."""
    pool = characters.panels_of("train")
    while True:
        # The edited panel, unless the teacher ignores the instruction.
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        start = edit.before if rng.random() < phase.ignore else edit.after

        spoilt = {}
        for name in edit.others:
            if rng.random() < phase.spoil:
                spoilt[name] = rng.choice(VALUES[name])

        yield edit, replace(start, **spoilt)


class HeroPhase(NamedTuple):
    """One phase of the training with reference images."""

    steps: int
    redraw: float  # probability that the teacher redraws a trait of the hero
    paste: float = 0.0  # probability that it copies a reference


FAITHFUL = HeroPhase(steps=1200, redraw=0.0)
"""First a faultless teacher: the editor learns where to look."""
UNFAITHFUL = HeroPhase(steps=200, redraw=0.2, paste=0.15)
"""Then an unreliable one, so that reinforcement learning can raise identity and must not paste."""
RECALLED = UNRELIABLE._replace(spoil=0.3, ignore=0.04)
HEROES = 24
EDITS_KEPT = 8
"""Heroes and edits of a step; the edits keep what the editor was able to do. The steady editor has it the other way."""
STEADY_STEPS = 600
STEADY_RANK = 16


class EditorLessons:
    """Examples of heroes from stitched references, and of edits, for a tiny Kontext.

    Text encoders and VAE are frozen, so every text and panel is encoded once. References are shrunk once to the cell
    that three of them have, and stitched as the policy does.
    """

    def __init__(self, policy: PipelinePolicy) -> None:
        self.policy = policy
        self.size = Size(PIXELS, PIXELS)
        panels = characters.all_panels()
        self.index = {panel: number for number, panel in enumerate(panels)}
        words = [*INSTRUCTIONS, *sorted({panel.scene_text for panel in panels})]
        with torch.no_grad():
            self.texts = dict(zip(words, policy.encoded_texts(words), strict=True))
        self.tokens = pack(panel_latents(policy.pipeline.vae, PIXELS))
        cell = Size(PIXELS // 2, PIXELS // 2)
        self.cells = {panel: stitch([characters.draw(panel, 2 * PIXELS)], cell) for panel in panels}

    def loss(self, rng: Random, *, heroes: HeroPhase, edits: EditPhase, counts: tuple[int, int]) -> Tensor:
        """Compute the flow matching loss of newly drawn examples.

        Args:
            heroes: teacher of heroes.
            edits: teacher of edits.
            counts: number of heroes and of edits.
        """
        teacher = taught_heroes(rng, redraw=heroes.redraw, paste=heroes.paste)
        tasks, drawn = zip(*islice(teacher, counts[0]), strict=True)
        asked, edited = zip(*islice(taught_edits(rng, edits), counts[1]), strict=True)

        # The images that the editor is shown.
        stitched = []
        for task in tasks:
            stitched.append(stitch([self.cells[panel] for panel in task.references], self.size))
        with torch.no_grad():
            references = self.policy.encode_pixels(self.policy.pipeline.image_processor.preprocess(stitched))
        sources = torch.cat([references, self.tokens[[self.index[edit.before] for edit in asked]]])

        # The texts.
        read = {}
        texts = [*(task.text for task in tasks), *(edit.instruction for edit in asked)]
        for name in ("tokens", "pooled"):
            read[name] = torch.cat([self.texts[text][name] for text in texts])

        conditioning = Conditioning({**read, "source": sources})
        velocity = partial(self.policy.velocity, conditioning=conditioning, size=self.size)
        clean = self.tokens[[self.index[panel] for panel in (*drawn, *edited)]]
        # Who the hero is is decided in much noise.
        return flow_matching_loss(velocity, clean, shift=3.0)


def pretrain_references(out: Path, *, start: Path, share: float) -> None:
    """Train the tiny Kontext in `start` further, on heroes from stitched references among edits.

    A stopped training goes on from `out`/state.pt, to the same weights.
    """
    out.mkdir(parents=True, exist_ok=True)
    policy = KONTEXT.from_pretrained(start, dtype="float32", **TRAINED_WITH)
    transformer = policy.pipeline.transformer
    transformer.requires_grad_(True).train()  # the policy froze it
    lessons = EditorLessons(policy)

    done = 0
    for phase in (FAITHFUL, UNFAITHFUL):
        steps = round(share * phase.steps)
        stage = Stage([transformer], lr=1.5e-3, steps=steps, log=out / "log.jsonl", ema=0.99)
        stage.resume(out / STATE, first=done)
        while stage.step < steps:
            rng = seeded(done + stage.step)
            stage.update(lessons.loss(rng, heroes=phase, edits=RECALLED, counts=(HEROES, EDITS_KEPT)))
            if stage.step % 100 == 0:
                stage.save(out / STATE, first=done)
        stage.use_average()
        done += steps
    publish(policy.pipeline.to(torch.float16), out)
    (out / STATE).unlink(missing_ok=True)


def pretrain_steady(out: Path, *, start: Path, share: float) -> None:
    """Train a LoRA of the tiny Kontext in `start` with faultless teachers, so that it keeps what is not to change."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    policy = KONTEXT.from_pretrained(start, dtype="float32", **TRAINED_WITH)
    transformer = policy.pipeline.transformer
    targets = policy.lora_targets
    add_lora(transformer, rank=STEADY_RANK, alpha=STEADY_RANK, targets=targets)
    lessons = EditorLessons(policy)

    steps = round(share * STEADY_STEPS)
    stage = Stage([transformer], lr=3e-3, steps=steps, log=out / "log.jsonl", ema=0.99)
    while stage.step < steps:
        stage.update(lessons.loss(seeded(stage.step), heroes=FAITHFUL, edits=FAULTLESS, counts=(EDITS_KEPT, HEROES)))
    stage.use_average()
    state = {name: value.half() for name, value in adapter_state(transformer).items()}
    save_lora(out, state, rank=STEADY_RANK, alpha=STEADY_RANK, targets=targets)


def pretrain_kontext(out: Path, *, start: Path, share: float) -> None:
    """Train a tiny Kontext by flow matching, from the tiny FLUX in `start`; `share` scales the steps."""
    torch.manual_seed(0)
    rng = Random(0)
    out.mkdir(parents=True, exist_ok=True)
    pipeline = tiny_kontext(FluxPipeline.from_pretrained(start, dtype=torch.float32))
    policy = KONTEXT.over(pipeline, **TRAINED_WITH)
    pipeline.transformer.requires_grad_(True).train()  # `over` froze it
    # Text encoders and VAE are frozen, so every text and panel is encoded once.
    with torch.no_grad():
        texts = dict(zip(INSTRUCTIONS, policy.encoded_texts(INSTRUCTIONS), strict=True))
    tokens = pack(panel_latents(pipeline.vae, PIXELS))
    index = {panel: number for number, panel in enumerate(characters.all_panels())}
    for phase in (FAULTLESS, UNRELIABLE):
        steps = round(share * phase.steps)
        teacher = taught_edits(rng, phase)
        stage = Stage([pipeline.transformer], lr=1.5e-3, steps=steps, log=out / "log.jsonl", ema=0.998)
        while stage.step < steps:
            # The texts of the instructions, the latents of the sources, and the teacher's results.
            edits, panels = zip(*(next(teacher) for _ in range(32)), strict=True)

            read = {}
            for name in ("tokens", "pooled"):
                read[name] = torch.cat([texts[edit.instruction][name] for edit in edits])

            conditioning = Conditioning({**read, "source": tokens[[index[edit.before] for edit in edits]]})
            velocity = partial(policy.velocity, conditioning=conditioning, size=Size(PIXELS, PIXELS))
            clean = tokens[[index[panel] for panel in panels]]
            stage.update(flow_matching_loss(velocity, clean, shift=1.5))
            if stage.step % 300 == 0:
                stage.save_average(pipeline, out)
        stage.use_average()
    publish(pipeline.to(torch.float16), out)
