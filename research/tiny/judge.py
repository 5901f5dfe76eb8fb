"""Training of the tiny judge of pairs on drawn panels, and of the judge of edits, which goes on from it.

It learns the questions of `core.questions` about two panels (with a theme, without, one criterion, one pose), and about
one panel and a text. Two panels belong together if all looks are equal, named by the theme or not. An answer is Yes or
No and then reasons, which name the equal or different attributes: they direct the attention of a judge that is trained
from scratch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from pacorl.tiny.words import INSTRUCTIONS
from pacorl.tiny.world import CRITERIA, LOOKS, SCENE, SCENES, VALUES, Panel, draw, theme_text, with_another
from pacorl.types import Grid
from research.tiny.damage import DEFECTS, junk, mixed, random_panel, worn
from research.tiny.edits import draw_edit
from research.tiny.stage import STATE, Stage, publish
from research.tiny.vae import reconstructed

CAPTION_REQUEST = "What does this image show?"
CRITERION_OF = {name.lower(): text for dimension in CRITERIA.values() for name, text in dimension.items()}
"""Look → its criterion."""
SIZES = (16, 24, 32, 48, 64, 64, 96, 96)
SIDE = 32
"""Pixels that the judge's processor resizes every image to."""
BATCH = 32
NOISE = 0.35
"""Most noise in the latents of reconstructed images."""
DEFECT_WEIGHTS = {
    "no hat": 1.5,
    "half a hat": 3,
    "a hole": 2.5,
    "a blob": 2.5,
    "a smear": 4,
    "a patch of noise": 1.5,
    "two heroes": 1,
    "another colour": 1.5,
}
"""Defect → how often it is drawn: what the judge misses most, most often."""
DAMAGED = {"no hat": "hat", "half a hat": "hat", "another colour": "colour"}
"""Defect → the look that it takes away."""
DECISION_SHARE = 0.5
"""α: weight of the decision in an example's loss; the reasons weigh 1 − α."""


@dataclass(frozen=True, slots=True)
class Example:
    """A question about one or two images and its answer."""

    images: tuple[Image.Image, ...]
    question: str
    answer: str
    words: tuple[tuple[str, bool], ...] = ()
    """Attribute values that the question quotes, in order, and whether the image shows them."""
    equal: tuple[bool, ...] = ()
    """Whether two panels share each attribute of VALUES."""
    sound: tuple[bool, ...] = ()
    """Whether each image is a panel without a fault; empty if it is not asked."""

    @property
    def yes(self) -> bool:
        return self.answer.startswith("Yes")

    @property
    def decides(self) -> bool:
        return self.question != CAPTION_REQUEST


class Teacher:
    """Draws examples about random panels; a third of the images pass through the autoencoder."""

    def __init__(self, vae: AutoencoderKL, rng: Random, *, junk_images: Sequence[Image.Image] = ()) -> None:
        self.vae = vae
        self.rng = rng
        self.failures = tuple(junk_images)

    def examples(self, *, captions: float, edits: float = 0.0) -> Iterator[Example]:
        """Yield examples without end; about half of the decisions are Yes.

        Args:
            captions: share of plain descriptions.
            edits: share of questions about edits among the rest.
        """
        kinds = (self._pair, self._criterion, self._text, self._pose)
        while True:
            panel = random_panel(self.rng)
            if self.rng.random() < captions:
                if self.rng.random() < 0.05:
                    yield Example((self._junk(),), CAPTION_REQUEST, "It shows nothing.", sound=(False,))
                else:
                    shown = f"It shows {caption(panel)}."
                    yield Example((self._image(panel),), CAPTION_REQUEST, shown, sound=(True,))
                continue
            kind = self._edit if self.rng.random() < edits else self.rng.choices(kinds, weights=(8, 2.5, 3, 1))[0]
            yield kind(panel)

    # --- images ------------------------------------------------------------------------------------------------

    def _image(self, panel: Panel) -> Image.Image:
        image = draw(panel, self.rng.choice(SIZES))
        return worn(image, self.rng) if image.width > 32 and self.rng.random() < 0.25 else image

    def _junk(self) -> Image.Image:
        if self.failures and self.rng.random() < 0.3:
            return self.rng.choice(self.failures)
        return self._sized(junk(self.rng))

    def _sized(self, image: Image.Image) -> Image.Image:
        return image.resize((self.rng.choice(SIZES),) * 2, Image.Resampling.BOX)

    # --- pairs -------------------------------------------------------------------------------------------------

    def _pair(self, first: Panel) -> Example:
        question = questions.consistent()
        if self.rng.random() < 0.75:
            question = questions.same_theme(self._theme(first))
        draw_ = self.rng.random()
        if draw_ < 0.06:
            return self._junk_pair(first, question)
        if draw_ < 0.45:
            return self._faulty_pair(first, question)
        second = self._new_scene(first)
        if draw_ < 0.8:
            shared = f"{first.colour} {first.shape} hero, {first.hat}, {first.palette}"
            return self._either(first, second, question, f"Yes. Both show {shared}.")
        # Few differences: with random panels, colours would be enough to be right.
        if self.rng.random() < 0.12:
            second = replace(random_panel(self.rng), place=first.place)
        elif self.rng.random() < 0.15:
            second = with_another(second, "place", self.rng)
        if second.looks == first.looks and second.place == first.place:
            second = self._changed(second, LOOKS, self.rng.choices((1, 2, 3, 4), weights=(5, 3, 2, 1))[0])
        return self._either(first, second, question, f"No. {differences(first, second, (*LOOKS, 'place'))}")

    def _either(self, first: Panel, second: Panel, question: str, answer: str) -> Example:
        equal = tuple(getattr(first, name) == getattr(second, name) for name in VALUES)
        images = (self._image(first), self._image(second))
        return Example(images, question, answer, equal=equal, sound=(True, True))

    def _junk_pair(self, first: Panel, question: str) -> Example:
        bad = self._junk()
        images, subject, sound = self.rng.choice(
            [((bad, bad), "Both show", (False, False)), ((bad, self._junk()), "Both show", (False, False)),
             ((self._image(first), bad), "The second shows", (True, False)),
             ((bad, self._image(first)), "The first shows", (False, True))]
        )  # fmt: skip
        return Example(images, question, f"No. {subject} nothing.", sound=sound)

    def _faulty_pair(self, panel: Panel, question: str) -> Example:
        """A sound panel beside a damaged one, or one whose palette changed by half."""
        partner = self._new_scene(panel)
        if self.rng.random() < 0.3:
            changed = "palette"
            other = with_another(panel, "palette", self.rng).palette
            faulty = mixed(panel, other, self.rng)
            if self.rng.random() < 0.3:
                partner = replace(partner, palette=other)
            both = f"{panel.palette} with {other}"
            reasons = (f"The palette differs: {both} and {partner.palette}.",
                       f"The palette differs: {partner.palette} and {both}.")  # fmt: skip
        else:
            name = self.rng.choices(tuple(DEFECT_WEIGHTS), weights=tuple(DEFECT_WEIGHTS.values()))[0]
            changed = DAMAGED.get(name, "")
            faulty = DEFECTS[name](panel, self.rng)
            reasons = (f"The first shows {name}.", f"The second shows {name}.")
        place = self.rng.randrange(2)
        images = (self._image(partner), self._sized(faulty))
        equal = tuple(name != changed and getattr(panel, name) == getattr(partner, name) for name in VALUES)
        if place == 0:
            images = images[::-1]
        return Example(images, question, f"No. {reasons[place]}", equal=equal, sound=(place == 1, place == 0))

    def _theme(self, panel: Panel) -> str:
        """A theme of a set, or a character's description. It names up to two looks, or a hero's traits."""
        rng = self.rng
        # Whether a set follows its theme is another question: a named look may be wrong in both.
        if rng.random() < 0.2:
            panel = replace(random_panel(rng), place=panel.place)
        named = {name: getattr(panel, name) for name in LOOKS if rng.random() < 0.25}
        theme = theme_text(panel.place, named)
        match rng.randrange(6):
            case 0:
                return f"{rng.choice((Grid(2, 2), Grid(3, 3)))} grid layout of {theme}."
            case 1 | 2 | 3:
                return theme
            case 4:
                return described(panel, rng.choice((("colour", "shape", "hat"), ("colour", "shape"), ("colour",))), rng)
            case _:
                return rng.choice(("hero", "a hero", "the hero", "set"))

    def _criterion(self, first: Panel) -> Example:
        # A criterion is about one look; the others may differ, and must be ignored.
        rng = self.rng
        name = rng.choice(LOOKS)
        question = questions.meets_criterion(CRITERION_OF[name])
        if rng.random() < 0.08:
            return self._junk_pair(first, question)
        others = tuple(look for look in LOOKS if look != name)
        second = self._changed(self._new_scene(first), others, rng.randrange(len(others) + 1))
        if rng.random() < 0.05:
            other = with_another(first, "palette", rng).palette
            if name == "palette":
                answer = f"No. The palette differs: {first.palette} and {second.palette} with {other}."
                second = replace(second, palette=first.palette)
            else:
                answer = f"Yes. Both {name}s are {getattr(first, name)}."
            return Example((self._image(first), self._sized(mixed(second, other, rng))), question, answer)
        if rng.random() < 0.5:
            second = with_another(second, name, rng)
        difference = differences(first, second, (name,))
        return self._either(
            first,
            second,
            question,
            f"No. {difference}" if difference else f"Yes. Both {name}s are {getattr(first, name)}.",
        )

    def _pose(self, first: Panel) -> Example:
        """Ask whether a panel copies a reference: the same pose, and the same prop beside the hero."""
        rng = self.rng
        if rng.random() < 0.05:
            return self._junk_pair(first, questions.same_pose())
        second = self._changed(first, LOOKS, rng.randrange(4)) if rng.random() < 0.5 else first
        answer = f"Yes. Both show {first.scene}."
        if rng.random() < 0.5:
            for name in rng.choice((("pose",), ("prop",), SCENE)):
                second = with_another(second, name, rng)
            answer = f"No. {differences(first, second, SCENE)}"
        return self._either(first, second, questions.same_pose(), answer)

    # --- edits -------------------------------------------------------------------------------------------------

    def _edit(self, before: Panel) -> Example:
        """Ask of a source and its edit whether the rest was kept, or the instruction followed."""
        rng = self.rng
        edit = draw_edit(before, rng.choice(tuple(INSTRUCTIONS)), rng)
        ask = rng.choice((questions.edit_kept, questions.edit_followed))
        question = ask(edit.instruction)
        if rng.random() < 0.08:
            images = (self._image(before), self._junk())
            return Example(images, question, "No. The second shows nothing.")

        # Followed or not, and the rest kept or not, as often as not.
        seen = edit.after
        if rng.random() < 0.5:
            seen = before if rng.random() < 0.5 else with_another(edit.after, edit.attribute, rng)
        if rng.random() < 0.5:
            seen = self._changed(seen, edit.others, rng.choices((1, 2, 3), weights=(6, 3, 1))[0])

        if ask is questions.edit_followed:
            shown = getattr(seen, edit.attribute)
            answer = f"{'Yes' if shown == edit.value else 'No'}. The {edit.attribute} is {shown}."
        else:
            reasons = differences(before, seen, edit.others)
            kept = ", ".join(getattr(before, name) for name in edit.others)
            answer = f"No. {reasons}" if reasons else f"Yes. Both show {kept}."
        return self._either(before, seen, question, answer)

    # --- texts -------------------------------------------------------------------------------------------------

    def _text(self, panel: Panel) -> Example:
        """Ask whether a panel shows a text: its scene, its theme, both, or a few words."""
        rng = self.rng
        form = rng.choices(("scene", "theme", "both", "words"), weights=(4, 2, 2, 2.5))[0]
        named: Sequence[str]
        match form:
            case "scene":
                named = SCENE
            case "theme":
                named = (*rng.sample(LOOKS, rng.choice((0, 1, 2))), "place")
            case "both":
                named = (*rng.sample(LOOKS, rng.choice((0, 1, 2))), "place", *SCENE)
            case _:
                named = rng.sample(tuple(VALUES), rng.choice((1, 1, 1, 2, 3, 4)))
        unseen = rng.random() < 0.07
        text_of = panel
        if not unseen and rng.random() < 0.45:
            text_of = self._changed(panel, tuple(named), min(len(named), rng.choices((1, 2), weights=(5, 1))[0]))
        text, order = written(text_of, named, form, rng)

        words, wrong = [], []
        for name in order:
            value, shown = getattr(text_of, name), getattr(panel, name)
            words.append((spoken(name, value, form), not unseen and value == shown))
            if value != shown:
                wrong.append(f"The {name} is {shown}.")
        answer = "Yes. It shows " + ", ".join(getattr(panel, name) for name in order) + "."
        if unseen:
            answer = "No. It shows nothing."
        elif wrong:
            answer = f"No. {' '.join(wrong)}"
        image = self._junk() if unseen else self._image(panel)
        return Example((image,), questions.shows_text(text), answer, tuple(words), sound=(not unseen,))

    def _new_scene(self, panel: Panel) -> Panel:
        pose, prop = self.rng.choice(SCENES)
        return replace(panel, pose=pose, prop=prop)

    def _changed(self, panel: Panel, names: Sequence[str], count: int) -> Panel:
        for name in self.rng.sample(names, count):
            panel = with_another(panel, name, self.rng)
        return panel


def caption(panel: Panel) -> str:
    """Describe a panel with every attribute."""
    return f"{panel.colour} {panel.shape} hero, {panel.hat}, {panel.palette}, {panel.place}, {panel.pose}, {panel.prop}"


def described(panel: Panel, names: Sequence[str], rng: Random) -> str:
    """Describe some attributes of a panel, as a character's card may: `a red hero, crown`."""
    body = [getattr(panel, name) for name in ("colour", "shape") if name in names]
    words = [getattr(panel, name) for name in VALUES if name in names and name not in ("colour", "shape")]
    if body or not words:
        words.insert(0, rng.choice(("", "a ")) + " ".join([*body, "hero"]))
    return ", ".join(words)


ORDER = ("colour", "shape", "hat", "place", "palette", "pose", "prop")
"""Order of the attributes in a theme and a panel's text."""


def written(panel: Panel, names: Sequence[str], form: str, rng: Random) -> tuple[str, list[str]]:
    """Write some attributes of a panel, and list them in the order of the text."""
    if form == "words":
        return described(panel, names, rng), [name for name in VALUES if name in names]
    parts = []
    if "place" in names:
        parts.append(theme_text(panel.place, {name: getattr(panel, name) for name in LOOKS if name in names}))
    if "pose" in names:
        parts.append(panel.scene)
    return ", ".join(parts), [name for name in ORDER if name in names]


def spoken(name: str, value: str, form: str) -> str:
    """Return the last word of the text that names a value: `candy colours` for candy in a theme."""
    return "candy colours" if form != "words" and name == "palette" and value == "candy" else value


def differences(first: Panel, second: Panel, names: Sequence[str]) -> str:
    """Describe the differences of two panels, a sentence per attribute."""
    sentences = []
    for name in names:
        a, b = getattr(first, name), getattr(second, name)
        if a != b:
            sentences.append(f"The {name} differs: {a} and {b}.")
    return " ".join(sentences)


# --- training --------------------------------------------------------------------------------------------------


class Pixels:
    """Patches of images as the judge's processor prepares them, a share of them reconstructed by the autoencoder."""

    def __init__(self, processor: Any, vae: AutoencoderKL, rng: Random) -> None:
        self.processor = processor.image_processor
        self.vae = vae
        self.rng = rng

    def of(self, images: Sequence[Image.Image]) -> Tensor:
        """Return (16 patches × images, values)."""
        shown = reconstructed(images, self.vae, self.rng, noise=NOISE)
        pixels: Tensor = self.processor(images=shown, return_tensors="pt")["pixel_values"]
        return pixels


def losses(
    model: Any, examples: Sequence[Example], pixels: Pixels, processor: Any
) -> tuple[Tensor, Tensor, list[bool]]:
    """Compute the mean loss of some examples, an auxiliary one, and whether each was answered Yes.

    An example's loss is α of its decision and 1 − α of its reasons. The auxiliary loss is a classification below the
    last layer, so that the last layer only aggregates: the token of each quoted word predicts whether the image shows
    it, the token after an image whether it is sound, and the last tokens of a question about two panels whether they
    share each attribute. Without the last a judge names every look rightly long before it compares two of them.
    """
    yes, no = processor.tokenizer.convert_tokens_to_ids(["Yes", "No"])
    inputs, answered, marked = collate(examples, pixels, processor)
    output = model(**inputs, output_hidden_states=True)
    logits = output.logits[:, :-1]
    labels = inputs["input_ids"][:, 1:]
    answered = answered[:, 1:]
    token_loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)

    decides = torch.tensor([example.decides for example in examples])
    first = answered & (answered.cumsum(1) == 1)
    reasoned = answered & ~(first & decides[:, None])
    reasons = (token_loss * reasoned).sum(1) / reasoned.sum(1)
    decided = DECISION_SHARE * token_loss[first] + (1 - DECISION_SHARE) * reasons
    loss = torch.where(decides, decided, reasons).mean()

    auxiliary = torch.zeros(())
    if len(marked):
        hidden = model.model.language_model.norm(output.hidden_states[-2][tuple(marked.T)])
        facts: list[bool] = []
        for example in examples:
            facts += [*(fit for _, fit in example.words), *example.equal, *example.sound]
        auxiliary = F.cross_entropy(model.lm_head(hidden)[:, [no, yes]], torch.tensor(facts).long())
    decisions = logits[first]
    return loss, auxiliary, (decisions[:, yes] > decisions[:, no]).tolist()


def collate(examples: Sequence[Example], pixels: Pixels, processor: Any) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Collate examples: inputs padded on the right, mask of the answers' tokens (B, T), tokens with a fact (W, 2)."""
    end_of_image = processor.tokenizer.convert_tokens_to_ids("<|vision_end|>")
    prompts, answers, marked = [], [], []
    images: list[Image.Image] = []
    for row, example in enumerate(examples):
        prompt, columns = _chat(example, processor)
        prompts.append(prompt)
        answers.append(processor.tokenizer(f"{example.answer}<|im_end|>").input_ids)
        # The last token of a prompt decides; those before it have the looks.
        columns += [len(prompt) - 1 - len(VALUES) + look for look in range(len(example.equal))]
        if example.sound:
            columns += [column for column, token in enumerate(prompt) if token == end_of_image]
        marked += [(row, column) for column in columns]
        images += example.images

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
        "pixel_values": pixels.of(images),
        # One frame of 4×4 patches: the processor made every image of 32 px.
        "image_grid_thw": torch.tensor([[1, 4, 4]]).repeat(len(images), 1),
        "mm_token_type_ids": (ids == processor.image_token_id).int(),
    }
    return inputs, answered, torch.tensor(marked, dtype=torch.long).view(-1, 2)


def _chat(example: Example, processor: Any) -> tuple[list[int], list[int]]:
    """Tokenize an example's prompt, and find the index of each quoted word's last token."""
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


def pretrain_judge(
    out: Path, *, vae: Path, start: Path | None = None, steps: int = 8500, lr: float = 1.5e-3, edits: float = 0.0
) -> None:
    """Train the judge from scratch, or from `start`; a stopped training goes on from `out`/state.pt.

    Args:
        edits: share of questions about edits.
    """
    torch.manual_seed(0)
    out.mkdir(parents=True, exist_ok=True)
    autoencoder = AutoencoderKL.from_pretrained(vae)
    if start:
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(start, dtype=torch.float32)
        processor = load_processor(start)
    else:
        texts = []
        for example in islice(Teacher(autoencoder, Random(0)).examples(captions=0.2, edits=0.1), 4000):
            texts.append(f"{example.question}\n{example.answer}")
        # Twice, with the words of the template: frequent words become one token or two.
        model, processor = twins.tiny_judge([*texts, "You are a helpful assistant.\nuser\nassistant\n"] * 2)

    stage = Stage([model], lr=lr, steps=steps, log=out / "log.jsonl", ema=0.997)
    stage.resume(out / STATE)
    right = {"pairs": deque[bool](maxlen=1000), "texts": deque[bool](maxlen=1000)}
    while stage.step < steps:
        # Seeded by the step, so that a resumed training draws what it would have drawn.
        rng = Random(stage.step)
        torch.manual_seed(stage.step)
        captions = 0.8 if start is None and stage.step < steps / 6 else 0.05
        teacher = Teacher(autoencoder, rng).examples(captions=captions, edits=edits)
        examples = list(islice(teacher, BATCH))
        pixels = Pixels(processor, autoencoder, rng)
        loss = torch.zeros(())
        # Texts and pairs apart, since pairs are twice as long: less padding saves a fifth of a step.
        for kind, images in (("texts", 1), ("pairs", 2)):
            group = [example for example in examples if len(example.images) == images]
            if not group:
                continue
            answers_loss, auxiliary, said_yes = losses(model, group, pixels, processor)
            loss = loss + answers_loss * len(group) / BATCH + auxiliary
            for example, answer in zip(group, said_yes, strict=True):
                if example.decides:
                    right[kind].append(answer == example.yes)
        stage.update(loss, **{name: sum(answers) / max(1, len(answers)) for name, answers in right.items()})
        if stage.step % 100 == 0:
            stage.save(out / STATE)
        if stage.step % 500 == 0:
            stage.save_average(model, out / "average")
            processor.save_pretrained(out / "average")

    stage.use_average()
    publish(model.half(), out)
    processor.save_pretrained(out)


def pretrain_edit_judge(out: Path, *, vae: Path, start: Path) -> None:
    """Train the judge of edits from the judge of pairs in `start`."""
    pretrain_judge(out, vae=vae, start=start, steps=1100, lr=8e-4, edits=0.75)
