"""Running a judge's model on whole conversations: next-token log-probabilities in batches, and generation.

The plain transformers path: nothing is shared between the questions of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacorl.models.judge import LocalJudge
from pacorl.serve.schema import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation as the model's chat template writes it, and its images in order."""

    text: str
    images: tuple[Image, ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated, and of every position the log-probabilities of the whole vocabulary."""

    ids: tuple[int, ...]
    log_probs: Tensor
    """(tokens, vocabulary), fp64; no rows where they were not asked for."""
    stopped: bool
    """Whether the model ended by itself."""


class Conversations:
    """A judge's model and processor; one call at a time (positions are state of the model)."""

    def __init__(self, judge: LocalJudge) -> None:
        self.judge = judge
        self.tokenizer: Any = judge.processor.tokenizer
        self.vocabulary: int = judge.model.get_input_embeddings().num_embeddings

    def prompt(self, messages: Sequence[Message], images: Sequence[Image]) -> Prompt:
        """Raises ValueError where a text holds one of the tokens that structure a conversation."""
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        text = self.judge.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return Prompt(str(text), tuple(images))

    @torch.inference_mode()
    def next_token(self, prompts: Sequence[Prompt]) -> Tensor:
        """(prompts, vocabulary) log-probabilities of the first answer token, in fp64 on the CPU."""
        logits = self.judge.model(**self._inputs(prompts), use_cache=False, logits_to_keep=1).logits[:, -1]
        return _log_probs(logits)

    @torch.inference_mode()
    def generate(
        self, prompt: Prompt, *, max_new_tokens: int, temperature: float, top_p: float, seed: int | None, scored: bool
    ) -> Continuation:
        """Goes on from a prompt; at temperature 0 with the likeliest token each time."""
        inputs = self._inputs([prompt])
        sampling = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}  # type: ignore[dict-item]
            if seed is not None:
                torch.manual_seed(seed)
        output = self.judge.model.generate(
            **inputs,
            **sampling,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            output_logits=scored,
        )
        ids = tuple(output.sequences[0, inputs["input_ids"].shape[1] :].tolist())
        rows = _log_probs(torch.cat(output.logits)) if scored else torch.empty(0, self.vocabulary)
        return Continuation(ids, rows, stopped=bool(ids) and self.ends_with(ids[-1]))

    def ends_with(self, token: int) -> bool:
        """Whether a token ends an answer."""
        ends = self.judge.model.generation_config.eos_token_id
        return token == ends if isinstance(ends, int) else token in (ends or ())

    def _content(self, message: Message) -> list[dict[str, str]]:
        content = []
        for part in message.parts:
            if isinstance(part, ImagePart):
                content.append({"type": "image"})
                continue
            for token in self.tokenizer.all_special_tokens:
                if token in part.text:
                    raise ValueError(f"a message's text may not hold the control token {token}")
            content.append({"type": "text", "text": part.text})
        return content

    def _inputs(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Left-padded, so that the last position of every row is where the answer begins."""
        images = [image for prompt in prompts for image in prompt.images]
        inputs = self.judge.processor(
            text=[prompt.text for prompt in prompts],
            images=images or None,
            padding=True,
            padding_side="left",
            return_tensors="pt",
        ).to(self.judge.model.device)
        if images:
            inputs["pixel_values"] = inputs["pixel_values"].to(self.judge.model.dtype)
        return dict(inputs)


def pick_token(log_probs: Tensor, *, temperature: float, top_p: float = 1.0, seed: int | None = None) -> int:
    """A token of one position: the likeliest at temperature 0, else one drawn from the nucleus of mass `top_p`."""
    if temperature == 0:
        return int(log_probs.argmax())
    probability, token = (log_probs / temperature).softmax(-1).sort(descending=True)
    probability[probability.cumsum(-1) - probability >= top_p] = 0  # the likeliest always stays
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return int(token[probability.multinomial(1, generator=generator)])


def _log_probs(logits: Tensor) -> Tensor:
    # fp64: a log-probability of −20 in fp32 is known to 1e-6 only, and P(Yes) is a difference of two.
    return logits.double().log_softmax(-1).cpu()
