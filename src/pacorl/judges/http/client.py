"""The servers of one judge: which of them takes the next request, what each said of itself, and what its errors mean.

Everything here runs on the judge's own event loop.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pacorl.judges.http.endpoints import api_url, root_url
from pacorl.judges.http.messages import DeclinedError, Json, TokenIds, TransientError, UnansweredError
from pacorl.judges.judge import Counters, JudgeRefusedError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")

DECLINE_HEADER = "X-Pacorl-Decline"
"""`no`: the server is to judge images outside of its judge's domain too (`judges.domain`)."""
DECLINED = "declined"
"""What the built-in server calls the error of a request that its judge declines."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 20.0
COOLDOWN_SECONDS = 10.0
"""How long an endpoint that did not answer is spared while others do."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and what it said of itself."""

    url: str
    client: AsyncOpenAI
    slots: asyncio.Semaphore
    load: int = 0
    """Questions that wait for it or are being answered by it."""
    cooldown_until: float = 0.0
    handshaking: asyncio.Lock = field(default_factory=asyncio.Lock)
    served: tuple[str, ...] | None = None
    """Model names; None before the handshake."""
    ids: TokenIds | None = None
    """None if the server does not tell, or takes no ids."""
    version: str = ""

    @property
    def cooling_down(self) -> bool:
        return asyncio.get_running_loop().time() < self.cooldown_until


class EndpointPool:
    """Sends requests to the least loaded server that answers, again if need be."""

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        *,
        words: Sequence[Sequence[str]],
        key: str,
        slots: int,
        timeout: float,
        retries: int,
        decline: bool,
        counters: Counters,
    ) -> None:
        """
        Args:
            words: The spellings of Yes and of No whose ids are asked for.
            slots: Requests that one server is sent at a time.
            timeout: Seconds for a whole answer, its body included.
        """
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise ValueError("a judge over HTTP needs the openai client: pip install 'pacorl[serve]'") from None

        self.model, self.words, self.timeout, self.retries = model, words, timeout, retries
        self.counters, self._key = counters, key
        # A key for other services must not travel to this one, so the client never looks for one itself. Retries are
        # ours: its own would go to the same server again.
        options: dict[str, Any] = {"api_key": key or "none", "max_retries": 0, "timeout": timeout}
        options["default_headers"] = {} if decline else {DECLINE_HEADER: "no"}
        self.endpoints = [
            Endpoint(url, AsyncOpenAI(base_url=url, **options), asyncio.Semaphore(slots))
            for url in map(api_url, dict.fromkeys(urls))
        ]

    async def close(self) -> None:
        """Closes every connection."""
        for endpoint in self.endpoints:
            await endpoint.client.close()

    async def check(self) -> list[Endpoint]:
        """Shakes hands with every server now.

        Raises:
            JudgeRefusedError: for a wrong name or key.
            ConnectionError: if a server is down.
        """
        for endpoint in self.endpoints:
            try:
                await self.handshake(endpoint)
            except TransientError as fault:
                raise ConnectionError(f"no judge at {endpoint.url}: {fault}") from None
        return self.endpoints

    # --- one request -------------------------------------------------------------------------------------------

    async def ask(self, body: Callable[[Endpoint], Json], read: Callable[[Json, Endpoint], T]) -> T:
        """Posts until `read` accepts an answer.

        Raises:
            UnansweredError: after the last retry.
            JudgeRefusedError: for a wrong name or key.
        """
        for attempt in range(self.retries + 1):
            self.counters.retries += attempt > 0
            try:
                async with self.acquire_endpoint() as endpoint:
                    await self.handshake(endpoint)
                    self.counters.requests += 1
                    answer = await self._call(endpoint, "/chat/completions", body(endpoint))
                    endpoint.cooldown_until = 0.0
                    return read(answer, endpoint)
            except TransientError as fault:
                reason, wait = str(fault), fault.wait
                # Nothing is awaited since the slot was freed, so who waits for it sees the cooldown.
                if fault.unreachable:
                    endpoint.cooldown_until = asyncio.get_running_loop().time() + COOLDOWN_SECONDS
            if attempt < self.retries:
                # Exponential with jitter, so that ranks that failed together do not come back together.
                longest = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2**attempt)
                await asyncio.sleep(max(wait, random.uniform(longest / 2, longest)))
        raise UnansweredError(f"{reason} (attempt {self.retries + 1}, the last)")

    @asynccontextmanager
    async def acquire_endpoint(self) -> AsyncIterator[Endpoint]:
        """A free slot of the least loaded server; one that did not answer lately only if none did."""
        while True:
            endpoint = min(self.endpoints, key=lambda e: (e.cooling_down, e.load))
            endpoint.load += 1
            try:
                async with endpoint.slots:
                    # It may have failed while this question waited.
                    if not endpoint.cooling_down or all(e.cooling_down for e in self.endpoints):
                        yield endpoint
                        return
            finally:
                endpoint.load -= 1

    async def _call(self, endpoint: Endpoint, path: str, body: Json | None = None) -> Json:
        """One request and its JSON object; its faults sorted into transient, unanswerable and refused."""
        import openai

        try:
            async with asyncio.timeout(self.timeout):  # over all: a body that trickles in would reset the client's own
                if body is None:
                    answer = await endpoint.client.get(path, cast_to=object)
                else:
                    answer = await endpoint.client.post(path, cast_to=object, body=body)
        except (TimeoutError, openai.APITimeoutError):
            raise TransientError(f"no answer within {self.timeout:g} s", unreachable=True) from None
        except openai.APIConnectionError as fault:
            raise TransientError(f"no connection: {fault.__cause__ or fault}", unreachable=True) from None
        except openai.APIStatusError as fault:
            raise self._sorted(fault, endpoint, path, body) from None
        except (openai.OpenAIError, ValueError) as fault:
            raise TransientError(f"an answer that is not JSON ({self._redacted(str(fault))})") from None
        if not isinstance(answer, dict):
            raise TransientError("an answer that is not a JSON object")
        return answer

    def _sorted(self, fault: Any, endpoint: Endpoint, path: str, body: Json | None) -> Exception:
        """What an HTTP error status means for a question."""
        status: int = fault.status_code
        message = self._redacted(_message_of(fault))
        reason = f"HTTP {status}: {message}"
        if status == 422 and isinstance(fault.body, dict) and fault.body.get("type") == DECLINED:
            return DeclinedError(message)
        if status in (401, 403):
            return JudgeRefusedError(f"{endpoint.url} refuses the key: {reason}; name its variable with api_key_env")
        if status in (408, 409, 425, 429) or status >= 500:
            return TransientError(reason, wait=_retry_after(fault.response.headers))
        if status in (400, 422) and "token_ids" in reason and "logprob_token_ids" in (body or {}):
            endpoint.ids = None  # it takes no ids: ask it for the likeliest tokens instead
            return TransientError(reason)
        if status == 404 and path == "/chat/completions" and endpoint.served is not None:
            endpoint.served = None  # the model may have gone: shake hands again, which raises if it has
            return TransientError(reason)
        return UnansweredError(reason)

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    # --- the handshake -----------------------------------------------------------------------------------------

    async def handshake(self, endpoint: Endpoint) -> None:
        """Learns what a server serves and how it spells Yes and No, once."""
        async with endpoint.handshaking:
            if endpoint.served is not None:
                return
            try:
                models = (await self._call(endpoint, "/models")).get("data", [])
            except UnansweredError:  # not every server has the page
                models = []
            served = tuple(str(model["id"]) for model in models if isinstance(model, dict) and "id" in model)
            if served and self.model not in served:
                raise JudgeRefusedError(f"{endpoint.url} serves no model {self.model!r}; it serves {', '.join(served)}")
            endpoint.ids = await self._token_ids(endpoint)
            endpoint.version = str((await self._optional(endpoint, "/version")).get("version", ""))
            endpoint.served = served  # last: it says that the handshake is complete

    async def _token_ids(self, endpoint: Endpoint) -> TokenIds | None:
        """The ids of the words that are single tokens, from vLLM's /tokenize; None if there is no such page."""
        ids: list[tuple[int, ...]] = []
        for words in self.words:
            single: list[int] = []
            for word in words:
                body = {"model": self.model, "prompt": word, "add_special_tokens": False}
                tokens = (await self._optional(endpoint, "/tokenize", body)).get("tokens")
                if not isinstance(tokens, list):
                    return None
                single += [int(token) for token in tokens] if len(tokens) == 1 else []
            if not single:
                raise JudgeRefusedError(
                    f"{words[0]!r} is not a single token for {self.model} at {endpoint.url}, and must be one"
                )
            ids.append(tuple(single))
        return ids[0], ids[1]

    async def _optional(self, endpoint: Endpoint, page: str, body: Json | None = None) -> Json:
        """A page of the server's root that not every server has (and that a gateway may guard otherwise)."""
        try:
            return await self._call(endpoint, root_url(endpoint.url) + page, body)
        except (UnansweredError, JudgeRefusedError):
            return {}
        except TransientError as fault:
            if fault.unreachable:
                raise
            return {}


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return min(MAX_BACKOFF_SECONDS, max(0.0, float(headers.get("retry-after", "0"))))
    except ValueError:  # it may be a date
        return 0.0


def _message_of(fault: Any) -> str:
    body = fault.body
    message = body.get("message", body) if isinstance(body, dict) else body
    text = message if isinstance(message, str) else json.dumps(message, default=str)
    return " ".join(text.split())[:300]
