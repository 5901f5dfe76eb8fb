"""Training examples of a judge: prompts, answers and loss positions from comparisons."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pacorl.io.images import check_readable, open_image
from pacorl.io.terminal import excerpt
from pacorl.judge.local import single_token
from pacorl.judge.prompting import chat_text
from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.loop import processes
from pacorl.judge_training.tuning import processor_of
from pacorl.records.comparisons import IMAGE_TAG, answer_text, comparisons_from
from pacorl.records.leaks import shared_pairs
from pacorl.types import Comparison

logger = logging.getLogger(__name__)
Target = Literal["reasons", "label"]


Row = tuple[int, Comparison]
"""A comparison and its index in the data set."""


def rows_of(comparisons: Iterable[Comparison]) -> list[Row]:
    """Number comparisons as a data set; the collator opens their images, in worker processes."""
    return list(enumerate(comparisons))


def in_both_orders(comparisons: Sequence[Comparison]) -> list[Row]:
    """Build the evaluation set: each pair, then each once more with its images exchanged."""
    swapped = [replace(comparison, images=comparison.images[::-1]) for comparison in comparisons]
    return rows_of([*comparisons, *swapped])


class Collator:
    """Collator of rows to a right-padded batch.

    `answer` (B, L) is True at the learned tokens; `index` (B,) and `consistent` (B,) identify the rows; further tensors
    go to the model. Prompts equal those of `LocalJudge`: the chat template over the images and the question, up to the
    beginning of the answer.
    """

    def __init__(self, processor: Any, *, target: Target) -> None:
        self.processor = processor
        self.target = target
        self.yes = single_token(processor.tokenizer, "Yes")
        self.no = single_token(processor.tokenizer, "No")

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        # Pixels, and the tokens of each image.
        # All images of the batch in one call; the processor returns their numbers of patches.
        numbers, comparisons = zip(*rows, strict=True)
        images = [open_image(path) for comparison in comparisons for path in comparison.images]
        pixels = self.processor.image_processor(images=images, return_tensors="pt")
        tokens = iter((pixels["image_grid_thw"].prod(1) // self.processor.image_processor.merge_size**2).tolist())

        # The prompt and the answer of each row.
        sequences = []
        is_answer = []
        for comparison in comparisons:
            prompt = self.prompt_ids(comparison, [next(tokens) for _ in comparison.images])
            sequence = torch.tensor(prompt + self.answer_ids(comparison))
            sequences.append(sequence)
            is_answer.append(torch.arange(len(sequence)) >= len(prompt))

        padded = partial(pad_sequence, batch_first=True)
        ids_BL = padded(sequences, padding_value=self.processor.tokenizer.pad_token_id)
        return {
            "input_ids": ids_BL,
            # By length: a checkpoint's padding token may also end turns.
            "attention_mask": padded([torch.ones_like(ids) for ids in sequences]),
            "mm_token_type_ids": (ids_BL == self.processor.image_token_id).int(),
            "pixel_values": pixels["pixel_values"],
            "image_grid_thw": pixels["image_grid_thw"],
            "answer": padded(is_answer),
            "index": torch.tensor(numbers),
            "consistent": torch.tensor([comparison.consistent for comparison in comparisons]),
        }

    def prompt_ids(self, comparison: Comparison, image_tokens: Sequence[int]) -> list[int]:
        """Tokenize the prompt, with `image_tokens` per image; images come first, or at the tags of the question."""
        question = comparison.question
        if IMAGE_TAG not in question:
            question = IMAGE_TAG * len(comparison.images) + question
        content = []
        for piece in re.split(f"({IMAGE_TAG})", question):
            if piece == IMAGE_TAG:
                content.append({"type": "image"})
            elif piece:
                content.append({"type": "text", "text": piece})

        # Each image's place in the chat is filled with as many tokens as it has.
        turns = [{"role": "user", "content": content}]
        text = chat_text(self.processor, turns)
        prompt, *pieces = text.split(self.processor.image_token)
        for count, piece in zip(image_tokens, pieces, strict=True):
            prompt += self.processor.image_token * count + piece
        return list(self.processor.tokenizer(prompt).input_ids)

    def answer_ids(self, comparison: Comparison) -> list[int]:
        """Tokenize the answer with its end of turn; the first token is exactly "Yes" or "No".

        Raises:
            ValueError: the first token is another.
        """
        label = "Yes." if comparison.consistent else "No."
        text = label if self.target == "label" else answer_text(comparison)
        tokenizer = self.processor.tokenizer
        end = int(tokenizer.convert_tokens_to_ids("<|im_end|>"))
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, end]
        if ids[0] != (self.yes if comparison.consistent else self.no):
            raise ValueError(
                f"{comparison.images[0]}: the answer {excerpt(text)} does not begin with the token of "
                f"{label[:-1]!r}, so the judge's score would not be trained; write '{label} …'"
            )
        return ids


@dataclass(frozen=True, slots=True)
class JudgeData:
    """Training and evaluation data of a run, checked before any weights are loaded."""

    train: list[Comparison]
    evaluation: list[Comparison]
    collator: Collator


def load_data(config: JudgeConfig) -> JudgeData:
    """Read and check a run's comparisons, images and tokenizer.

    Raises:
        ValueError: for invalid data, before any weights are loaded.
    """
    # The first process draws the pairs of the tiny world, for all processes to read.
    with processes().main_process_first():
        scratch = config.out / "data"
        train: list[Comparison] = []
        for source in config.data.train:
            train += comparisons_from(source, scratch=scratch)
        evaluation: list[Comparison] = []
        for source in config.data.evaluation:
            evaluation += comparisons_from(source, limit=config.data.evaluation_limit, scratch=scratch)

        # Open all images once: a damaged image would end a long run later.
        if processes().is_main_process:
            check_readable(path for comparison in [*train, *evaluation] for path in comparison.images)

        # What is trained on is not held out.
        learned = set(shared_pairs(evaluation, train)) if evaluation else set()
        if learned and processes().is_main_process:
            logger.warning("%d of %d evaluation pairs are trained on, and left out", len(learned), len(evaluation))
        evaluation = [pair for pair in evaluation if pair not in learned]

    processor = processor_of(config.model.checkpoint, max_pixels=config.model.max_pixels)
    collator = Collator(processor, target=config.loss.target)
    # One answer of each beginning, since the first token does not depend on later text, must begin with its decision.
    beginnings = {(comparison.consistent, comparison.answer[:16]): comparison for comparison in [*train, *evaluation]}
    for comparison in beginnings.values():
        collator.answer_ids(comparison)
    return JudgeData(train, evaluation, collator)
