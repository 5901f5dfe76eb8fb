"""Makes the tiny judge: `pacorl tiny judge`.

It learns the questions of `core.questions` on drawn panels, their VAE reconstructions, and junk. An answer is Yes or
No and then its reasons, which name what is equal or differs: they teach a judge from scratch what to look at.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageFilter
from torch import Tensor
from torch.nn import functional as F

from pacorl.core import questions
from pacorl.data import characters
from pacorl.data.characters import KEPT, VALUES, Panel, Split
from pacorl.models import tiny
from pacorl.train.pretrain import GRID, PANEL_SIZES, Stage, encode_panels, panel_pixels, publish, tile

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

CAPTION_REQUEST = "What does this image show?"
CRITERION_OF = {"colour": "Colour", "shape": "Shape", "hat": "Hat", "palette": "Palette"}
CRITERIA = {name: text for dimension in characters.CRITERIA.values() for name, text in dimension.items()}


@dataclass(frozen=True, slots=True)
class Lesson:
    """A question about one or two pictures (indices into a `PictureBank`) and its answer."""

    pictures: tuple[int, ...]
    question: str
    answer: str

    @property
    def yes(self) -> bool:
        return self.answer.startswith("Yes")

    @property
    def decides(self) -> bool:
        return self.question != CAPTION_REQUEST


class PictureBank:
    """Pictures as the image processor hands them to the judge, each prepared once.

    Panels come drawn and reconstructed, at both sizes; the rest is junk.
    """

    def __init__(self, image_processor: Any, *, vae: AutoencoderKL, junk: Sequence[Image.Image]) -> None:
        self.panels = characters.all_panels()
        sheets = [pixels for size in PANEL_SIZES for pixels in (panel_pixels(size), _reconstructed(vae, size))]
        pictures = [picture for pixels in sheets for picture in _to_images(pixels)]
        self.versions, self.junk_count = len(sheets), len(junk)
        prepared = [
            image_processor(images=list(part), return_tensors="pt")["pixel_values"].half()
            for part in _chunks([*pictures, *junk], 256)
        ]
        self.patches = torch.cat(prepared).unflatten(0, (len(pictures) + len(junk), -1))

    def of(self, number: int, rng: random.Random) -> int:
        """One of the pictures of panel `number`."""
        return number + len(self.panels) * rng.randrange(self.versions)

    def of_junk(self, rng: random.Random) -> int:
        return len(self.panels) * self.versions + rng.randrange(self.junk_count)


def lessons(bank: PictureBank, *, split: Split, rng: random.Random, captions: float) -> Iterator[Lesson]:
    """Endless lessons about the characters of one split; of those that decide, half with the answer Yes.

    `captions` is the share of plain descriptions: without them a judge never learns to see more than colours.
    """
    number = {panel: index for index, panel in enumerate(bank.panels)}
    pool = [panel for panel in bank.panels if characters.split_of(panel) == split]
    kinds: list[Callable[..., Lesson]] = [_pair_lesson, _text_lesson, _word_lesson, _criterion_lesson]
    while True:
        kind = _caption_lesson if rng.random() < captions else rng.choices(kinds, weights=(3, 3, 3, 1.5))[0]
        yield kind(rng.choice(pool), pool, rng, bank, number)


def _caption_lesson(panel: Panel, pool: list[Panel], rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    if rng.random() < 0.05:
        return Lesson((bank.of_junk(rng),), CAPTION_REQUEST, "It shows nothing.")
    return Lesson((bank.of(number[panel], rng),), CAPTION_REQUEST, f"It shows {panel.text}.")


def _pair_lesson(first: Panel, pool: list[Panel], rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    # What the reward's question quotes: a prompt's text before its first panel.
    theme = f"{GRID} grid layout of {rng.choice([first, first, rng.choice(pool)]).subject}."
    question = questions.consistent() if rng.random() < 0.15 else questions.same_theme(theme)
    draw = rng.random()
    if draw < 0.14:
        return _junk_pair(first, question, rng, bank, number)
    second = _new_scene(first, rng)
    if draw < 0.57:
        reason = f"Yes. Both show {first.subject}."
    else:
        second = changed(second, KEPT, rng.choices((1, 2, 3), weights=(5, 3, 2))[0], rng)
        if rng.random() < 0.15:
            second = rng.choice(pool)
        if second.kept == first.kept:
            second = changed(second, KEPT, 1, rng)
        reason = f"No. {_differences(first, second)}"
    return Lesson((bank.of(number[first], rng), bank.of(number[second], rng)), question, reason)


def _junk_pair(first: Panel, question: str, rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    good, bad = bank.of(number[first], rng), bank.of_junk(rng)
    pictures, which = rng.choice(
        [((bad, bad), "Both show"), ((bad, bank.of_junk(rng)), "Both show"),
         ((good, bad), "The second shows"), ((bad, good), "The first shows")]
    )  # fmt: skip
    return Lesson(pictures, question, f"No. {which} nothing.")


def _text_lesson(panel: Panel, pool: list[Panel], rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    picture, draw = bank.of(number[panel], rng), rng.random()
    if draw < 0.12:
        return Lesson((bank.of_junk(rng),), questions.shows_text(panel.text), "No. It shows nothing.")
    if draw < 0.55:
        return Lesson((picture,), questions.shows_text(panel.text), f"Yes. It shows {panel.text}.")
    said = changed(panel, tuple(VALUES), rng.choices((1, 2, 3, 6), weights=(6, 2, 1, 2))[0], rng)
    wrong = " ".join(
        f"The {name} is {getattr(panel, name)}." for name in VALUES if getattr(said, name) != getattr(panel, name)
    )
    return Lesson((picture,), questions.shows_text(said.text), f"No. {wrong}")


def _word_lesson(panel: Panel, pool: list[Panel], rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    """One attribute alone: the first step towards a whole text."""
    name = rng.choice(tuple(VALUES))
    said = panel if rng.random() < 0.5 else changed(panel, (name,), 1, rng)
    wanted, seen = getattr(said, name), getattr(panel, name)
    answer = f"Yes. The {name} is {seen}." if wanted == seen else f"No. The {name} is {seen}."
    return Lesson((bank.of(number[panel], rng),), questions.shows_text(wanted), answer)


def _criterion_lesson(first: Panel, pool: list[Panel], rng: random.Random, bank: PictureBank, number: Any) -> Lesson:
    name = rng.choice(KEPT)
    question = questions.meets_criterion(CRITERIA[CRITERION_OF[name]])
    if rng.random() < 0.1:
        return _junk_pair(first, question, rng, bank, number)
    second = _new_scene(first, rng)
    others = tuple(other for other in KEPT if other != name)
    second = changed(second, others, rng.randrange(len(others) + 1), rng)
    if rng.random() < 0.5:
        second = changed(second, (name,), 1, rng)
    value, other = getattr(first, name), getattr(second, name)
    reason = f"Yes. Both {name}s are {value}." if value == other else f"No. {_differences(first, second, (name,))}"
    return Lesson((bank.of(number[first], rng), bank.of(number[second], rng)), question, reason)


def _new_scene(panel: Panel, rng: random.Random) -> Panel:
    pose, prop = rng.choice(characters.SCENES)
    return replace(panel, pose=pose, prop=prop)


def changed(panel: Panel, names: Sequence[str], count: int, rng: random.Random) -> Panel:
    chosen = rng.sample(list(names), count)
    return replace(
        panel,
        **{name: rng.choice([value for value in VALUES[name] if value != getattr(panel, name)]) for name in chosen},
    )


def _differences(first: Panel, second: Panel, names: Sequence[str] = KEPT) -> str:
    return " ".join(
        f"The {name} differs: {getattr(first, name)} and {getattr(second, name)}."
        for name in names
        if getattr(first, name) != getattr(second, name)
    )


# --- pictures --------------------------------------------------------------------------------------------------


def draw_junk(count: int, *, seed: int, vae: AutoencoderKL) -> list[Image.Image]:
    """Pictures that show nothing: noise, flat and dark fields, blurs, shuffles, half-denoised latents."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    makers = [_noise, _flat, _dark, _soft_noise, _blurred, _shuffled, _blended]
    junk = [rng.choice(makers)(rng, noise) for _ in range(count * 2 // 3)]
    panels = [
        characters.draw(rng.choice(characters.all_panels()), rng.choice(PANEL_SIZES)) for _ in range(count - len(junk))
    ]
    return junk + [_half_denoised(panel, vae, rng) for panel in panels]


def _size(rng: random.Random) -> int:
    return rng.choice(PANEL_SIZES)


def _noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    size = _size(rng)
    mean, std = noise.uniform(0, 255, 3), noise.uniform(5, 120)
    return _image(noise.normal(mean, std, (size, size, 3)))


def _flat(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    size = _size(rng)
    start, end = noise.uniform(0, 255, 3), noise.uniform(0, 255, 3)
    ramp = np.linspace(0, rng.choice([0, 0, 1]), size)[:, None, None]
    return _image(np.broadcast_to(start + (end - start) * ramp, (size, size, 3)))


def _dark(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    panel = np.asarray(characters.draw(rng.choice(characters.all_panels()), _size(rng)), dtype=float)
    return _image(panel * noise.uniform(0, 0.25) + noise.normal(0, noise.uniform(0, 12), panel.shape))


def _soft_noise(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    cells = rng.choice((2, 3, 4, 6, 8))
    return _image(noise.uniform(0, 255, (cells, cells, 3))).resize((_size(rng),) * 2, Image.Resampling.BICUBIC)


def _blurred(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    panel = characters.draw(rng.choice(characters.all_panels()), 64).filter(
        ImageFilter.GaussianBlur(rng.uniform(7, 16))
    )
    return panel.resize((_size(rng),) * 2)


def _shuffled(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    pixels = np.asarray(characters.draw(rng.choice(characters.all_panels()), _size(rng)))
    side = rng.choice((4, 8))
    blocks = [row for strip in np.split(pixels, side) for row in np.split(strip, side, axis=1)]
    rng.shuffle(blocks)
    return _image(np.concatenate([np.concatenate(blocks[i * side : (i + 1) * side], axis=1) for i in range(side)]))


def _blended(rng: random.Random, noise: np.random.Generator) -> Image.Image:
    several = [np.asarray(characters.draw(panel, 64), dtype=float) for panel in rng.sample(characters.all_panels(), 5)]
    return _image(np.mean(several, axis=0)).resize((_size(rng),) * 2)


@torch.no_grad()
def _half_denoised(panel: Image.Image, vae: AutoencoderKL, rng: random.Random) -> Image.Image:
    """What a policy that lost its way paints: a latent that still holds much noise."""
    pixels = torch.from_numpy(np.asarray(panel).copy()).permute(2, 0, 1)[None].float() / 127.5 - 1
    clean = encode_panels(vae, pixels)
    noise = (
        torch.randn(clean.shape, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
        / vae.config.scaling_factor
    )
    noisy = torch.lerp(clean, noise, rng.uniform(0.45, 1.0)) * rng.uniform(0.6, 1.6)
    return next(_to_images(vae.decode(noisy).sample))


@torch.no_grad()
def _reconstructed(vae: AutoencoderKL, size: int) -> Tensor:
    codes = encode_panels(vae, panel_pixels(size))
    sheets = tile(codes.unflatten(0, (-1, 4)))
    painted = torch.cat([vae.decode(part).sample for part in sheets.split(16)])
    return painted.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, size, size)


def _to_images(pixels: Tensor) -> Iterator[Image.Image]:
    for picture in ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte():
        yield Image.fromarray(picture.permute(1, 2, 0).numpy())


def _image(pixels: Any) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).round().astype(np.uint8))


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- training --------------------------------------------------------------------------------------------------


def vocabulary(bank: PictureBank) -> list[str]:
    """What the tokenizer reads: lessons in the chat template, so that every word is one token or two."""
    rng = random.Random(0)
    stream = lessons(bank, split="train", rng=rng, captions=0.2)
    return [f"{lesson.question}\n{lesson.answer}" for lesson, _ in zip(stream, range(3000), strict=False)]


def pretrain_judge(
    out: Path,
    *,
    vae: AutoencoderKL,
    junk: Sequence[Image.Image] = (),
    share: float = 1.0,
    steps: int = 2400,
    batch: int = 32,
    lr: float = 1.5e-3,
    alpha: float = 0.5,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Trains the tiny judge; `junk` adds pictures of one's own, such as a policy's failures.

    `share` scales the number of steps, for a quick try.
    """
    steps = round(share * steps)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    # The tokenizer needs the lessons' words and the bank needs an image processor: a first judge lends its own.
    image_processor = tiny.tiny_judge(["Yes. No."])[1].image_processor
    bank = PictureBank(image_processor, vae=vae, junk=[*draw_junk(3000, seed=seed, vae=vae), *junk])
    model, processor = tiny.tiny_judge([*vocabulary(bank), "You are a helpful assistant.\nuser\nassistant\n"] * 2)
    streams = [lessons(bank, split="train", rng=rng, captions=captions) for captions in (0.8, 0.05)]
    stage = Stage([model], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.995)
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    right: list[bool] = []
    while stage.step < steps:
        part = [next(streams[stage.step > steps / 5]) for _ in range(batch)]
        inputs, answer_mask = collate(part, bank, processor)
        logits = model(**inputs).logits[:, :-1]
        labels, answers = inputs["input_ids"][:, 1:], answer_mask[:, 1:]
        loss_per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        decides = torch.tensor([lesson.decides for lesson in part])
        first = answers & (answers.cumsum(1) == 1)
        rest = answers & ~(first & decides[:, None])
        reasons = (loss_per_token * rest).sum(1) / rest.sum(1)
        decision = loss_per_token[first]
        loss = torch.where(decides, alpha * decision + (1 - alpha) * reasons, reasons).mean()
        said_yes = logits[first][:, yes] > logits[first][:, no]
        right = (right + [bool(a) == b.yes for a, b in zip(said_yes, part, strict=True) if b.decides])[-2000:]
        stage.update(loss, decision_accuracy=sum(right) / max(1, len(right)))
    stage.use_average()
    publish(model.half(), out)
    processor.save_pretrained(out)
    return model, processor


def collate(part: Sequence[Lesson], bank: PictureBank, processor: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Lessons → right-padded model inputs and the mask of their answers' tokens (the end token included)."""
    prompts = [_chat(lesson, processor) for lesson in part]
    answers = [processor.tokenizer(f"{lesson.answer}<|im_end|>").input_ids for lesson in part]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(part), length), processor.tokenizer.pad_token_id)
    attended, answered = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attended[row, :end] = 1
        answered[row, len(prompt) : end] = True
    pictures = [index for lesson in part for index in lesson.pictures]
    inputs = {
        "input_ids": ids,
        "attention_mask": attended,
        "pixel_values": bank.patches[pictures].flatten(0, 1).float(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(len(pictures), 1),
        "mm_token_type_ids": (ids == processor.image_token_id).int(),
    }
    return inputs, answered


def _chat(lesson: Lesson, processor: Any) -> list[int]:
    content = [*({"type": "image"} for _ in lesson.pictures), {"type": "text", "text": lesson.question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    return list(processor.tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 4)).input_ids)
