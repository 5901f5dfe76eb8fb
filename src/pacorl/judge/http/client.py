"""The servers of one judge: which of them takes the next request, what each said of itself, and what its errors mean.

Everything here runs on the judge's own event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pacorl.io.net import MALFORMED, UNAVAILABLE, Answer, Circuit, TransientError, exchange
from pacorl.io.outage import Outage, retried
from pacorl.judge.http.endpoints import api_url, root_url
from pacorl.judge.http.messages import OPTIONAL_FIELDS, DeclinedError, Json, TokenIds, UnansweredError
from pacorl.judge.judge import Counters, JudgeFacts, JudgeRefusedError

T = TypeVar("T")

DECLINE_HEADER = "X-Pacorl-Decline"
"""`no`: the server is to judge images outside of its judge's domain too (`judge.domain`)."""
DECLINED = "declined"
"""What the built-in server calls the error of a request that its judge declines."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and what it said of itself."""

    url: str
    slots: asyncio.Semaphore
    circuit: Circuit
    load: int = 0
    """Questions that wait for it or are being answered by it."""
    handshaking: asyncio.Lock = field(default_factory=asyncio.Lock)
    served: tuple[str, ...] | None = None
    """Model names; None before the handshake."""
    ids: TokenIds | None = None
    """None if the server does not tell, or takes no ids."""
    refused_fields: set[str] = field(default_factory=set)
    """The `OPTIONAL_FIELDS` that it refused, and is not sent again."""
    version: str = ""


class FieldRefusedError(Exception):
    """A server refused an optional field of a request by name."""


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
        self.model, self.words, self.timeout, self.retries = model, words, timeout, retries
        self.counters, self._key = counters, key
        self._headers = {} if decline else {DECLINE_HEADER: "no"}
        self.endpoints = [
            Endpoint(url, asyncio.Semaphore(slots), Circuit(timeout)) for url in map(api_url, dict.fromkeys(urls))
        ]
        self.outage: Outage | None = None
        """None: a question is given up after its tries, and at once while all servers are silent."""

    def wait_for_outages(self, seconds: float) -> None:
        """From now on retry questions that no server answers, for up to `seconds`."""
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        circuits = [endpoint.circuit for endpoint in self.endpoints]
        self.outage = Outage(f"judge {self.model} at {urls}", circuits, seconds=seconds)

    async def check(self, *, patience: float = 0.0) -> list[Endpoint]:
        """Shakes hands with every server, and waits up to `patience` seconds for one that does not answer yet.

        Raises:
            JudgeRefusedError: for a wrong name or key.
            ConnectionError: if a server is down.
        """
        deadline = time.monotonic() + patience
        for endpoint in self.endpoints:
            while True:
                try:
                    await self.handshake(endpoint)
                    break
                except TransientError as fault:
                    if (left := deadline - time.monotonic()) <= 0:
                        raise ConnectionError(f"no judge at {endpoint.url}: {fault}") from None
                await asyncio.sleep(min(1.0, left))
        return self.endpoints

    # --- one request -------------------------------------------------------------------------------------------

    async def ask(self, body: Callable[[Endpoint], Json], read: Callable[[Json, Endpoint], T]) -> T:
        """Posts until `read` accepts an answer.

        Raises:
            UnansweredError: after the last retry, or if all servers are silent.
            UnreachableError: if they are, and stay so for as long as `wait_for_outages` says.
            JudgeRefusedError: for a wrong name or key.
        """

        async def attempt(number: int) -> T:
            async with self.acquire_endpoint() as endpoint:
                self.counters.retries += number > 0
                await self.handshake(endpoint)
                return await self._chat(endpoint, body, lambda answer: read(answer, endpoint))

        try:
            return await retried(attempt, tries=self.retries + 1, outage=self.outage)
        except TransientError as fault:
            raise UnansweredError(str(fault)) from None

    async def _chat(self, endpoint: Endpoint, body: Callable[[Endpoint], Json], read: Callable[[Json], T]) -> T:
        """`read` of one answer; asked again at once without each optional field that the server refuses."""
        while True:
            self.counters.requests += 1
            accepted = {name: value for name, value in body(endpoint).items() if name not in endpoint.refused_fields}
            try:
                return await self._call(endpoint, "/chat/completions", accepted, read)
            except FieldRefusedError:
                continue  # a field is refused once, since it is not sent again

    @asynccontextmanager
    async def acquire_endpoint(self) -> AsyncIterator[Endpoint]:
        """A free slot of the least loaded server; one that did not answer lately only if none did.

        Raises SilentError if all are silent; one question at a time finds out whether they still are.
        """
        while True:
            endpoint = min(self.endpoints, key=self._preference)
            endpoint.load += 1
            try:
                async with endpoint.slots:
                    # It may have failed while this question waited.
                    if self._is_worth_trying(endpoint):
                        yield endpoint
                        return
            finally:
                endpoint.load -= 1

    def _preference(self, endpoint: Endpoint) -> tuple[bool, bool, int, float]:
        """A server's rank among those that may take a question, the lowest first."""
        circuit = endpoint.circuit
        # In an outage the servers are probed in turn, however long each of them has been silent.
        broken = circuit.broken and not self.outage
        return broken, circuit.cooling_down, endpoint.load, circuit.cooldown_until

    def _is_worth_trying(self, endpoint: Endpoint) -> bool:
        """Whether no other server is a better choice. Raises SilentError if none is worth a question now."""
        given_up = not self.outage and all(e.circuit.broken for e in self.endpoints)
        others_answer = not all(e.circuit.cooling_down for e in self.endpoints)
        if not given_up and endpoint.circuit.cooling_down and others_answer:
            return False
        if given_up:
            endpoint.circuit.check()
        elif self.outage:
            self.outage.check()
        return True

    async def _call(
        self, endpoint: Endpoint, path: str, body: Json | None, read: Callable[[Json], T], *, root: bool = False
    ) -> T:
        """`read` of one answer; faults are sorted into transient, unanswerable and refused."""
        url = (root_url(endpoint.url) if root else endpoint.url) + path
        with endpoint.circuit.noting():
            answer = await exchange(url, body, seconds=self.timeout, key=self._key, headers=self._headers)
            # Not of the root's pages, which a gateway may not pass on.
            if answer.status in UNAVAILABLE and not root:
                raise answer.fault(unreachable=True)
        if answer.status != 200:
            raise self._sorted(answer, endpoint, path, body)
        document = answer.document()
        try:
            return read(document)
        except JudgeRefusedError:
            raise
        except MALFORMED as fault:
            raise TransientError(f"an answer of another form ({type(fault).__name__})") from None

    def _sorted(self, answer: Answer, endpoint: Endpoint, path: str, body: Json | None) -> Exception:
        """What an HTTP error status means for a question."""
        fault, error = answer.fault(), answer.error()
        if answer.redirect:
            fix = f"redirects are not followed; name that address if it is the judge's: {answer.redirect}"
            return (JudgeRefusedError if path == "/models" else UnansweredError)(f"{endpoint.url}: {fault}; {fix}")
        if answer.status == 422 and error.get("type") == DECLINED:
            return DeclinedError(str(error.get("message")))
        if answer.status in (401, 403):
            return JudgeRefusedError(f"{endpoint.url} refuses the key: {fault}; name its variable with api_key_env")
        if answer.status in (400, 422) and _leave_out(endpoint, body or {}, refusal=str(fault)):
            return FieldRefusedError(str(fault))
        if answer.status == 404 and path == "/chat/completions" and endpoint.served is not None:
            endpoint.served = None  # the model may have gone: shake hands again, which raises if it has
            return fault
        return fault if answer.passing or answer.status < 300 else UnansweredError(str(fault))

    # --- the handshake -----------------------------------------------------------------------------------------

    async def handshake(self, endpoint: Endpoint) -> None:
        """Learns what a server serves and how it spells Yes and No, once."""
        async with endpoint.handshaking:
            if endpoint.served is not None:
                return
            try:
                served = await self._call(endpoint, "/models", None, _model_names)
            except UnansweredError:  # not every server has the page
                served = ()
            if served and self.model not in served:
                names = ", ".join(served[:20])[:500]
                raise JudgeRefusedError(f"{endpoint.url} serves no model {self.model!r}; it serves {names}")
            endpoint.ids = await self._token_ids(endpoint)
            endpoint.version = await self._optional(endpoint, "/version", None, _version) or ""
            endpoint.served = served  # last: it says that the handshake is complete

    async def _token_ids(self, endpoint: Endpoint) -> TokenIds | None:
        """The ids of the words that are single tokens, from vLLM's /tokenize; None if there is no such page."""
        ids: list[tuple[int, ...]] = []
        for words in self.words:
            single: list[int] = []
            for word in words:
                body = {"model": self.model, "prompt": word, "add_special_tokens": False}
                tokens = await self._optional(endpoint, "/tokenize", body, _tokens)
                if tokens is None:
                    return None
                single += tokens if len(tokens) == 1 else []
            if not single:
                raise JudgeRefusedError(
                    f"{words[0]!r} is not a single token for {self.model} at {endpoint.url}, and must be one"
                )
            ids.append(tuple(single))
        return ids[0], ids[1]

    async def _optional(self, endpoint: Endpoint, page: str, body: Json | None, read: Callable[[Json], T]) -> T | None:
        """A page of the server's root that not every server has (and that a gateway may guard otherwise)."""
        try:
            return await self._call(endpoint, page, body, read, root=True)
        except (UnansweredError, JudgeRefusedError):
            return None
        except TransientError as fault:
            if fault.unreachable:
                raise
            return None


def facts_of(endpoints: Sequence[Endpoint]) -> JudgeFacts:
    """What servers said of themselves."""
    yes_ids, no_ids = next((endpoint.ids for endpoint in endpoints if endpoint.ids), ((), ()))
    return JudgeFacts(
        yes_ids=yes_ids,
        no_ids=no_ids,
        served={endpoint.url: endpoint.served or () for endpoint in endpoints},
        versions={f"server at {endpoint.url}": endpoint.version for endpoint in endpoints if endpoint.version},
    )


def _leave_out(endpoint: Endpoint, body: Json, *, refusal: str) -> bool:
    """Leave the optional fields that a server refuses by name out of later requests; return whether there are any."""
    if "token_ids" in refusal and "logprob_token_ids" in body:
        endpoint.ids = None  # it takes no ids: ask it for the likeliest tokens instead
        return True
    refused = {name for name in OPTIONAL_FIELDS if name in body and name in refusal}
    endpoint.refused_fields |= refused
    return bool(refused)


def _model_names(answer: Json) -> tuple[str, ...]:
    return tuple(str(model["id"]) for model in answer.get("data") or () if isinstance(model, dict) and "id" in model)


def _version(answer: Json) -> str:
    return str(answer.get("version", ""))[:60]


def _tokens(answer: Json) -> list[int]:
    tokens = answer["tokens"]
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise TypeError("tokens are numbers from 0")
    return tokens
