"""Inputs of a Qwen-VL-family model from questions: chat text, token ids, image features, positions.

The plain form (`inputs`) is transformers' own. The shared form (`featured`) encodes every distinct image once
and gives each prompt the rows of its images in a table of features, which consecutive rewards about the same images
share. Texts recur in every epoch, so rendering and tokenization are cached.

Legend: N tokens, K feature maps of an image, D width.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pacorl.judge.images import DistinctImage, distinct_images
from pacorl.judge.sharing import TokenRun, packed
from pacorl.types import Question, Size

TEXTS = 4096
"""Size of the caches of rendered texts and tokens, a few kilobytes each."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation rendered by the model's chat template, and its images in order."""

    text: str
    images: tuple[DistinctImage, ...]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Token ids, with as many image tokens as each image takes."""

    ids: NDArray[np.int64]
    images: tuple[DistinctImage, ...]


class Prompting:
    """A model's chat template, tokenizer, image processor, vision tower and positions."""

    def __init__(self, model: Any, processor: Any) -> None:
        self._model = model
        self._processor = processor
        self._image_token = int(model.config.image_token_id)
        # Cached: Jinja is slower than the tokenizer, and both are slower than a small judge's forward.
        self._question_text = lru_cache(TEXTS)(self._render)
        self._ids = lru_cache(TEXTS)(self._tokenize)
        self._grid = lru_cache(TEXTS)(self._cut)
        self._last_features: tuple[Any, Tensor] | None = None
        """Key of the last call's images, and their features."""

    def chat_prompts(self, questions: Sequence[Question]) -> list[ChatPrompt]:
        """Render one user turn per question: its images, then its text."""
        prompts = []
        for question, images in zip(questions, distinct_images(questions), strict=True):
            prompts.append(ChatPrompt(self._question_text(len(images), question.text), images))
        return prompts

    def _render(self, images: int, text: str) -> str:
        content = [{"type": "image"}] * images + [{"type": "text", "text": text}]
        return chat_text(self._processor, [{"role": "user", "content": content}])

    def encode(self, prompts: Sequence[ChatPrompt]) -> list[EncodedPrompt]:
        """Tokenize prompts."""
        encoded = []
        for prompt in prompts:
            ids = self._ids(prompt.text)
            placeholder = ids == self._image_token
            assert placeholder.sum() == len(prompt.images), "`text_fault` refuses the token in texts"
            # The template writes one token per image; repeat it once per merged patch.
            repeats = np.ones_like(ids)
            repeats[placeholder] = [self._tokens(*distinct.image.size) for distinct in prompt.images]
            encoded.append(EncodedPrompt(np.repeat(ids, repeats), prompt.images))
        return encoded

    def resized(self, size: Size) -> Size:
        """Return the size to which the image processor resizes an image; of that size, an image keeps its pixels."""
        _, rows, columns = self._grid(size.width, size.height)
        side = int(self._processor.image_processor.patch_size)
        return Size(height=rows * side, width=columns * side)

    def _tokenize(self, text: str) -> NDArray[np.int64]:
        return np.asarray(self._processor.tokenizer(text).input_ids, dtype=np.int64)

    # --- transformers' own inputs ------------------------------------------------------------------------------

    def inputs(self, prompt: EncodedPrompt) -> dict[str, Tensor]:
        """Build the inputs of transformers for one prompt, a batch of one row."""
        ids_1N = torch.from_numpy(prompt.ids)[None]
        inputs = {"input_ids": ids_1N, "attention_mask": torch.ones_like(ids_1N)}
        if prompt.images:
            inputs |= {"mm_token_type_ids": (ids_1N == self._image_token).int(), **self._pixels(prompt.images)}
        return {name: tensor.to(self._model.device) for name, tensor in inputs.items()}

    def _pixels(self, images: Sequence[DistinctImage]) -> dict[str, Tensor]:
        """Preprocess images in one call, whose checks cost as much as a small image."""
        ready = self._processor.image_processor(images=[distinct.image for distinct in images], return_tensors="pt")
        return {"pixel_values": ready["pixel_values"].to(self._model.dtype), "image_grid_thw": ready["image_grid_thw"]}

    # --- inputs that share -------------------------------------------------------------------------------------

    def featured(self, prompts: Sequence[EncodedPrompt], *, batch_tokens: int) -> tuple[Tensor, list[TokenRun]]:
        """Compute the features of all distinct images (K, N, D), and every prompt in terms of their rows."""
        rows: dict[DistinctImage, NDArray[np.int64]] = {}
        end = 0
        for prompt in prompts:
            for distinct in prompt.images:
                if distinct not in rows:
                    start = end
                    end += self._tokens(*distinct.image.size)
                    rows[distinct] = np.arange(start, end)

        positions: dict[Any, Tensor] = {}
        feature_KND = self._features(rows, batch_tokens=batch_tokens)
        return feature_KND, [self._run(prompt, rows, positions) for prompt in prompts]

    def _features(self, rows: Mapping[DistinctImage, NDArray[np.int64]], *, batch_tokens: int) -> Tensor:
        """Compute the features (K, N, D) of images by their rows, or reuse the last call's for the same images."""
        # Moving, replacing or training the tower's weights changes the key.
        state = []
        for weight in self._model.model.visual.parameters():
            # Inference tensors have no version, and are not trained.
            state.append((weight.data_ptr(), 0 if weight.is_inference() else weight._version))
        # Only for the same list, since an image's features round differently in another batch.
        key = (state, [distinct.digest for distinct in rows])
        if self._last_features and self._last_features[0] == key:
            return self._last_features[1]
        self._last_features = None  # free before allocating its successor

        embedding = self._model.get_input_embeddings().weight
        features = []
        if not rows:
            features.append(embedding.new_empty(1, 0, embedding.shape[1]))
        # Rows are consecutive, so a batch's tokens are the last image's end minus the first image's start.
        for batch in packed(rows, lambda image, batch: rows[image][-1] - rows[batch[0]][0] < batch_tokens):
            pixels = {name: tensor.to(self._model.device) for name, tensor in self._pixels(batch).items()}
            output = self._model.model.get_image_features(**pixels, return_dict=True)
            maps = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            # Before transformers 5.23 the deeper levels are not split by image.
            levels = [level if isinstance(level, Tensor) else torch.cat(list(level)) for level in maps]
            features.append(torch.stack(levels).to(embedding.dtype))
        feature_KND = torch.cat(features, dim=1)
        if len(features) == 1:  # a larger table would cost memory of a generator in training
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
        # Computed once per shape: positions depend only on the places and shapes of images.
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
        """Return the image processor's frames, rows and columns of an image's patches."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        cutter = self._processor.image_processor
        side = cutter.patch_size * cutter.merge_size
        bounds = {"min_pixels": cutter.size["shortest_edge"], "max_pixels": cutter.size["longest_edge"]}
        height, width = smart_resize(height, width, factor=side, **bounds)
        return 1, height // cutter.patch_size, width // cutter.patch_size

    def _tokens(self, width: int, height: int) -> int:
        """Count an image's tokens in the language model."""
        merged = int(self._processor.image_processor.merge_size) ** 2
        return math.prod(self._grid(width, height)) // merged


def chat_text(processor: Any, turns: Sequence[Mapping[str, Any]]) -> str:
    """Render turns in a checkpoint's chat template, up to the beginning of the answer.

    Thinking is disabled: an answer would begin with `<think>` instead of Yes or No.
    """
    # Only templates with the switch receive it: transformers warns about a word that a template does not read.
    switch = {}
    if "enable_thinking" in str(processor.chat_template):
        switch["enable_thinking"] = False
    return str(processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, **switch))
