"""Makes the tiny judge: `python -m tools.tiny judge`.

It learns the questions of `core.questions` on drawn panels, their VAE reconstructions, and negatives. An answer is Yes
or No and then its reasons, which name what is equal or differs: they teach a judge from scratch what to look at.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLForConditionalGeneration

from pacorl import twins as tiny
from pacorl.core import questions
from pacorl.data import characters
from pacorl.data.characters import KEPT, VALUES, Panel, Split
from pacorl.io.processor import load_processor
from tools.tiny.negatives import draw_negatives, to_images
from tools.tiny.pretrain import GRID, PANEL_SIZES, Stage, encode_panels, panel_pixels, publish, tile

if TYPE_CHECKING:
    from diffusers import AutoencoderKL
    from PIL import Image

SUBTLE = "shape"
"""The kept attribute that is hardest to tell apart: more pairs differ in it alone."""
CAPTIONS = (0.8, 0.05)
"""Share of plain descriptions in the first fifth of a training from scratch, and after it."""
CAPTIONS_AFTERWARDS = 0.03
CAPTION_REQUEST = "What does this image show?"
CRITERION_OF = {"colour": "Colour", "shape": "Shape", "hat": "Hat", "palette": "Palette"}
CRITERIA = {name: text for dimension in characters.CRITERIA.values() for name, text in dimension.items()}


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A question about one or two pictures (indices into a `ImageBank`) and its answer."""

    images: tuple[int, ...]
    question: str
    answer: str
    words: tuple[tuple[str, bool], ...] = ()
    """The attribute values that the question quotes, in order, and whether the picture shows them."""

    @property
    def yes(self) -> bool:
        return self.answer.startswith("Yes")

    @property
    def decides(self) -> bool:
        return self.question != CAPTION_REQUEST


class ImageBank:
    """Pictures as the image processor hands them to the judge, each prepared once.

    Panels come drawn and reconstructed, at both sizes; the rest is negatives.
    """

    def __init__(self, image_processor: Any, *, vae: AutoencoderKL, negatives: Sequence[Image.Image]) -> None:
        self.panels = characters.all_panels()
        sheets = [pixels for size in PANEL_SIZES for pixels in (panel_pixels(size), _reconstructed(vae, size))]
        pictures = [picture for pixels in sheets for picture in to_images(pixels)]
        self.versions, self.negative_count = len(sheets), len(negatives)
        prepared = [
            image_processor(images=list(part), return_tensors="pt")["pixel_values"].half()
            for part in _chunks([*pictures, *negatives], 256)
        ]
        self.patches = torch.cat(prepared).unflatten(0, (len(pictures) + len(negatives), -1))

    def of(self, number: int, rng: random.Random) -> int:
        """One of the pictures of panel `number`."""
        return number + len(self.panels) * rng.randrange(self.versions)

    def of_negative(self, rng: random.Random) -> int:
        return len(self.panels) * self.versions + rng.randrange(self.negative_count)


def training_examples(
    bank: ImageBank, *, split: Split, rng: random.Random, captions: float
) -> Iterator[TrainingExample]:
    """Endless examples about the characters of one split; of those that decide, half with the answer Yes.

    `captions` is the share of plain descriptions: without them a judge never learns to see more than colours.
    """
    number = {panel: index for index, panel in enumerate(bank.panels)}
    pool = [panel for panel in bank.panels if characters.split_of(panel) == split]
    kinds: list[Callable[..., TrainingExample]] = [_pair_example, _text_example, _criterion_example]
    while True:
        kind = _caption_example if rng.random() < captions else rng.choices(kinds, weights=(3, 4, 1.5))[0]
        yield kind(rng.choice(pool), pool, rng, bank, number)


def _caption_example(
    panel: Panel, pool: list[Panel], rng: random.Random, bank: ImageBank, number: Any
) -> TrainingExample:
    if rng.random() < 0.05:
        return TrainingExample((bank.of_negative(rng),), CAPTION_REQUEST, "It shows nothing.")
    return TrainingExample((bank.of(number[panel], rng),), CAPTION_REQUEST, f"It shows {panel.text}.")


def _pair_example(first: Panel, pool: list[Panel], rng: random.Random, bank: ImageBank, number: Any) -> TrainingExample:
    # What the reward's question quotes: a prompt's text before its first panel.
    theme = f"{GRID} grid layout of {rng.choice([first, first, rng.choice(pool)]).subject}."
    question = questions.consistent() if rng.random() < 0.15 else questions.same_theme(theme)
    draw = rng.random()
    if draw < 0.14:
        return _negative_pair(first, question, rng, bank, number)
    second = _new_scene(first, rng)
    if draw < 0.57:
        reason = f"Yes. Both show {first.subject}."
    else:
        second = changed(second, KEPT, rng.choices((1, 2, 3), weights=(3, 3, 2))[0], rng)
        if rng.random() < 0.35:
            second = changed(_new_scene(first, rng), (SUBTLE,), 1, rng)
        if rng.random() < 0.15:
            second = rng.choice(pool)
        if second.kept == first.kept:
            second = changed(second, KEPT, 1, rng)
        reason = f"No. {_differences(first, second)}"
    return TrainingExample((bank.of(number[first], rng), bank.of(number[second], rng)), question, reason)


def _negative_pair(first: Panel, question: str, rng: random.Random, bank: ImageBank, number: Any) -> TrainingExample:
    good, bad = bank.of(number[first], rng), bank.of_negative(rng)
    pictures, which = rng.choice(
        [((bad, bad), "Both show"), ((bad, bank.of_negative(rng)), "Both show"),
         ((good, bad), "The second shows"), ((bad, good), "The first shows")]
    )  # fmt: skip
    return TrainingExample(pictures, question, f"No. {which} nothing.")


def _text_example(panel: Panel, pool: list[Panel], rng: random.Random, bank: ImageBank, number: Any) -> TrainingExample:
    picture, draw = bank.of(number[panel], rng), rng.random()
    if draw < 0.12:
        words = tuple((value, False) for value in _values(panel))
        return TrainingExample(
            (bank.of_negative(rng),), questions.shows_text(panel.text), "No. It shows nothing.", words
        )
    if draw < 0.55:
        words = tuple((value, True) for value in _values(panel))
        return TrainingExample((picture,), questions.shows_text(panel.text), f"Yes. It shows {panel.text}.", words)
    said = changed(panel, tuple(VALUES), rng.choices((1, 2, 3, 6), weights=(6, 2, 1, 2))[0], rng)
    wrong = " ".join(
        f"The {name} is {getattr(panel, name)}." for name in VALUES if getattr(said, name) != getattr(panel, name)
    )
    words = tuple((value, value == seen) for value, seen in zip(_values(said), _values(panel), strict=True))
    return TrainingExample((picture,), questions.shows_text(said.text), f"No. {wrong}", words)


def _values(panel: Panel) -> list[str]:
    """Its attribute values, in the order in which its text names them."""
    return [getattr(panel, name) for name in VALUES]


def _criterion_example(
    first: Panel, pool: list[Panel], rng: random.Random, bank: ImageBank, number: Any
) -> TrainingExample:
    name = rng.choice(KEPT)
    question = questions.meets_criterion(CRITERIA[CRITERION_OF[name]])
    if rng.random() < 0.1:
        return _negative_pair(first, question, rng, bank, number)
    second = _new_scene(first, rng)
    others = tuple(other for other in KEPT if other != name)
    second = changed(second, others, rng.randrange(len(others) + 1), rng)
    if rng.random() < 0.5:
        second = changed(second, (name,), 1, rng)
    value, other = getattr(first, name), getattr(second, name)
    reason = f"Yes. Both {name}s are {value}." if value == other else f"No. {_differences(first, second, (name,))}"
    return TrainingExample((bank.of(number[first], rng), bank.of(number[second], rng)), question, reason)


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


@torch.no_grad()
def _reconstructed(vae: AutoencoderKL, size: int) -> Tensor:
    codes = encode_panels(vae, panel_pixels(size))
    sheets = tile(codes.unflatten(0, (-1, 4)))
    painted = torch.cat([vae.decode(part).sample for part in sheets.split(16)])
    return painted.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, size, size)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


# --- training --------------------------------------------------------------------------------------------------

Teach = Callable[..., Iterator[TrainingExample]]
"""Makes endless examples, as `examples` does."""


def vocabulary(bank: ImageBank, teach: Teach = training_examples) -> list[str]:
    """What the tokenizer reads: examples in the chat template, so that every word is one token or two."""
    rng = random.Random(0)
    stream = teach(bank, split="train", rng=rng, captions=0.2)
    return [f"{example.question}\n{example.answer}" for example, _ in zip(stream, range(3000), strict=False)]


def pretrain_judge(
    out: Path,
    *,
    vae: AutoencoderKL,
    teach: Teach = training_examples,
    start: Path | None = None,
    negatives: Sequence[Image.Image] = (),
    share: float = 1.0,
    steps: int = 5000,
    batch: int = 32,
    lr: float = 1.5e-3,
    alpha: float = 0.5,
    seed: int = 0,
) -> tuple[Any, Any]:
    """Trains the tiny judge on the examples of `teach`, from scratch or on from the checkpoint `start`.

    `negatives` adds images of one's own, such as a policy's failures; `share` scales the number of steps, for a quick
    try.
    """
    steps = round(share * steps)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    out.mkdir(parents=True, exist_ok=True)
    model, processor, bank = _begin(
        start, vae=vae, negatives=[*draw_negatives(3000, seed=seed, vae=vae), *negatives], teach=teach
    )
    shares = CAPTIONS if start is None else (CAPTIONS_AFTERWARDS,) * 2
    streams = [teach(bank, split="train", rng=rng, captions=captions) for captions in shares]
    stage = Stage([model], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.995)
    yes, no = (processor.tokenizer.convert_tokens_to_ids(word) for word in ("Yes", "No"))
    right = {pictures: deque[bool](maxlen=1000) for pictures in (1, 2)}
    while stage.step < steps:
        part = [next(streams[stage.step > steps / 5]) for _ in range(batch)]
        loss, said_yes = _loss(model, collate(part, bank, processor), part, yes=yes, no=no, alpha=alpha)
        for example, answer in zip(part, said_yes, strict=True):
            if example.decides:
                right[len(example.images)].append(answer == example.yes)
        stage.update(
            loss,
            **{name: sum(right[count]) / max(1, len(right[count])) for count, name in ((2, "pairs"), (1, "texts"))},
        )
    stage.use_average()
    publish(model.half(), out)
    processor.save_pretrained(out)
    return model, processor


def _share(right: Sequence[bool]) -> float:
    return sum(right) / max(1, len(right))


def _begin(
    start: Path | None, *, vae: AutoencoderKL, negatives: Sequence[Image.Image], teach: Teach
) -> tuple[Any, Any, ImageBank]:
    """Model, processor and pictures: new ones, or those of a checkpoint."""
    if start is not None:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        model.config.dtype = model.config.text_config.dtype = None  # it is stored in another
        processor = load_processor(start)
        return model, processor, ImageBank(processor.image_processor, vae=vae, negatives=negatives)
    # The tokenizer needs the examples' words and the bank needs an image processor: a first judge lends its own.
    bank = ImageBank(tiny.tiny_judge(["Yes. No."])[1].image_processor, vae=vae, negatives=negatives)
    return *tiny.tiny_judge([*vocabulary(bank, teach), "You are a helpful assistant.\nuser\nassistant\n"] * 2), bank


@dataclass(frozen=True, slots=True)
class Collated:
    """A batch of examples."""

    inputs: dict[str, Tensor]
    """Right-padded, as the model takes them."""
    answers: Tensor
    """(batch, length): where the answers' tokens are, the end token included."""
    words: Tensor
    """(words, 2): row and place of each quoted value's last token."""


def _loss(
    model: Any, batch: Collated, part: Sequence[TrainingExample], *, yes: int, no: int, alpha: float
) -> tuple[Tensor, list[bool]]:
    """The loss of a batch of examples, and whether each was answered Yes.

    An example's loss is α of its decision and 1 − α of its reasons. One more term teaches to read: below the last
    layer, each quoted word is to say by itself whether the image shows it, so that the last layer only has to collect.
    From whole texts alone, a judge of this size does not find out that six words are to be compared.
    """
    output = model(**batch.inputs, output_hidden_states=True)
    logits = output.logits[:, :-1]
    labels, answers = batch.inputs["input_ids"][:, 1:], batch.answers[:, 1:]
    loss_per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    decides = torch.tensor([example.decides for example in part])
    first = answers & (answers.cumsum(1) == 1)
    rest = answers & ~(first & decides[:, None])
    reasons = (loss_per_token * rest).sum(1) / rest.sum(1)
    loss = torch.where(decides, alpha * loss_per_token[first] + (1 - alpha) * reasons, reasons).mean()
    if len(batch.words):
        hidden = model.model.language_model.norm(output.hidden_states[-2][tuple(batch.words.T)])
        fits = torch.tensor([fit for example in part for _, fit in example.words])
        loss = loss + F.cross_entropy(model.lm_head(hidden)[:, [no, yes]], fits.long())
    return loss, (logits[first][:, yes] > logits[first][:, no]).tolist()


def collate(part: Sequence[TrainingExample], bank: ImageBank, processor: Any) -> Collated:
    """Examples → what the model takes."""
    prompts, places = zip(*(_chat(example, processor) for example in part), strict=True)
    answers = [processor.tokenizer(f"{example.answer}<|im_end|>").input_ids for example in part]
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(part), length), processor.tokenizer.pad_token_id)
    attended, answered = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attended[row, :end] = 1
        answered[row, len(prompt) : end] = True
    pictures = [index for example in part for index in example.images]
    inputs = {
        "input_ids": ids,
        "attention_mask": attended,
        "pixel_values": bank.patches[pictures].flatten(0, 1).float(),
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(len(pictures), 1),
        "mm_token_type_ids": (ids == processor.image_token_id).int(),
    }
    words = [(row, place) for row, several in enumerate(places) for place in several]
    return Collated(inputs, answered, torch.tensor(words, dtype=torch.long).view(-1, 2))


def _chat(example: TrainingExample, processor: Any) -> tuple[list[int], list[int]]:
    """An example's prompt in tokens, and where each of its words ends."""
    content = [*({"type": "image"} for _ in example.images), {"type": "text", "text": example.question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    ).replace("<|image_pad|>", "<|image_pad|>" * 4)
    tokens = processor.tokenizer(text, return_offsets_mapping=True)
    places, end = [], text.index('"') if example.words else 0
    for word, _ in example.words:
        end = text.index(word, end) + len(word)
        places.append(next(place for place, (_, stop) in enumerate(tokens.offset_mapping) if stop >= end))
    return list(tokens.input_ids), places
