"""From a question to what a Qwen-VL-family model reads: chat text, token ids, image features, positions.

The plain way (`padded`) is transformers' own inputs; the shared way (`featured`) has every distinct image pass the
vision tower once and gives each prompt the rows of its images in one table of features. Two rewards that ask about the
same images, one after the other, share that table. Texts recur in every epoch, so they are rendered and tokenized once.

Legend: B rows of a batch, N tokens, K feature maps of an image, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from pacorl.io.images import as_rgb
from pacorl.judge.sharing import TokenRun, packed
from pacorl.types import Question, Size

TEXTS = 4096
"""Texts whose rendering and tokens are remembered, a few kilobytes each; the newest stay."""


@dataclass(frozen=True)
class DistinctImage:
    """An RGB image that equals another of the same pixels."""

    digest: bytes
    image: Image

    @classmethod
    def of(cls, image: Image, *, name: str) -> DistinctImage:
        """The image in RGB. Raises ImageError if no judge can look at it."""
        rgb = as_rgb(image, name)
        digest = hashlib.blake2b(rgb.tobytes(), key=repr(rgb.size).encode(), digest_size=16).digest()
        return cls(digest, rgb)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DistinctImage) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as the model's chat template writes it, and its images in order."""

    text: str
    images: tuple[DistinctImage, ...]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, with as many image tokens as each image takes."""

    ids: NDArray[np.int64]
    images: tuple[DistinctImage, ...]

    def __len__(self) -> int:
        return len(self.ids)


class Prompting:
    """A model's chat template, tokenizer, image processor, vision tower and positions."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model, self._processor = model, processor
        self._image_token = int(model.config.image_token_id)
        # The template is Jinja, slower than the tokenizer, and either is slower than a small judge's forward.
        self._question_text = lru_cache(TEXTS)(self._render)
        self._ids = lru_cache(TEXTS)(self._tokenize)
        self._grid = lru_cache(TEXTS)(self._cut)
        self._last_features: tuple[Any, Tensor] | None = None
        """What the last call's images are, and their features."""

    def chat_prompts(self, questions: Sequence[Question]) -> list[ChatPrompt]:
        """One user turn per question: its images, then its text."""
        images: dict[int, DistinctImage] = {}
        prompts = []
        for question in questions:
            for number, image in enumerate(question.images, 1):
                if id(image) not in images:
                    images[id(image)] = DistinctImage.of(image, name=f"image {number} of {question.text!r}")
            text = self._question_text(len(question.images), question.text)
            prompts.append(ChatPrompt(text, tuple(images[id(image)] for image in question.images)))
        return prompts

    def _render(self, images: int, text: str) -> str:
        content = [*({"type": "image"} for _ in range(images)), {"type": "text", "text": text}]
        return self.chat_text([{"role": "user", "content": content}])

    def chat_text(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Turns in the chat template, up to where the answer begins."""
        return chat_text(self._processor, turns)

    def encode(self, prompts: Sequence[ChatPrompt]) -> list[EncodedPrompt]:
        """Raises ValueError if a text holds the token that stands for an image."""
        encoded = []
        for prompt in prompts:
            ids = self._ids(prompt.text)
            placeholder = ids == self._image_token
            if placeholder.sum() != len(prompt.images):
                raise ValueError(
                    f"a question holds {placeholder.sum()} image tokens for {len(prompt.images)} images; "
                    f"take {self._processor.image_token} out of its text"
                )
            # The template writes one token per image, and an image takes as many as it has merged patches.
            repeats = np.ones_like(ids)
            repeats[placeholder] = [self._tokens(*distinct.image.size) for distinct in prompt.images]
            encoded.append(EncodedPrompt(np.repeat(ids, repeats), prompt.images))
        return encoded

    def count(self, text: str, sizes: Sequence[Size]) -> int:
        """Count the tokens of a conversation whose images have these sizes, none of them decoded yet."""
        # The template writes one token per image.
        return len(self._ids(text)) + sum(self._tokens(size.width, size.height) - 1 for size in sizes)

    def _tokenize(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._processor.tokenizer(text).input_ids, dtype=np.int64)

    # --- transformers' own inputs ------------------------------------------------------------------------------

    def padded(self, prompts: Sequence[EncodedPrompt]) -> dict[str, Tensor]:
        """Left-padded, so that the last position of every row is where the answer begins."""
        longest, fill = max(map(len, prompts)), self._processor.tokenizer.pad_token_id
        ids_BN = torch.full((len(prompts), longest), fill)
        attended_BN = torch.zeros_like(ids_BN)
        for row, prompt in enumerate(prompts):
            ids_BN[row, longest - len(prompt) :] = torch.from_numpy(prompt.ids)
            attended_BN[row, longest - len(prompt) :] = 1
        inputs = {"input_ids": ids_BN, "attention_mask": attended_BN}
        if images := [distinct for prompt in prompts for distinct in prompt.images]:
            inputs |= {"mm_token_type_ids": (ids_BN == self._image_token).int(), **self._pixels(images)}
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def _pixels(self, images: Sequence[DistinctImage]) -> dict[str, Tensor]:
        """Each distinct image is prepared once, and all in one call: its checks cost as much as a small image does."""
        distinct = list(dict.fromkeys(images))
        ready = self._processor.image_processor(images=[item.image for item in distinct], return_tensors="pt")
        grid_of = dict(zip(distinct, ready["image_grid_thw"], strict=True))
        patches = ready["pixel_values"].split([int(grid.prod()) for grid in grid_of.values()])
        patches_of = dict(zip(distinct, patches, strict=True))
        pixels = torch.cat([patches_of[item] for item in images]).to(self._model.dtype)
        return {"pixel_values": pixels, "image_grid_thw": torch.stack([grid_of[item] for item in images])}

    # --- inputs that share -------------------------------------------------------------------------------------

    def featured(self, prompts: Sequence[EncodedPrompt], *, batch_tokens: int) -> tuple[Tensor, list[TokenRun]]:
        """The features of all distinct images (K, N, D), and every prompt in terms of their rows."""
        images = list(dict.fromkeys(distinct for prompt in prompts for distinct in prompt.images))
        counts = [self._tokens(*distinct.image.size) for distinct in images]
        rows = {
            distinct: np.arange(end - count, end)
            for distinct, count, end in zip(images, counts, np.cumsum(counts), strict=True)
        }
        positions: dict[Any, Tensor] = {}
        feature_KND = self._features(rows, batch_tokens=batch_tokens)
        return feature_KND, [self._run(prompt, rows, positions) for prompt in prompts]

    def _features(self, rows: Mapping[DistinctImage, NDArray[np.int64]], *, batch_tokens: int) -> Tensor:
        """(K, N, D) of images by the rows that they take; those of the last call's if its images were the same."""
        # Only the whole list counts as the same: of other images beside it, an image's features would round otherwise.
        key = (_state_of(self._model.model.visual), [distinct.digest for distinct in rows])
        if self._last_features and self._last_features[0] == key:
            return self._last_features[1]
        self._last_features = None  # before its successor takes memory
        embedding = self._model.get_input_embeddings().weight
        features = [embedding.new_empty(1, 0, embedding.shape[1])] if not rows else []
        # Rows count on from image to image, so the last one's end less the first one's start is the batch's tokens.
        for batch in packed(rows, lambda image, batch: rows[image][-1] - rows[batch[0]][0] < batch_tokens):
            pixels = {name: tensor.to(self._model.device) for name, tensor in self._pixels(batch).items()}
            output = self._model.model.get_image_features(**pixels, return_dict=True)
            maps = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            features.append(torch.stack([torch.cat(list(level)) for level in maps]).to(embedding.dtype))
        feature_KND = torch.cat(features, dim=1)
        if len(features) == 1:  # a larger table would weigh on a device that a generator trains on meanwhile
            self._last_features = (key, feature_KND)
        return feature_KND

    def _run(
        self, prompt: EncodedPrompt, rows: Mapping[DistinctImage, NDArray[np.int64]], positions: dict[Any, Tensor]
    ) -> TokenRun:
        is_image = prompt.ids == self._image_token
        symbol_N = prompt.ids.copy()
        if prompt.images:
            symbol_N[is_image] = -1 - np.concatenate([rows[distinct] for distinct in prompt.images])
        grids = [self._grid(*distinct.image.size) for distinct in prompt.images]
        # Computed once per shape: positions depend on where images of which shape stand, and on nothing else.
        shape = (is_image.tobytes(), tuple(grids))
        if shape not in positions:
            position_31N, _ = self._model.model.get_rope_index(
                torch.from_numpy(prompt.ids)[None],
                mm_token_type_ids=torch.from_numpy(is_image)[None].int(),
                image_grid_thw=torch.tensor(grids) if grids else None,
            )
            positions[shape] = position_31N[:, 0]
        return TokenRun(symbol_N, positions[shape])

    def _cut(self, width: int, height: int) -> tuple[int, int, int]:
        """Frames, rows and columns of an image's patches, as the image processor cuts it."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        cutter = self._processor.image_processor
        side = cutter.patch_size * cutter.merge_size
        bounds = {"min_pixels": cutter.size["shortest_edge"], "max_pixels": cutter.size["longest_edge"]}
        height, width = smart_resize(height, width, factor=side, **bounds)
        return 1, height // cutter.patch_size, width // cutter.patch_size

    def _tokens(self, width: int, height: int) -> int:
        """Tokens of the language model that an image takes."""
        merged = int(self._processor.image_processor.merge_size) ** 2
        return math.prod(self._grid(width, height)) // merged


def chat_text(processor: Any, turns: Sequence[Mapping[str, Any]]) -> str:
    """Render turns in a checkpoint's chat template, up to where the answer begins.

    A model that thinks first would begin its answer with `<think>` where Yes or No is read. Templates without the
    switch ignore it.
    """
    return str(processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, enable_thinking=False))


def _state_of(module: torch.nn.Module) -> list[tuple[int, int]]:
    """What changes if a module's weights are moved, replaced or trained on."""
    # Inference tensors have no version; nothing trains them.
    return [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in module.parameters()]
