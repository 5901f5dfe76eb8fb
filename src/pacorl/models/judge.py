"""The seam of a judge, and the judge that runs in this process.

A judge is shown images and a question, and its P(Yes | Yes or No) of the first answer token is the score
(arXiv 2512.04784, §3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pacorl.models.http_judge import HttpJudge
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

TINY_JUDGE = Path(__file__).parents[1] / "checkpoints" / "judge"


class Judge(Protocol):
    """Answers questions about images."""

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order; a failed one says why."""

    def explain(self, question: Question) -> str:
        """The answer in words."""


class LocalJudge:
    """A Qwen2.5-VL-family model in this process.

    Every distinct (images, question) is asked once per call, and every distinct image is prepared once.
    """

    def __init__(self, model: Any, processor: Any, *, batch: int = 32, temperature: float = 1.0) -> None:
        self.model = model.eval().requires_grad_(False)
        self.processor = processor
        self.batch = batch
        self.temperature = temperature
        self.yes, self.no = (single_token(processor.tokenizer, word) for word in ("Yes", "No"))

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path = "tiny",
        *,
        adapter: str = "",
        dtype: str = "float32",
        device: str | torch.device = "cpu",
        batch: int = 32,
        temperature: float = 1.0,
    ) -> LocalJudge:
        """Loads a checkpoint folder, a hub name, or the committed tiny judge ("tiny"), with an adapter if named."""
        from transformers import AutoModelForImageTextToText

        from pacorl.models.processor import load_processor

        source = TINY_JUDGE if str(checkpoint) == "tiny" else checkpoint
        model = AutoModelForImageTextToText.from_pretrained(source, dtype=getattr(torch, dtype))
        if adapter:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        return cls(model.to(device), load_processor(source), batch=batch, temperature=temperature)

    @torch.inference_mode()
    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        distinct = list({_key(question): question for question in questions}.values())
        patches = _ImagePatches(self.processor.image_processor)
        # Longest first: batches of like length pad little, and a batch too large fails at once.
        prompts = [self._prompt_ids(question, patches) for question in distinct]
        order = sorted(range(len(distinct)), key=lambda i: -len(prompts[i]))
        probability: dict[Any, float] = {}
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            scores = self._p_yes([distinct[i] for i in part], [prompts[i] for i in part], patches)
            probability |= {_key(distinct[i]): score for i, score in zip(part, scores, strict=True)}
        return [Verdict(probability[_key(question)]) for question in questions]

    @torch.inference_mode()
    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        patches = _ImagePatches(self.processor.image_processor)
        inputs = self._inputs([question], [self._prompt_ids(question, patches)], patches)
        output = self.model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        answer = output[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.tokenizer.decode(answer, skip_special_tokens=True)).strip()

    def _p_yes(self, part: Sequence[Question], prompts: Sequence[list[int]], patches: _ImagePatches) -> list[float]:
        inputs = self._inputs(part, prompts, patches)
        hidden = self.model.model(**inputs).last_hidden_state[:, -1]
        logits = self.model.lm_head(hidden)[:, [self.yes, self.no]].float()
        return list((logits / self.temperature).softmax(-1)[:, 0].tolist())

    def _prompt_ids(self, question: Question, patches: _ImagePatches) -> list[int]:
        content = [*({"type": "image"} for _ in question.images), {"type": "text", "text": question.text}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )
        pieces = text.split(self.processor.image_token)
        merged = self.processor.image_processor.merge_size**2
        for image, piece in zip(question.images, pieces[1:], strict=True):
            pieces[0] += self.processor.image_token * (patches.count(image) // merged) + piece
        return list(self.processor.tokenizer(pieces[0]).input_ids)

    def _inputs(
        self, part: Sequence[Question], prompts: Sequence[list[int]], patches: _ImagePatches
    ) -> dict[str, Tensor]:
        """Left-padded, so that the last position of every row is where the answer begins."""
        length = max(map(len, prompts))
        ids = torch.full((len(part), length), self.processor.tokenizer.pad_token_id)
        attended = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, length - len(prompt) :] = torch.tensor(prompt)
            attended[row, length - len(prompt) :] = 1
        images = [image for question in part for image in question.images]
        inputs = {
            "input_ids": ids,
            "attention_mask": attended,
            "mm_token_type_ids": (ids == self.processor.image_token_id).int(),
            "pixel_values": torch.cat([patches.pixels(image) for image in images]).to(self.model.dtype),
            "image_grid_thw": torch.cat([patches.grid(image) for image in images]),
        }
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}


JUDGES: dict[str, Callable[..., Judge]] = {"local": LocalJudge.from_pretrained, "http": HttpJudge.connect}


def single_token(tokenizer: Any, word: str) -> int:
    """The id of a word that must be one token. Raises ValueError where it is not."""
    ids = tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens for this judge's tokenizer, and must be one to be a score")
    return int(ids[0])


class _ImagePatches:
    """The image processor's output for each distinct image, prepared once."""

    def __init__(self, image_processor: Any) -> None:
        self._processor = image_processor
        self._done: dict[int, dict[str, Tensor]] = {}

    def pixels(self, image: Image) -> Tensor:
        return self._of(image)["pixel_values"]

    def grid(self, image: Image) -> Tensor:
        return self._of(image)["image_grid_thw"]

    def count(self, image: Image) -> int:
        return len(self.pixels(image))

    def _of(self, image: Image) -> dict[str, Tensor]:
        if id(image) not in self._done:
            self._done[id(image)] = self._processor(images=[image.convert("RGB")], return_tensors="pt")
        return self._done[id(image)]


def _key(question: Question) -> tuple[Any, ...]:
    return (*(id(image) for image in question.images), question.text)
