"""Client of a language model behind an OpenAI-compatible API, with validated answers.

The key is read from an environment variable and never logged. Transport faults are retried with
backoff; invalid answers are sent back with their fault.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel

from pacorl.io.documents import object_within, typed
from pacorl.io.net import MALFORMED, Answer, Circuit, TransientError, blocking, service_url
from pacorl.io.outage import ask
from pacorl.judge.http.messages import only_choice

OPENAI_URL = "https://api.openai.com/v1"

Message = dict[str, Any]
Reply = TypeVar("Reply", bound=BaseModel)


class ChatError(ValueError):
    """One question remains without a usable answer; others may fare better."""


class ChatRefusedError(ValueError):
    """No question will be answered: unknown model, refused key, no such server."""


@dataclass(slots=True)
class Usage:
    """Counts of requests and tokens so far."""

    calls: int = 0
    malformed: int = 0
    """Answers that had to be asked for again: no JSON, or not by the schema."""
    contradicted: int = 0
    failed: int = 0
    """Questions that ended without a usable answer."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def with_cost(self, price: tuple[float, float]) -> dict[str, float]:
        """The counts, and their cost in the currency of `price`, which is per million prompt and completion tokens."""
        cost = (self.prompt_tokens * price[0] + self.completion_tokens * price[1]) / 1e6
        return asdict(self) | {"cost": cost}


@dataclass(slots=True)
class ChatModel:
    """A model behind an endpoint. Safe to use from several threads."""

    model: str
    base_url: str = ""
    """Empty for OPENAI_BASE_URL, or OpenAI's own."""
    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; servers without keys need none."""
    timeout_seconds: float = 120.0
    retries: int = 5
    """Of transport faults (time-outs, 429, 5xx)."""
    usage: Usage = field(default_factory=Usage)
    _circuit: Circuit = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._circuit = Circuit(self.timeout_seconds)

    def ask(self, messages: Sequence[Message]) -> str:
        """Return the model's answer. Raises ChatError for no usable answer, ChatRefusedError if no retry helps."""
        # No temperature or the like: servers differ in what they take.
        document = {"model": self.model, "messages": list(messages)}

        # Address and key.
        base = self.base_url or os.environ.get("OPENAI_BASE_URL") or OPENAI_URL
        url = f"{service_url(base, name='endpoint').rstrip('/')}/chat/completions"
        key = os.environ.get(self.key_variable, "")
        options: dict[str, Any] = {"tries": self.retries + 1, "seconds": self.timeout_seconds, "key": key}
        options["circuit"] = self._circuit
        try:
            return blocking(ask(url, document, self._read, **options))
        except TransientError as fault:
            raise ChatError(f"no answer: {fault}") from None

    def _read(self, answer: Answer) -> str:
        # These answer every question alike; other faults are of one question, or of the moment.
        if answer.status in (401, 403, 404) or answer.redirect:
            fault = f"the server refuses {self.model!r}: {answer.fault()}"
            # A redirect could send the key to another host.
            if answer.redirect:
                fault += f"; redirects are not followed, name {answer.redirect} if it is yours"
            raise ChatRefusedError(fault)
        if answer.status != 200:
            raise ChatError(str(answer.fault()))
        try:
            document = answer.document()
            used = document.get("usage") or {}
            text = only_choice(document)["message"]["content"]
            tokens = {}
            for name in ("prompt_tokens", "completion_tokens"):
                tokens[name] = int(used.get(name) or 0)
        except MALFORMED as fault:
            raise TransientError(f"an answer of another form ({type(fault).__name__})") from None
        self.count(calls=1, **tokens)
        if not isinstance(text, str) or not text:
            raise ChatError("the answer is empty")
        return text

    def ask_json(
        self, messages: Sequence[Message], schema: type[Reply], *, check: Callable[[Reply], None], attempts: int = 3
    ) -> Reply:
        """Ask for JSON, as the function `ask_json` does, and count the malformed answers."""
        on_fault = partial(self.count, malformed=1)
        return ask_json(self.ask, messages, schema, check=check, attempts=attempts, on_fault=on_fault)

    def count(self, **counts: int) -> None:
        """Add to the usage, e.g. `count(failed=1)`."""
        with self._lock:
            for name, number in counts.items():
                setattr(self.usage, name, getattr(self.usage, name) + number)


def ask_json(
    ask: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    schema: type[Reply],
    *,
    check: Callable[[Reply], None],
    attempts: int = 3,
    on_fault: Callable[[], None] = lambda: None,
) -> Reply:
    """Ask a language model for an answer by `schema` that passes `check`; faults are sent back to it.

    Args:
        ask: messages → the answer's text.
        check: raises ValueError for an unusable answer.
        on_fault: called after each such answer.

    Raises:
        ChatError: if no attempt gives a usable answer.
    """
    # Only the last faulty answer is sent back: a growing conversation costs more each time.
    conversation = list(messages)
    fault = ""
    for _ in range(attempts):
        text = ask(conversation)
        try:
            answer = typed(object_within(text), schema)
            check(answer)
            return answer
        except ValueError as error:
            fault = str(error)
        on_fault()
        plea = f"That answer cannot be used: {fault}. Answer again, with the corrected JSON object only."
        conversation = [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": plea}]
    raise ChatError(f"{attempts} answers in a row could not be used; the last: {fault}")
