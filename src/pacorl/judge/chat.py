"""Client of a language model behind an OpenAI-compatible API, with validated answers.

The key is read from an environment variable and never logged. Faults of the wire are retried by the client; invalid
answers are sent back with their fault.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from pacorl.io.documents import object_within, typed
from pacorl.io.net import ServiceFault, client_options, is_url, own_headers, service_faults, service_url
from pacorl.judge.judge import split_address

KEY = "OPENAI_API_KEY"
"""The environment variable that holds the key; servers without keys need none."""
OPENAI_URL = "https://api.openai.com/v1"
ATTEMPTS = 3
"""Answers that are asked for, at most, until one can be used."""

Message = dict[str, Any]
Reply = TypeVar("Reply", bound=BaseModel)


class ChatError(ValueError):
    """A question remains without a usable answer. Later questions may succeed."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model behind an endpoint. Safe to use from several threads."""

    model: str
    base_url: str = ""
    """Empty for OPENAI_BASE_URL, or OpenAI's own."""
    timeout_seconds: float = 120.0
    retries: int = 5
    """Retries after transport faults (time-outs, 429, 5xx)."""

    @classmethod
    def at(cls, source: str) -> ChatModel:
        """Resolve `URL#MODEL`, as of a judge, or a model's name. Raises ValueError if no model is named."""
        address, _, model = source.rpartition("#")
        if not model or is_url(model):
            raise ValueError(f"{source!r} names no language model; give one, such as http://127.0.0.1:8000/v1#MODEL")
        return cls(model, base_url=split_address(address)[0] if address else "")

    def ask(self, messages: Sequence[Message]) -> str:
        """Return the model's answer. Raises ChatError, or ServiceRefusedError if no question will be answered."""
        import httpx2
        import openai

        base = self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        url = service_url(base, name="endpoint").rstrip("/")
        key = os.environ.get(KEY, "").strip()
        with httpx2.Client(**client_options(url, seconds=self.timeout_seconds, key=key)) as transport:
            client = openai.OpenAI(base_url=url, api_key="-", http_client=transport, max_retries=self.retries)
            service = {"model": self.model, "key": key, "key_variable": KEY}
            try:
                with service_faults(url, seconds=self.timeout_seconds, **service):
                    # No temperature or the like: servers differ in what they take.
                    answer = client.chat.completions.create(
                        model=self.model, messages=cast("Any", list(messages)), extra_headers=own_headers()
                    )
                    text = answer.choices[0].message.content
            except ServiceFault as fault:
                raise ChatError(f"no answer from {url}: {fault}") from None
        if not isinstance(text, str) or not text:
            raise ChatError("the answer is empty")
        return text

    def ask_json(self, messages: Sequence[Message], schema: type[Reply], *, check: Callable[[Reply], None]) -> Reply:
        """Ask for an answer by `schema` that passes `check`; faults are sent back to the model.

        Args:
            check: raises ValueError for an unusable answer.

        Raises:
            ChatError: if no attempt gives a usable answer.
        """
        # Only the last faulty answer is sent back: a growing conversation costs more each time.
        conversation = list(messages)
        fault = ""
        for _ in range(ATTEMPTS):
            text = self.ask(conversation)
            try:
                answer = typed(object_within(text), schema)
                check(answer)
                return answer
            except ValueError as error:
                fault = str(error)
            plea = f"That answer cannot be used: {fault}. Answer again, with the corrected JSON object only."
            conversation = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": plea}]
        raise ChatError(f"{ATTEMPTS} answers in a row could not be used; the last: {fault}")
