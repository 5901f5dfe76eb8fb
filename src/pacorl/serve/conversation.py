"""Whole conversations put to a judge: their prompt, and answers of more than one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pacorl.judges.local import LocalJudge, log_softmax
from pacorl.judges.prompting import ChatPrompt, DistinctImage
from pacorl.serve.schema import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class Continuation:
    """What was generated, and of every position the log-probabilities of the whole vocabulary."""

    ids: tuple[int, ...]
    log_probs: Tensor
    """(tokens, vocabulary), fp64; no rows if they were not asked for."""
    stopped: bool
    """Whether the model ended by itself."""


class Conversations:
    """A judge that is talked to; one call at a time."""

    def __init__(self, judge: LocalJudge) -> None:
        self.judge = judge
        self.tokenizer: Any = judge.processor.tokenizer
        self.vocabulary: int = judge.model.get_input_embeddings().num_embeddings

    def prompt(self, messages: Sequence[Message], images: Sequence[Image]) -> ChatPrompt:
        """Raises ValueError if a text holds one of the tokens that structure a conversation."""
        turns = [{"role": message.role, "content": self._content(message)} for message in messages]
        distinct = tuple(DistinctImage.of(image, name=f"image {number}") for number, image in enumerate(images, 1))
        return ChatPrompt(self.judge.prompting.chat_text(turns), distinct)

    def generate(
        self,
        prompt: ChatPrompt,
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        scored: bool,
    ) -> Continuation:
        """Goes on from a prompt; at temperature 0 with the likeliest token each time."""
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
            if seed is not None:
                torch.manual_seed(seed)
        output = self.judge.generate(prompt, max_new_tokens=max_new_tokens, output_logits=scored, **sampling)
        ids = tuple(output.sequences[0].tolist())
        rows = log_softmax(torch.cat(output.logits)) if scored else torch.empty(0, self.vocabulary)
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
