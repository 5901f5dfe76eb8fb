"""Comparisons → what the judge's model takes: prompt, answer, and which positions the loss reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from pacorl.data.comparisons import IMAGE_TAG, answer_text
from pacorl.io.images import open_image
from pacorl.judges.local import single_token
from pacorl.types import Comparison

if TYPE_CHECKING:
    from PIL.Image import Image

Target = Literal["reasons", "label", "token"]


@dataclass(frozen=True, slots=True)
class Row:
    """A comparison as it is shown, perhaps with its images exchanged."""

    comparison: Comparison
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Shown:
    """A row with its images opened."""

    index: int
    row: Row
    images: list[Image]


class Rows(Dataset[Shown]):
    """Opens images when they are asked for, so that worker processes can do it."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Shown:
        row = self.rows[index]
        images = [open_image(path) for path in row.comparison.images]
        return Shown(index, row, images[::-1] if row.swapped else images)


def in_order(comparisons: Sequence[Comparison]) -> Rows:
    """Each comparison once: what is trained on."""
    return Rows([Row(one) for one in comparisons])


def in_both_orders(comparisons: Sequence[Comparison]) -> Rows:
    """Each comparison, then each pair once more with its images exchanged: what is measured."""
    return Rows([Row(one) for one in comparisons] + [Row(one, True) for one in comparisons if len(one.images) == 2])


class Collator:
    """Rows → a right-padded batch.

    `answer` (B, L) is True at the tokens that are taught, `index` (B,) and `consistent` (B,) say which rows these are;
    everything else goes to the model. Prompts are those of `LocalJudge`: the chat template over the images and the
    question, up to where the answer begins.
    """

    def __init__(self, processor: Any, *, target: Target) -> None:
        self.processor, self.target = processor, target
        self.yes, self.no = (single_token(processor.tokenizer, word) for word in ("Yes", "No"))

    def __call__(self, shown: Sequence[Shown]) -> dict[str, Tensor]:
        images = [image for one in shown for image in one.images]
        pictures = self.processor.image_processor(images=images, return_tensors="pt")
        tokens = iter((pictures["image_grid_thw"].prod(1) // self.processor.image_processor.merge_size**2).tolist())
        prompts = [self.prompt_ids(one.row.comparison, [next(tokens) for _ in one.images]) for one in shown]
        answers = [self.answer_ids(one.row.comparison) for one in shown]
        ids, attended, answer = _padded(prompts, answers, pad=self.processor.tokenizer.pad_token_id)
        return {
            "input_ids": ids,
            "attention_mask": attended,
            "mm_token_type_ids": (ids == self.processor.image_token_id).int(),
            "pixel_values": pictures["pixel_values"],
            "image_grid_thw": pictures["image_grid_thw"],
            "answer": answer,
            "index": torch.tensor([one.index for one in shown]),
            "consistent": torch.tensor([one.row.comparison.consistent for one in shown]),
        }

    def prompt_ids(self, comparison: Comparison, image_tokens: Sequence[int]) -> list[int]:
        """The prompt in tokens, with so many for each image."""
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": _content(comparison)}], add_generation_prompt=True, tokenize=False
        )
        first, *rest = text.split(self.processor.image_token)
        for count, piece in zip(image_tokens, rest, strict=True):
            first += self.processor.image_token * count + piece
        return list(self.processor.tokenizer(first).input_ids)

    def answer_ids(self, comparison: Comparison) -> list[int]:
        """The answer in tokens, the end of turn included; its first is "Yes" or "No" alone.

        Raises ValueError where it is not.
        """
        if self.target == "token":
            return [self.yes if comparison.consistent else self.no]
        label = "Yes." if comparison.consistent else "No."
        text = label if self.target == "label" else answer_text(comparison)
        ids = [*self.processor.tokenizer(text, add_special_tokens=False).input_ids, self.end]
        if ids[0] != (self.yes if comparison.consistent else self.no):
            raise ValueError(
                f"{comparison.images[0]}: the answer {text[:40]!r} does not begin with the token of "
                f"{label[:-1]!r}, so the judge's score would not be trained; write '{label} …'"
            )
        return ids

    @cached_property
    def end(self) -> int:
        """The token that ends a turn."""
        return int(self.processor.tokenizer.convert_tokens_to_ids("<|im_end|>"))


def _content(comparison: Comparison) -> list[Mapping[str, str]]:
    """The user's turn: images first, or where the question says."""
    question = comparison.question
    if IMAGE_TAG not in question:
        return [*({"type": "image"} for _ in comparison.images), {"type": "text", "text": question}]
    parts = [part for part in re.split(f"({IMAGE_TAG})", question) if part]
    return [{"type": "image"} if part == IMAGE_TAG else {"type": "text", "text": part} for part in parts]


def _padded(prompts: Sequence[list[int]], answers: Sequence[list[int]], *, pad: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, attention mask, answer mask), each (B, L)."""
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
    ids = torch.full((len(prompts), length), pad)
    attended, answered = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        start, end = len(prompt), len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        attended[row, :end] = 1
        answered[row, start:end] = True
    return ids, attended, answered
