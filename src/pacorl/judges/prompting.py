"""From a question to what a Qwen-VL-family model reads: chat text, token ids, image features, positions.

The plain way (`padded`) is transformers' own inputs; the shared way (`featured`) has every distinct image pass the
vision tower once and gives each prompt the rows of its images in one table of features.

Legend: B rows of a batch, N tokens, K feature maps of an image, D width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from pacorl.io.images import as_rgb
from pacorl.judges.sharing import TokenRun, packed
from pacorl.types import Question


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

    def chat_prompts(self, questions: Sequence[Question]) -> list[ChatPrompt]:
        """One user turn per question: its images, then its text."""
        images: dict[int, DistinctImage] = {}
        texts: dict[tuple[int, str], str] = {}
        prompts = []
        for question in questions:
            for number, image in enumerate(question.images, 1):
                if id(image) not in images:
                    images[id(image)] = DistinctImage.of(image, name=f"image {number} of {question.text!r}")
            kind = (len(question.images), question.text)
            if kind not in texts:  # the template is Jinja, slower than the tokenizer
                content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
                texts[kind] = self.chat_text([{"role": "user", "content": content}])
            prompts.append(ChatPrompt(texts[kind], tuple(images[id(image)] for image in question.images)))
        return prompts

    def chat_text(self, turns: Sequence[Mapping[str, Any]]) -> str:
        """Turns in the chat template, up to where the answer begins."""
        return str(self._processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    def encode(self, prompts: Sequence[ChatPrompt]) -> list[EncodedPrompt]:
        """Raises ValueError if a text holds the token that stands for an image."""
        texts = list(dict.fromkeys(prompt.text for prompt in prompts))
        ids_of = dict(zip(texts, self._processor.tokenizer(texts).input_ids, strict=True))
        encoded = []
        for prompt in prompts:
            ids = np.asarray(ids_of[prompt.text], dtype=np.int64)
            placeholder = ids == self._image_token
            if placeholder.sum() != len(prompt.images):
                raise ValueError(
                    f"a question holds {placeholder.sum()} image tokens for {len(prompt.images)} images; "
                    f"take {self._processor.image_token} out of its text"
                )
            # The template writes one token per image, and an image takes as many as it has merged patches.
            repeats = np.ones_like(ids)
            repeats[placeholder] = [self._tokens(distinct) for distinct in prompt.images]
            encoded.append(EncodedPrompt(np.repeat(ids, repeats), prompt.images))
        return encoded

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
        """Each distinct image is prepared once."""
        prepare = partial(self._processor.image_processor, return_tensors="pt")
        ready = {distinct: prepare(images=[distinct.image]) for distinct in dict.fromkeys(images)}
        pixels = torch.cat([ready[distinct]["pixel_values"] for distinct in images])
        grids = torch.cat([ready[distinct]["image_grid_thw"] for distinct in images])
        return {"pixel_values": pixels.to(self._model.dtype), "image_grid_thw": grids}

    # --- inputs that share -------------------------------------------------------------------------------------

    def featured(self, prompts: Sequence[EncodedPrompt], *, batch_tokens: int) -> tuple[Tensor, list[TokenRun]]:
        """The features of all distinct images (K, N, D), and every prompt in terms of their rows."""
        images = list(dict.fromkeys(distinct for prompt in prompts for distinct in prompt.images))
        counts = [self._tokens(distinct) for distinct in images]
        rows = {
            distinct: np.arange(end - count, end)
            for distinct, count, end in zip(images, counts, np.cumsum(counts), strict=True)
        }
        embedding = self._model.get_input_embeddings().weight
        features = [embedding.new_empty(1, 0, embedding.shape[1])] if not images else []
        # Rows count on from image to image, so the last one's end less the first one's start is the batch's tokens.
        for batch in packed(images, lambda image, batch: rows[image][-1] - rows[batch[0]][0] < batch_tokens):
            pixels = {name: tensor.to(self._model.device) for name, tensor in self._pixels(batch).items()}
            output = self._model.model.get_image_features(**pixels, return_dict=True)
            maps = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
            features.append(torch.stack([torch.cat(list(level)) for level in maps]).to(embedding.dtype))
        positions: dict[Any, Tensor] = {}
        return torch.cat(features, dim=1), [self._run(prompt, rows, positions) for prompt in prompts]

    def _run(
        self, prompt: EncodedPrompt, rows: Mapping[DistinctImage, NDArray[np.int64]], positions: dict[Any, Tensor]
    ) -> TokenRun:
        is_image = prompt.ids == self._image_token
        symbol_N = prompt.ids.copy()
        if prompt.images:
            symbol_N[is_image] = -1 - np.concatenate([rows[distinct] for distinct in prompt.images])
        grids = [self._grid(distinct) for distinct in prompt.images]
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

    def _grid(self, distinct: DistinctImage) -> tuple[int, int, int]:
        """Frames, rows and columns of the image's patches, as the image processor cuts it."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        cutter = self._processor.image_processor
        side = cutter.patch_size * cutter.merge_size
        bounds = {"min_pixels": cutter.size["shortest_edge"], "max_pixels": cutter.size["longest_edge"]}
        height, width = smart_resize(distinct.image.height, distinct.image.width, factor=side, **bounds)
        return 1, height // cutter.patch_size, width // cutter.patch_size

    def _tokens(self, distinct: DistinctImage) -> int:
        """Tokens of the language model that an image takes."""
        merged = int(self._processor.image_processor.merge_size) ** 2
        return math.prod(self._grid(distinct)) // merged
