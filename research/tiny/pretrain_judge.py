"""Training of the tiny judge and the judge of edits: `python -m research.tiny judge|edit-judge`.

It learns the questions of `core.questions` on drawn panels, their VAE reconstructions, and negatives. An answer is Yes
or No and then its reasons, which name the equal or different attributes: they direct the attention of a judge that is
trained from scratch. A second lesson adds the questions about references, faulty panels and small ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import torch
from diffusers import AutoencoderKL
from PIL import Image
from tests.twins import parts as twins
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLForConditionalGeneration

from pacorl.core import questions
from pacorl.io.processor import load_processor
from pacorl.judge.prompting import chat_text
from pacorl.tiny import characters
from pacorl.tiny.characters import EDITS, KEPT, VALUES, Panel, Split, with_another
from pacorl.tiny.words import SCENE
from research.tiny.character_edits import Edit, draw_edit
from research.tiny.defects import LEGIBLE, SIZES, Defect, Mixed, by_kind, draw_defects, draw_mixed, worn
from research.tiny.negatives import draw_negatives, to_images
from research.tiny.pretrain import GRID, PANEL_SIZES, STATE, Stage, encode_panels, panel_pixels, publish, tile

SUBTLE = "shape"
"""The kept attribute with the least visible differences: more pairs differ in it alone."""
CAPTIONS = (0.8, 0.05)
"""Share of plain descriptions in the first fifth of a training from scratch, and after it."""
CAPTIONS_AFTERWARDS = 0.03
CAPTION_REQUEST = "What does this image show?"
CRITERIA = {name.lower(): text for dimension in characters.CRITERIA.values() for name, text in dimension.items()}
"""Kept attribute → its criterion."""
BATCH = 32
SAVED_EVERY = 100
"""Steps from one saved state to the next."""
DECISION_SHARE = 0.5
"""α: weight of the decision in an example's loss; the reasons weigh 1 − α."""


@dataclass(frozen=True, slots=True)
class TrainingExample:
    """A question about one or two images (indices into an `ImageBank`) and its answer."""

    images: tuple[int, ...]
    question: str
    answer: str
    words: tuple[tuple[str, bool], ...] = ()
    """The attribute values that the question quotes, in order, and whether the image shows them."""

    @property
    def yes(self) -> bool:
        return self.answer.startswith("Yes")

    @property
    def decides(self) -> bool:
        return self.question != CAPTION_REQUEST


class ImageBank:
    """Resized images as bytes: all panels, drawn and reconstructed, at several sizes, then negatives and faulty panels.

    Args:
        sizes: of the drawn panels; the LEGIBLE ones are reconstructed as well.
        faulty: the panels of `draw_mixed` and `draw_defects`; with them, the largest drawings are also shown `worn`.
    """

    def __init__(
        self,
        image_processor: Any,
        *,
        vae: AutoencoderKL,
        negatives: Sequence[Image.Image],
        sizes: Sequence[int] = PANEL_SIZES,
        faulty: Sequence[Mixed | Defect] = (),
    ) -> None:
        self.panels = characters.all_panels()
        self.number = {panel: number for number, panel in enumerate(self.panels)}

        # In the order that the methods count in.
        images: list[Image.Image] = []
        for size in sizes:
            images += to_images(panel_pixels(size))
            if size in LEGIBLE:
                images += to_images(_reconstructed(vae, size))
        if faulty:
            rng = Random(0)
            images += [worn(image, rng) for image in to_images(panel_pixels(sizes[-1]))]
        self.versions = len(images) // len(self.panels)
        images += negatives
        self.negative_count = len(negatives)
        self.faulty = {id(panel): len(images) + number for number, panel in enumerate(faulty)}
        images += [panel.image for panel in faulty]
        self.mixed, self.defects = by_kind(faulty)

        # A byte per value, and one of the two equal frames: 70,000 images take 0.2 GB.
        prepared = []
        for start in range(0, len(images), 256):
            batch = images[start : start + 256]
            inputs = image_processor(images=batch, do_rescale=False, do_normalize=False, return_tensors="pt")
            frames = inputs["pixel_values"].unflatten(-1, (3, 2, -1))[:, :, 0]
            prepared.append(frames.unflatten(0, (len(batch), -1)).round().byte())
        self.bytes_NPCV = torch.cat(prepared)
        self.mean_CV = 255 * torch.tensor(image_processor.image_mean)[:, None]
        self.std_CV = 255 * torch.tensor(image_processor.image_std)[:, None]

    def of(self, panel: Panel, rng: Random) -> int:
        """Draw one of the images of a panel, as an index."""
        return self.number[panel] + len(self.panels) * rng.randrange(self.versions)

    def of_negative(self, rng: Random) -> int:
        """Draw a negative, as an index."""
        return len(self.panels) * self.versions + rng.randrange(self.negative_count)

    def of_faulty(self, panel: Mixed | Defect) -> int:
        """Return the index of a faulty panel."""
        return self.faulty[id(panel)]

    def pixel_values(self, images: Sequence[int]) -> Tensor:
        """Return the patches of some images, as the processor prepares them: (16 times the images, values)."""
        frames = (self.bytes_NPCV[list(images)].flatten(0, 1) - self.mean_CV) / self.std_CV
        return frames[:, :, None].expand(-1, -1, 2, -1).flatten(1)


@torch.no_grad()
def _reconstructed(vae: AutoencoderKL, size: int) -> Tensor:
    """Reconstruct every panel by the VAE, four to a grid like policies: (5184, 3, size, size)."""
    grids = tile(encode_panels(vae, panel_pixels(size)).unflatten(0, (-1, 4)))
    decoded = torch.cat([vae.decode(batch).sample for batch in grids.split(16)])
    return decoded.unfold(2, size, size).unfold(3, size, size).permute(0, 2, 3, 1, 4, 5).reshape(-1, 3, size, size)


# --- examples --------------------------------------------------------------------------------------------------


def training_examples(bank: ImageBank, *, split: Split, rng: Random, captions: float) -> Iterator[TrainingExample]:
    """Yield examples about the characters of one split without end; half of the decisions are Yes.

    Args:
        captions: share of plain descriptions, without which a judge learns only colours.
    """
    pool = characters.panels_of(split)
    kinds = [_pair_example, _text_example, _criterion_example]
    while True:
        if rng.random() >= captions:
            kind = rng.choices(kinds, weights=(3, 4, 1.5))[0]
            yield kind(rng.choice(pool), pool, rng, bank)
            continue
        # A caption.
        panel = rng.choice(pool)
        if rng.random() < 0.05:
            yield TrainingExample((bank.of_negative(rng),), CAPTION_REQUEST, "It shows nothing.")
        else:
            yield TrainingExample((bank.of(panel, rng),), CAPTION_REQUEST, f"It shows {panel.text}.")


def _pair_example(first: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    # The reward's question quotes a prompt's text before its first panel.
    theme = f"{GRID} grid layout of {rng.choice([first, first, rng.choice(pool)]).subject}."
    question = questions.same_theme(theme)
    if rng.random() < 0.15:
        question = questions.consistent()

    draw = rng.random()
    if draw < 0.14:
        return _negative_pair(first, question, rng, bank)
    second = _new_scene(first, rng)
    if draw < 0.57:
        answer = f"Yes. Both show {first.subject}."
    else:
        # Few differences, and often in shape alone: with random panels, colours would be enough to be right.
        second = changed(second, KEPT, rng.choices((1, 2, 3), weights=(3, 3, 2))[0], rng)
        if rng.random() < 0.35:
            second = changed(_new_scene(first, rng), (SUBTLE,), 1, rng)
        if rng.random() < 0.15:
            second = rng.choice(pool)
        if second.kept == first.kept:
            second = changed(second, KEPT, 1, rng)
        answer = f"No. {differences(first, second)}"
    return TrainingExample((bank.of(first, rng), bank.of(second, rng)), question, answer)


def _negative_pair(first: Panel, question: str, rng: Random, bank: ImageBank) -> TrainingExample:
    good = bank.of(first, rng)
    bad = bank.of_negative(rng)
    images, subject = rng.choice(
        [((bad, bad), "Both show"), ((bad, bank.of_negative(rng)), "Both show"),
         ((good, bad), "The second shows"), ((bad, good), "The first shows")]
    )  # fmt: skip
    return TrainingExample(images, question, f"No. {subject} nothing.")


def _text_example(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    image = bank.of(panel, rng)
    draw = rng.random()
    described = panel
    if draw < 0.12:
        image = bank.of_negative(rng)
    elif draw >= 0.55:
        described = changed(panel, tuple(VALUES), rng.choices((1, 2, 3, 6), weights=(6, 2, 1, 2))[0], rng)

    # VALUES has the order of a panel's text.
    words = []
    wrong = []
    for name in VALUES:
        value = getattr(described, name)
        shown = getattr(panel, name)
        words.append((value, draw >= 0.12 and value == shown))
        if value != shown:
            wrong.append(f"The {name} is {shown}.")

    # The answer names every wrong attribute, which directs the attention.
    answer = f"Yes. It shows {panel.text}."
    if draw < 0.12:
        answer = "No. It shows nothing."
    elif wrong:
        answer = f"No. {' '.join(wrong)}"
    return TrainingExample((image,), questions.shows_text(described.text), answer, tuple(words))


def _criterion_example(first: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    # A criterion is about one attribute.
    name = rng.choice(KEPT)
    question = questions.meets_criterion(CRITERIA[name])
    if rng.random() < 0.1:
        return _negative_pair(first, question, rng, bank)
    # The other attributes may differ: the judge must learn to ignore them.
    distractors = tuple(attribute for attribute in KEPT if attribute != name)
    second = changed(_new_scene(first, rng), distractors, rng.randrange(len(distractors) + 1), rng)
    if rng.random() < 0.5:
        second = changed(second, (name,), 1, rng)
    difference = differences(first, second, (name,))
    answer = f"No. {difference}" if difference else f"Yes. Both {name}s are {getattr(first, name)}."
    return TrainingExample((bank.of(first, rng), bank.of(second, rng)), question, answer)


def _new_scene(panel: Panel, rng: Random) -> Panel:
    pose, prop = rng.choice(characters.SCENES)
    return replace(panel, pose=pose, prop=prop)


def changed(panel: Panel, names: Sequence[str], count: int, rng: Random) -> Panel:
    """Change `count` attributes of `names`."""
    for name in rng.sample(names, count):
        panel = with_another(panel, name, rng)
    return panel


def differences(first: Panel, second: Panel, names: Sequence[str] = KEPT) -> str:
    """Describe the differences of two panels, a sentence per attribute."""
    sentences = []
    for name in names:
        a = getattr(first, name)
        b = getattr(second, name)
        if a != b:
            sentences.append(f"The {name} differs: {a} and {b}.")
    return " ".join(sentences)


def edit_examples(bank: ImageBank, *, split: Split, rng: Random, captions: float) -> Iterator[TrainingExample]:
    """Yield examples about edits of one split's characters without end; half of the answers are Yes.

    Args:
        captions: share of plain descriptions and questions about pairs of a set.
    """
    pool = characters.panels_of(split)
    plain = training_examples(bank, split=split, rng=rng, captions=captions)
    while True:
        if rng.random() < captions:
            yield next(plain)
            continue
        edit = draw_edit(rng.choice(pool), rng.choice(tuple(EDITS)), rng)
        seen = _attempt(edit, rng)

        # Either question, and its answer.
        if rng.choice((True, False)):
            question = questions.edit_kept(edit.instruction)
            reasons = differences(edit.before, seen, edit.others)
            kept = ", ".join(getattr(edit.before, name) for name in edit.others)
            answer = f"No. {reasons}" if reasons else f"Yes. Both show {kept}."
        else:
            question = questions.edit_followed(edit.instruction)
            shown = getattr(seen, edit.attribute)
            answer = f"{'Yes' if shown == edit.value else 'No'}. The {edit.attribute} is {shown}."

        # Now and then nothing can be seen in the second image.
        if rng.random() < 0.1:
            ask = rng.choice((questions.edit_kept, questions.edit_followed))
            images = (bank.of(edit.before, rng), bank.of_negative(rng))
            yield TrainingExample(images, ask(edit.instruction), "No. The second shows nothing.")
        else:
            yield TrainingExample((bank.of(edit.before, rng), bank.of(seen, rng)), question, answer)


def _attempt(edit: Edit, rng: Random) -> Panel:
    """Imitate an editor's result: followed or not, the rest kept or not, each with probability 1/2."""
    panel = edit.after
    if rng.random() >= 0.5:
        panel = edit.before
        if rng.random() < 0.5:
            panel = with_another(edit.after, edit.attribute, rng)  # changed, but to a wrong value
    if rng.random() < 0.5:
        return panel
    return changed(panel, edit.others, rng.choices((1, 2, 3), weights=(6, 3, 1))[0], rng)


# --- the second lesson -----------------------------------------------------------------------------------------

REPEATED = 0.45
"""Share of the first lesson's examples in the second."""


def second_examples(bank: ImageBank, *, split: Split, rng: Random, captions: float) -> Iterator[TrainingExample]:
    """Yield the first lesson's examples, and further ones about references, faulty panels and parts of a text.

    Args:
        captions: share of plain descriptions among the first lesson's examples.
    """
    pool = characters.panels_of(split)
    plain = training_examples(bank, split=split, rng=rng, captions=captions)
    kinds = [_reference_example, _faulty_pair, _faulty_criterion, _pose_example, _partial_text, _faulty_text]
    while True:
        if rng.random() < REPEATED:
            yield next(plain)
        else:
            kind = rng.choices(kinds, weights=(2, 2.5, 0.5, 3, 3, 0.8))[0]
            yield kind(rng.choice(pool), pool, rng, bank)


def described(panel: Panel, names: Sequence[str], rng: Random) -> str:
    """Describe some attributes of a panel, as a character's card may: `a red hero, crown`."""
    body = [getattr(panel, name) for name in ("colour", "shape") if name in names]
    words = [getattr(panel, name) for name in VALUES if name in names and name not in ("colour", "shape")]
    if body or not words:
        article = rng.choice(("", "a "))
        words.insert(0, article + " ".join([*body, "hero"]))
    return ", ".join(words)


def _theme(panel: Panel, rng: Random) -> str:
    """Draw the theme of a question: a prompt's beginning, or a character's description."""
    if rng.random() < 0.3:
        return f"{GRID} grid layout of {panel.subject}."
    names = rng.choice((KEPT, KEPT, characters.IDENTITY, characters.IDENTITY, ("colour", "shape"), ("colour",), ()))
    return described(panel, names, rng)


def _reference_example(first: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask about a reference and a panel: the style counts, whether the theme names the palette or not."""
    question = questions.same_theme(_theme(first, rng))
    if rng.random() < 0.2:
        question = questions.consistent()
    if rng.random() < 0.05:
        return _negative_pair(first, question, rng, bank)
    second = _new_scene(first, rng)
    answer = f"Yes. Both show {first.subject}."
    # More often Yes: the questions about faulty panels are answered No.
    if rng.random() < 0.3:
        second = changed(second, KEPT, rng.choices((1, 2, 3), weights=(6, 2, 1))[0], rng)
        answer = f"No. {differences(first, second)}"
    return TrainingExample((bank.of(first, rng), bank.of(second, rng)), question, answer)


def _faulty_pair(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    return (_mixed_pair if rng.random() < 0.45 else _damaged_pair)(panel, pool, rng, bank)


def _mixed_pair(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask about a sound panel beside one whose palette changed by half."""
    mixed = rng.choice(bank.mixed)
    partner = _new_scene(mixed.panel, rng)
    if rng.random() < 0.3:
        partner = replace(partner, palette=mixed.other)
    images = (bank.of(partner, rng), bank.of_faulty(mixed))
    return _either_order(images, mixed.panel, _palette_differs(partner, mixed), rng)


def _damaged_pair(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask about a sound panel beside a damaged one."""
    defect = rng.choice(bank.defects)
    while not defect.spoils_hero:
        defect = rng.choice(bank.defects)
    images = (bank.of(_new_scene(defect.panel, rng), rng), bank.of_faulty(defect))
    reasons = [f"The first shows {defect.name}.", f"The second shows {defect.name}."]
    return _either_order(images, defect.panel, reasons, rng)


def _either_order(images: tuple[int, int], shown: Panel, reasons: Sequence[str], rng: Random) -> TrainingExample:
    """Ask about a sound panel and a faulty one, in either order.

    Args:
        reasons: of the faulty panel as the first image, and as the second.
    """
    question = rng.choice((questions.consistent(), questions.same_theme(_theme(shown, rng))))
    place = rng.randrange(2)
    ordered = images if place else images[::-1]
    return TrainingExample(ordered, question, f"No. {reasons[place]}")


def _palette_differs(partner: Panel, mixed: Mixed) -> list[str]:
    """Describe the difference of a sound and a mixed palette, with the mixed one first and second."""
    both = f"{mixed.panel.palette} with {mixed.other}"
    return [
        f"The palette differs: {both} and {partner.palette}.",
        f"The palette differs: {partner.palette} and {both}.",
    ]


def _faulty_criterion(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask about one attribute of a panel whose palette changed by half."""
    mixed = rng.choice(bank.mixed)
    name = rng.choice((*KEPT, "palette", "palette"))
    partner = _new_scene(mixed.panel, rng)
    if name != "palette" and rng.random() < 0.5:
        partner = with_another(partner, name, rng)
    difference = differences(partner, mixed.panel, (name,))
    answer = f"No. {difference}" if difference else f"Yes. The {name} is {getattr(partner, name)}."
    if name == "palette":
        answer = f"No. {_palette_differs(partner, mixed)[1]}"
    return TrainingExample(
        (bank.of(partner, rng), bank.of_faulty(mixed)), questions.meets_criterion(CRITERIA[name]), answer
    )


def _pose_example(first: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask whether a panel copies a reference: the same pose, and the same prop beside the hero."""
    if rng.random() < 0.05:
        return _negative_pair(first, questions.same_pose(), rng, bank)
    second = first
    if rng.random() < 0.5:
        second = changed(second, KEPT, rng.randrange(1, 5), rng)
    answer = f"Yes. Both show {first.pose}, {first.prop}."
    if rng.random() < 0.5:
        for name in rng.choice((("pose",), ("prop",), SCENE)):
            second = with_another(second, name, rng)
        answer = f"No. {differences(first, second, SCENE)}"
    return TrainingExample((bank.of(first, rng), bank.of(second, rng)), questions.same_pose(), answer)


def _partial_text(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask whether a panel shows a part of a text, often a character's description or a single word."""
    names: Sequence[str] = rng.choice((characters.IDENTITY, KEPT, ("colour", "shape"), SCENE, ()))
    # Single words need the most examples: without a space before it, a word has other tokens.
    if rng.random() < 0.6:
        names = rng.sample(tuple(VALUES), rng.choice((1, 1, 1, 2, 3)))
    names = [name for name in VALUES if name in names]
    if rng.random() < 0.1:
        question = questions.shows_text(described(panel, names, rng))
        unseen = tuple((getattr(panel, name), False) for name in names)
        return TrainingExample((bank.of_negative(rng),), question, "No. It shows nothing.", unseen)

    # The text is of this panel, or differs from it in one attribute.
    text_of = panel
    if names and rng.random() < 0.45:
        text_of = with_another(panel, rng.choice(names), rng)
    text = described(text_of, names, rng)

    # Each word and whether it is true, and the answer with the attributes that are wrong.
    words = []
    wrong = []
    for name in names:
        value = getattr(text_of, name)
        shown = getattr(panel, name)
        words.append((value, value == shown))
        if value != shown:
            wrong.append(f"The {name} is {shown}.")
    answer = f"No. {' '.join(wrong)}" if wrong else f"Yes. It shows {text}."
    return TrainingExample((bank.of(panel, rng),), questions.shows_text(text), answer, tuple(words))


def _faulty_text(panel: Panel, pool: Sequence[Panel], rng: Random, bank: ImageBank) -> TrainingExample:
    """Ask whether a faulty panel shows its text, or the part of the text that the fault does not touch."""
    subject = rng.choice((True, False))
    if rng.random() < 0.4:
        mixed = rng.choice(bank.mixed)
        names = characters.IDENTITY if subject else tuple(VALUES)
        text = described(mixed.panel, names, rng)
        answer = (
            f"Yes. It shows {text}." if subject else f"No. The palette is {mixed.panel.palette} with {mixed.other}."
        )
        words = tuple((getattr(mixed.panel, name), name != "palette") for name in names)
        return TrainingExample((bank.of_faulty(mixed),), questions.shows_text(text), answer, words)

    defect = rng.choice(bank.defects)
    text = described(defect.panel, KEPT if subject else tuple(VALUES), rng)
    answer = f"No. It shows {defect.name}."
    if subject and not defect.spoils_hero:
        answer = f"Yes. It shows {text}."
    return TrainingExample((bank.of_faulty(defect),), questions.shows_text(text), answer)


# --- training --------------------------------------------------------------------------------------------------

Teach = Callable[..., Iterator[TrainingExample]]
"""Generator of examples, such as `training_examples`."""


def pretrain_judge(
    out: Path,
    *,
    vae: AutoencoderKL,
    share: float,
    steps: int,
    lr: float,
    teach: Teach = training_examples,
    start: Path | None = None,
    negatives: Sequence[Image.Image] = (),
    faulty: int = 0,
    resume: bool = False,
) -> None:
    """Train the tiny judge on the examples of `teach`, from scratch or from the checkpoint `start`.

    Args:
        share: factor of the number of steps, for a quick try.
        negatives: further negatives, such as a policy's failures.
        faulty: number of mixed panels, and of damaged ones; with them, panels have all SIZES.
        resume: go on from the state that an interrupted training with the same arguments saved in `out`.
    """
    steps = round(share * steps)
    torch.manual_seed(0)
    rng = Random(0)
    out.mkdir(parents=True, exist_ok=True)
    spoiled: list[Mixed | Defect] = []
    for draw in (draw_mixed, draw_defects) if faulty else ():
        spoiled += draw(faulty, split="train", rng=Random(1), vae=vae)
    bank_of = partial(
        ImageBank,
        vae=vae,
        negatives=[*draw_negatives(3000, seed=0, vae=vae), *negatives],
        sizes=SIZES if faulty else PANEL_SIZES,
        faulty=spoiled,
    )
    model, processor, bank = _begin(start, bank_of, teach)
    shares = CAPTIONS if start is None else (CAPTIONS_AFTERWARDS,) * 2
    streams = []
    for captions in shares:
        streams.append(teach(bank, split="train", rng=rng, captions=captions))

    stage = Stage([model], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.995)
    if resume:
        stage.resume(out / STATE, rng=rng)

    # The accuracy of the last thousand decisions is logged.
    right = {"pairs": deque[bool](maxlen=1000), "texts": deque[bool](maxlen=1000)}
    while stage.step < steps:
        stream = streams[stage.step > steps / 5]
        examples = [next(stream) for _ in range(BATCH)]
        loss = torch.zeros(())
        # Texts and pairs apart, since pairs are twice as long: less padding saves a fifth of a step.
        for kind, images in (("texts", 1), ("pairs", 2)):
            group = [example for example in examples if len(example.images) == images]
            if not group:
                continue
            answers_loss, words_loss, said_yes = _losses(model, group, bank, processor)
            loss = loss + answers_loss * len(group) / BATCH + words_loss
            for example, answer in zip(group, said_yes, strict=True):
                if example.decides:
                    right[kind].append(answer == example.yes)
        stage.update(loss, **{name: sum(answers) / max(1, len(answers)) for name, answers in right.items()})
        if stage.step % SAVED_EVERY == 0:
            stage.save(out / STATE, rng=rng)

    stage.use_average()
    publish(model.half(), out)
    processor.save_pretrained(out)
    (out / STATE).unlink(missing_ok=True)


def _begin(start: Path | None, bank_of: Callable[[Any], ImageBank], teach: Teach) -> tuple[Any, Any, ImageBank]:
    """Load model and processor, or create them, and prepare the images."""
    if start is not None:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        for config in (model.config, model.config.text_config, model.config.vision_config):
            config.dtype = None  # it is stored in another
        processor = load_processor(start)
        return model, processor, bank_of(processor.image_processor)

    # The tokenizer needs the examples, which need a bank, which needs an image processor: that of a first judge.
    _, processor = twins.tiny_judge(["Yes. No."])
    bank = bank_of(processor.image_processor)
    texts = []
    for example in islice(teach(bank, split="train", rng=Random(0), captions=0.2), 3000):
        texts.append(f"{example.question}\n{example.answer}")

    # Twice, with the words of the template: frequent words become one token or two.
    model, processor = twins.tiny_judge([*texts, "You are a helpful assistant.\nuser\nassistant\n"] * 2)
    return model, processor, bank


def _losses(
    model: Any, examples: Sequence[TrainingExample], bank: ImageBank, processor: Any
) -> tuple[Tensor, Tensor, list[bool]]:
    """Compute the mean loss of some examples, that of their quoted words, and whether each was answered Yes.

    An example's loss is α of its decision and 1 − α of its reasons. The loss of words is an auxiliary classification:
    below the last layer, the token of each quoted word predicts whether the image shows it, so that the last layer only
    aggregates. From whole texts alone, a judge of this size does not learn to compare six words.
    """
    yes, no = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    inputs, answered, word_ends = collate(examples, bank, processor)
    output = model(**inputs, output_hidden_states=True)
    logits = output.logits[:, :-1]
    labels = inputs["input_ids"][:, 1:]
    answered = answered[:, 1:]
    loss_per_token = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    # Decision (the first token of the answer) and reasons.
    decides = torch.tensor([example.decides for example in examples])
    first = answered & (answered.cumsum(1) == 1)
    reasoned = answered & ~(first & decides[:, None])
    reasons = (loss_per_token * reasoned).sum(1) / reasoned.sum(1)
    decided = DECISION_SHARE * loss_per_token[first] + (1 - DECISION_SHARE) * reasons
    loss = torch.where(decides, decided, reasons).mean()

    # Quoted words, which pairs do not have.
    words_loss = torch.zeros(())
    if len(word_ends):
        hidden = model.model.language_model.norm(output.hidden_states[-2][tuple(word_ends.T)])
        fits = torch.tensor([fit for example in examples for _, fit in example.words])
        words_loss = F.cross_entropy(model.lm_head(hidden)[:, [no, yes]], fits.long())
    decisions = logits[first]
    return loss, words_loss, (decisions[:, yes] > decisions[:, no]).tolist()


def collate(
    examples: Sequence[TrainingExample], bank: ImageBank, processor: Any
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Collate examples to a batch of the model.

    Returns:
        Inputs, padded on the right; mask of the answers' tokens, the end token included (B, T); row and column of each
        quoted word's last token (W, 2).
    """
    # Tokens of each example.
    prompts = []
    answers = []
    word_ends = []
    images: list[int] = []
    for row, example in enumerate(examples):
        prompt, columns = _chat(example, processor)
        prompts.append(prompt)
        answers.append(processor.tokenizer(f"{example.answer}<|im_end|>").input_ids)
        word_ends += [(row, column) for column in columns]
        images += example.images

    # Padded tensors.
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(examples), length), processor.tokenizer.pad_token_id)
    attended = torch.zeros_like(ids)
    answered = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attended[row, :end] = 1
        answered[row, len(prompt) : end] = True

    inputs = {
        "input_ids": ids,
        "attention_mask": attended,
        "pixel_values": bank.pixel_values(images),
        # One frame of 4×4 patches: the processor made every image of 32 px.
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(len(images), 1),
        "mm_token_type_ids": (ids == processor.image_token_id).int(),
    }
    return inputs, answered, torch.tensor(word_ends, dtype=torch.long).view(-1, 2)


def _chat(example: TrainingExample, processor: Any) -> tuple[list[int], list[int]]:
    """Tokenize an example's prompt, and find the index of each quoted word's last token."""
    # The prompt, with its images as tokens.
    content = [{"type": "image"}] * len(example.images) + [{"type": "text", "text": example.question}]
    text = chat_text(processor, [{"role": "user", "content": content}])
    # Images of 32 px are 16 patches, merged by fours. The processor would insert the tokens if it had the image.
    text = text.replace("<|image_pad|>", "<|image_pad|>" * 4)
    tokens = processor.tokenizer(text, return_offsets_mapping=True)
    word_ends = []
    end = text.index('"') if example.words else 0
    for word, _ in example.words:
        end = text.index(word, end) + len(word)
        word_ends.append(next(index for index, (_, stop) in enumerate(tokens.offset_mapping) if stop >= end))
    return list(tokens.input_ids), word_ends
