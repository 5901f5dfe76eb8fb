"""The servers of one judge: load balancing, handshakes and error handling, all on the judge's own event loop.

Questions about one image go to one server, whose caches then have its features and the prefixes that begin with it.
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
from pacorl.judge.http.messages import OPTIONAL_FIELDS, Json, TokenIds, UnansweredError
from pacorl.judge.judge import Counters, JudgeRefusedError

T = TypeVar("T")

MOST_NOTE = 500
"""Most characters of a server's note."""
HOMES = 10_000
"""Most images whose servers are remembered."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server and the results of its handshake."""

    url: str
    slots: asyncio.Semaphore
    circuit: Circuit
    load: int = 0
    """Number of waiting and running questions."""
    handshaking: asyncio.Lock = field(default_factory=asyncio.Lock)
    served: tuple[str, ...] | None = None
    """Model names; None before the handshake."""
    ids: TokenIds | None = None
    """Token ids of Yes and No; None if unknown or unsupported."""
    refused_fields: set[str] = field(default_factory=set)
    """Refused `OPTIONAL_FIELDS`, left out from then on."""
    note: str = ""
    """Caveat of the server about the judge; empty for most."""


class FieldRefusedError(Exception):
    """A server refused an optional field of a request by name."""


class EndpointPool:
    """Load balancer over servers, with retries."""

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
        counters: Counters,
    ) -> None:
        """
        Args:
            words: The spellings of Yes and of No, for their token ids.
            slots: Concurrent requests per server.
            timeout: Seconds for a whole answer, its body included.
        """
        # Settings of requests.
        self.model = model
        self.words = words
        self.timeout = timeout
        self.retries = retries
        self.counters = counters
        self._slots = slots
        self._homes: dict[str, Endpoint] = {}
        """Digest of an image → the server that was last asked about it."""
        self._key = key
        # Each address once: a repeated address would get twice its slots.
        self.endpoints: list[Endpoint] = []
        for url in dict.fromkeys(urls):
            self.endpoints.append(Endpoint(api_url(url), asyncio.Semaphore(slots), Circuit(timeout)))
        self.outage: Outage | None = None
        """Policy during an outage; None gives up a question after its tries, and at once if all servers are silent."""

    def wait_for_outages(self, seconds: float) -> None:
        """From now on retry questions that no server answers, for up to `seconds`."""
        urls = ", ".join(endpoint.url for endpoint in self.endpoints)
        circuits = [endpoint.circuit for endpoint in self.endpoints]
        self.outage = Outage(f"judge {self.model} at {urls}", circuits, seconds=seconds)

    async def check(self, *, patience: float = 0.0) -> list[Endpoint]:
        """Shake hands with every server, waiting up to `patience` seconds for silent servers.

        Raises:
            JudgeRefusedError: for a wrong name or key.
            ConnectionError: if a server is down.
        """
        # One deadline for all servers, which start at the same time.
        deadline = time.monotonic() + patience
        for endpoint in self.endpoints:
            while True:
                try:
                    await self.handshake(endpoint)
                    break
                except TransientError as fault:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise ConnectionError(f"no judge at {endpoint.url}: {fault}") from None
                await asyncio.sleep(min(1.0, left))
        return self.endpoints

    # --- one request -------------------------------------------------------------------------------------------

    async def ask(
        self, body: Callable[[Endpoint], Json], read: Callable[[Json, Endpoint], T], *, images: Sequence[str] = ()
    ) -> T:
        """Post until `read` accepts an answer.

        Args:
            images: Digests of the question's images.

        Raises:
            UnansweredError: after the last retry, or if all servers are silent.
            UnreachableError: if all stay silent for the seconds of `wait_for_outages`.
            JudgeRefusedError: for a wrong name or key.
        """
        # A retry prefers another server than the one that has just failed.
        tried: Endpoint | None = None

        async def attempt(number: int) -> T:
            nonlocal tried
            async with self.acquire_endpoint(images, tried) as endpoint:
                tried = endpoint
                self.counters.retries += number > 0
                await self.handshake(endpoint)
                return await self._chat(endpoint, body, lambda answer: read(answer, endpoint))

        try:
            return await retried(attempt, tries=self.retries + 1, outage=self.outage)
        except TransientError as fault:
            raise UnansweredError(str(fault)) from None

    async def _chat(self, endpoint: Endpoint, body: Callable[[Endpoint], Json], read: Callable[[Json], T]) -> T:
        """Apply `read` to one answer, repeating the request without each refused optional field."""
        while True:
            self.counters.requests += 1
            # Built anew each time: a refusal may have dropped the token ids.
            accepted = {}
            for name, value in body(endpoint).items():
                if name not in endpoint.refused_fields:
                    accepted[name] = value

            try:
                return await self._call(endpoint, "/chat/completions", accepted, read)
            except FieldRefusedError:
                continue  # a field is refused once, since it is not sent again

    @asynccontextmanager
    async def acquire_endpoint(
        self, images: Sequence[str] = (), tried: Endpoint | None = None
    ) -> AsyncIterator[Endpoint]:
        """Acquire a slot of the server that was asked about these images, or else of the least loaded one.

        Silent servers come last, and before them the one that this question has just `tried`.

        Raises SilentError if all are silent; one question at a time probes them.
        """
        while True:
            home = next((self._homes[image] for image in images if image in self._homes), None)
            endpoint = min(self.endpoints, key=lambda endpoint: self._preference(endpoint, home, tried))
            # Forgetting costs a prefix computed again; an entry for every image of a long run would cost memory.
            if len(self._homes) > HOMES:
                self._homes.clear()
            self._homes |= dict.fromkeys(images, endpoint)
            endpoint.load += 1
            try:
                async with endpoint.slots:
                    # It may have failed while this question waited.
                    if self._is_worth_trying(endpoint):
                        yield endpoint
                        return
            finally:
                endpoint.load -= 1

    def _preference(
        self, endpoint: Endpoint, home: Endpoint | None, tried: Endpoint | None
    ) -> tuple[bool, bool, bool, bool, int, float]:
        """Return a server's sort key, the lowest first; `home` has the question's images in its caches."""
        circuit = endpoint.circuit
        # In an outage the servers are probed in turn, however long each of them has been silent.
        broken = circuit.broken and not self.outage
        # A home behind by all its slots is left: computing a prefix again is cheaper than waiting.
        away = home is not None and endpoint is not home and home.load < endpoint.load + self._slots
        return broken, circuit.cooling_down, endpoint is tried, away, endpoint.load, circuit.cooldown_until

    def _is_worth_trying(self, endpoint: Endpoint) -> bool:
        """Return whether no other server is a better choice. Raises SilentError if none is worth a question now."""
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
        """Apply `read` to one answer, with faults sorted into transient, unanswerable and refused."""
        url = (root_url(endpoint.url) if root else endpoint.url) + path
        with endpoint.circuit.noting():
            answer = await exchange(url, body, seconds=self.timeout, key=self._key)
            # Except the root's pages, which a gateway may not forward.
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
        """Map an HTTP error status to an exception."""
        fault = answer.fault()
        if answer.redirect:
            fix = f"redirects are not followed; name that address if it is the judge's: {answer.redirect}"
            return (JudgeRefusedError if path == "/models" else UnansweredError)(f"{endpoint.url}: {fault}; {fix}")
        if answer.status in (401, 403):
            return JudgeRefusedError(
                f"{endpoint.url} refuses the key: {fault}; name its variable with --api-key-env or api_key_env"
            )
        if answer.status in (400, 422) and _leave_out(endpoint, body or {}, refusal=str(fault)):
            return FieldRefusedError(str(fault))
        if answer.status == 404 and path == "/chat/completions" and endpoint.served is not None:
            endpoint.served = None  # the model may have gone: shake hands again, which raises if it has
            return fault
        return fault if answer.passing or answer.status < 300 else UnansweredError(str(fault))

    # --- the handshake -----------------------------------------------------------------------------------------

    async def handshake(self, endpoint: Endpoint) -> None:
        """Query a server's models and token ids, once."""
        async with endpoint.handshaking:
            if endpoint.served is not None:
                return
            try:
                notes = await self._call(endpoint, "/models", None, _model_notes)
            except UnansweredError:  # not every server has the page
                notes = {}
            served = tuple(notes)
            endpoint.note = notes.get(self.model, "")
            if served and self.model not in served:
                names = ", ".join(served[:20])[:500]
                raise JudgeRefusedError(f"{endpoint.url} serves no model {self.model!r}; it serves {names}")
            endpoint.ids = await self._token_ids(endpoint)
            endpoint.served = served  # last: it marks the handshake as complete

    async def _token_ids(self, endpoint: Endpoint) -> TokenIds | None:
        """Query the ids of single-token words from vLLM's /tokenize; None if there is no such page."""
        ids: list[tuple[int, ...]] = []
        for words in self.words:
            single: list[int] = []
            for word in words:
                body = {"model": self.model, "prompt": word, "add_special_tokens": False}
                tokens = await self._optional(endpoint, "/tokenize", body, _tokens)
                if tokens is None:
                    return None
                # A score is read from one position, so spellings of several tokens cannot count.
                if len(tokens) == 1:
                    single += tokens
            if not single:
                raise JudgeRefusedError(
                    f"{words[0]!r} is not a single token for {self.model} at {endpoint.url}, and must be one"
                )
            ids.append(tuple(single))
        return ids[0], ids[1]

    async def _optional(self, endpoint: Endpoint, page: str, body: Json | None, read: Callable[[Json], T]) -> T | None:
        """Read an optional page of the server's root, which a gateway may guard differently."""
        try:
            return await self._call(endpoint, page, body, read, root=True)
        except (UnansweredError, JudgeRefusedError):
            return None
        except TransientError as fault:
            if fault.unreachable:
                raise
            return None


def _leave_out(endpoint: Endpoint, body: Json, *, refusal: str) -> bool:
    """Leave the optional fields that a server refuses by name out of later requests; return whether there are any."""
    if "token_ids" in refusal and "logprob_token_ids" in body:
        endpoint.ids = None  # it takes no ids: ask it for the likeliest tokens instead
        return True
    refused = {name for name in OPTIONAL_FIELDS if name in body and name in refusal}
    endpoint.refused_fields |= refused
    return bool(refused)


def _model_notes(answer: Json) -> dict[str, str]:
    """Read name → note, which the built-in server alone gives."""
    notes = {}
    for model in answer.get("data") or ():
        if isinstance(model, dict) and "id" in model:
            notes[str(model["id"])] = " ".join(str(model.get("note") or "").split())[:MOST_NOTE]
    return notes


def _tokens(answer: Json) -> list[int]:
    tokens = answer["tokens"]
    if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
        raise TypeError("tokens are numbers from 0")
    return tokens
