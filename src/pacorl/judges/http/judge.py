"""A judge behind an OpenAI-compatible API: vLLM, the built-in server, or any other that returns log-probabilities.

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1", model="PaCo-Reward-7B")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: whatever the server does, an answer that does not hold the probabilities
of Yes and No becomes a missing verdict with its reason. Only what no retry can mend is raised: a model that is not
served, a key that is refused, a tokenizer for which Yes or No is no single token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import os
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pacorl.io.images import as_rgb
from pacorl.judges.http.endpoints import api_url, load_endpoints, root_url
from pacorl.judges.orders import mean_of_orders, with_turned
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from PIL.Image import Image

T = TypeVar("T")
Json = Mapping[str, Any]

WORDS = (("Yes",), ("No",))
VARIANTS = (("Yes", "yes", "YES", "Y", "y"), ("No", "no", "NO", "N", "n"))
"""The spellings whose probabilities EditReward-Bench adds up (those of them that are single tokens)."""

TOP_LOGPROBS = 20  # the most that the API allows
CUT_TOLERANCE = 1e-3
"""Where a list of the likeliest tokens holds only one of Yes and No, the other is at most as likely as the least of
the list. If that leaves P(Yes) open by more than this, the verdict is missing."""
MASS_TOLERANCE = 1e-2  # probabilities of one list may exceed 1 by so much (bf16 servers), and no more
FLOOR_LOGPROB = -9999.0  # what vLLM sends for −inf
DECLINE_HEADER = "X-Pacorl-Decline"
"""`no`: the server is to judge images outside of its judge's domain too (`judges.domain`)."""
DECLINED = "declined"
"""What the built-in server calls the error of a request that its judge declines."""
BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.5, 20.0
REST_SECONDS = 10.0  # how long an endpoint that did not answer is spared while others do


class JudgeRefusedError(ValueError):
    """A fault that no retry mends: wrong model name, refused key, Yes or No not a single token."""


class _TransientError(Exception):
    """An attempt failed; another may not."""

    def __init__(self, reason: str, *, wait: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.unreachable = wait, unreachable


class _UnansweredError(Exception):
    """There will be no answer to this question."""


class _DeclinedError(_UnansweredError):
    """The judge declines the question's images."""


@dataclass(slots=True)
class Counters:
    """What a judge has done so far."""

    requests: int = 0
    """Chat requests sent, retries included."""
    retries: int = 0
    missing: int = 0
    """Distinct questions that ended without a probability."""
    cached: int = 0
    """Questions answered by an identical one of the same call."""


@dataclass(slots=True, eq=False)
class _Endpoint:
    """One server and what is known of it."""

    url: str
    client: AsyncOpenAI
    slots: asyncio.Semaphore
    load: int = 0
    """Questions that wait for it or are being answered by it."""
    rests_until: float = 0.0
    met: asyncio.Lock = field(default_factory=asyncio.Lock)
    served: tuple[str, ...] | None = None
    """Model names; None until it was met."""
    ids: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Token ids of Yes and of No; None where the server does not tell, or takes no ids."""
    version: str = ""

    @property
    def resting(self) -> bool:
        return asyncio.get_running_loop().time() < self.rests_until


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """What an endpoint said about itself."""

    url: str
    served: tuple[str, ...]
    yes_ids: tuple[int, ...]
    no_ids: tuple[int, ...]
    version: str


class HttpJudge:
    """Asks one model on one or several servers; safe to share between threads.

    All judges of a process live on one background event loop. `verdicts` blocks, `submit` returns at once, and both
    ask every distinct (images, question) of a call once and encode every image once.
    """

    def __init__(
        self,
        model: str,
        endpoints: Sequence[str],
        *,
        api_key_env: str = "",
        concurrency: int = 32,
        processes: int = 1,
        timeout: float = 60.0,
        retries: int = 6,
        temperature: float = 1.0,
        symmetric: bool = False,
        variants: bool = False,
        image_format: Literal["png", "jpeg"] = "png",
        decline: bool = False,
    ) -> None:
        """`concurrency`: requests that one endpoint is sent at a time by all `processes` (ranks) together.

        `timeout`: seconds for a whole answer, its body included. `temperature` divides the Yes − No logit.
        `symmetric`: every pair is asked about in both orders (`judges.orders`). `variants` adds up the spellings
        VARIANTS. `image_format`: PNG is exact; JPEG (quality 95) is smaller. `api_key_env` names the environment
        variable of the key. `decline`: a server may decline images outside of its judge's domain (`judges.domain`),
        which makes their verdicts missing; by default it is told not to, because a reward needs an answer to
        everything.
        """
        if not endpoints:
            raise ValueError("a judge over HTTP needs at least one endpoint, e.g. http://127.0.0.1:8000/v1")
        self.model = model
        self.timeout, self.retries, self.temperature, self.symmetric = timeout, retries, temperature, symmetric
        self.words = VARIANTS if variants else WORDS
        self.image_format, self.decline = image_format, decline
        self.counters = Counters()
        self._key = _read_key(api_key_env)
        limit = max(1, concurrency // processes)
        self._endpoints = [self._endpoint(api_url(url), limit) for url in dict.fromkeys(endpoints)]
        self._running: set[Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = _Background.join()

    @classmethod
    def connect(cls, source: str | Path, *, model: str = "", api_key_env: str = "", **options: Any) -> HttpJudge:
        """A judge from a URL (then `model` is its name there), or from an endpoints YAML (then `model` chooses)."""
        if str(source).startswith(("http://", "https://")):
            if not model:
                raise ValueError(f"name the model to ask at {source}; `curl {api_url(str(source))}/models` lists them")
            return cls(model, [str(source)], api_key_env=api_key_env, **options)
        document = load_endpoints(Path(source))
        served = document.named(model)
        return cls(served.name, served.endpoints, api_key_env=api_key_env or document.api_key_env, **options)

    # --- what callers do ---------------------------------------------------------------------------------------

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order.

        Raises JudgeRefusedError where asking on is pointless, ImageError where an image cannot be looked at.
        """
        return _wait(self.submit(questions))

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """`verdicts` in the background; do not change the images before the future is done."""
        return self._start(self._verdicts(list(questions)))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """The answer in words. Raises RuntimeError where the server gives none."""
        return str(_wait(self._start(self._explain(question, max_new_tokens))))

    def check(self) -> list[EndpointReport]:
        """Meets every endpoint now.

        Raises JudgeRefusedError for a wrong name or key, ConnectionError where an endpoint is down.
        """
        return _wait(self._start(self._check()))

    def close(self) -> None:
        """Abandons what is running; the last judge of the process ends the background loop."""
        if self._loop is None:
            return
        for future in list(self._running):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self._close_clients(), self._loop).result()
        self._loop = None
        _Background.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- on the background loop --------------------------------------------------------------------------------

    def _start(self, work: Any) -> Future[Any]:
        if self._loop is None:
            work.close()
            raise RuntimeError("this judge is closed")
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    async def _close_clients(self) -> None:
        for endpoint in self._endpoints:
            await endpoint.client.close()

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        if not self.symmetric:
            return await _Call(self).verdicts(questions)
        return mean_of_orders(questions, await _Call(self).verdicts(with_turned(questions)))

    async def _explain(self, question: Question, max_new_tokens: int) -> str:
        pictures = [
            await asyncio.to_thread(_encoded, image, name, self.image_format) for image, name in _named(question)
        ]
        # Greedy: the same question gets the same reasons.
        body = self._body(pictures, question.text, max_tokens=max_new_tokens) | {"temperature": 0}
        try:
            return await self._ask(lambda _: body, lambda answer, _: _text_of(answer))
        except _UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    async def _check(self) -> list[EndpointReport]:
        for endpoint in self._endpoints:
            try:
                await self._meet(endpoint)
            except _TransientError as fault:
                raise ConnectionError(f"no judge at {endpoint.url}: {fault}") from None
        return [
            EndpointReport(e.url, e.served or (), *(e.ids if e.ids else ((), ())), e.version) for e in self._endpoints
        ]

    async def _p_yes(self, pictures: Sequence[Picture], text: str) -> float:
        """P(Yes | Yes or No) for images that are already encoded; on the judge's own loop only."""
        # The sampled token is thrown away, and at temperature 1 a server that reports log-probabilities after
        # sampling's changes to them reports the model's own.
        body = self._body(pictures, text, max_tokens=1) | {
            "temperature": 1,
            "top_p": 1,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
        }
        return await self._ask(lambda endpoint: body | _by_id(endpoint), self._read)

    def _read(self, answer: Json, endpoint: _Endpoint) -> float:
        name = answer.get("model") or self.model
        # Some servers answer with a dated or a qualified name: `judge-2026-11-21`, `org/judge`.
        if not (str(name).startswith(self.model) or str(name).endswith(f"/{self.model}")):
            raise _TransientError(f"{name} answered instead of {self.model}")
        return read_p_yes(answer, self.words, ids=endpoint.ids, temperature=self.temperature)

    def _body(self, pictures: Sequence[Picture], text: str, *, max_tokens: int) -> dict[str, Any]:
        content = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
        return {"model": self.model, "messages": messages, "max_tokens": max_tokens}

    async def _ask(self, body: Callable[[_Endpoint], Json], read: Callable[[Json, _Endpoint], T]) -> T:
        """Posts until `read` accepts an answer. Raises _UnansweredError after the last retry."""
        for attempt in range(self.retries + 1):
            self.counters.retries += attempt > 0
            try:
                async with self._turn() as endpoint:
                    return await self._attempt(endpoint, body, read)
            except _TransientError as fault:
                reason, wait = str(fault), fault.wait
            if attempt < self.retries:
                await asyncio.sleep(max(wait, _backoff(attempt)))
        raise _UnansweredError(f"{reason} (attempt {self.retries + 1}, the last)")

    async def _attempt(
        self, endpoint: _Endpoint, body: Callable[[_Endpoint], Json], read: Callable[[Json, _Endpoint], T]
    ) -> T:
        try:
            await self._meet(endpoint)
            self.counters.requests += 1
            answer = await self._call(endpoint, "/chat/completions", body(endpoint))
        except _TransientError as fault:
            if fault.unreachable:
                endpoint.rests_until = asyncio.get_running_loop().time() + REST_SECONDS
            raise
        endpoint.rests_until = 0.0
        return read(answer, endpoint)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[_Endpoint]:
        """A free slot of the least loaded endpoint; one that did not answer lately only where none did."""
        while True:
            endpoint = min(self._endpoints, key=lambda e: (e.resting, e.load))
            endpoint.load += 1
            try:
                async with endpoint.slots:
                    # It may have failed while this question waited.
                    if not endpoint.resting or all(e.resting for e in self._endpoints):
                        yield endpoint
                        return
            finally:
                endpoint.load -= 1

    async def _meet(self, endpoint: _Endpoint) -> None:
        """Learns what an endpoint serves and how it spells Yes and No, once."""
        async with endpoint.met:
            if endpoint.served is not None:
                return
            served = await self._served(endpoint)
            if served and self.model not in served:
                raise JudgeRefusedError(f"{endpoint.url} serves no model {self.model!r}; it serves {', '.join(served)}")
            endpoint.ids = await self._token_ids(endpoint)
            endpoint.version = str((await self._optional(endpoint, "/version")).get("version", ""))
            endpoint.served = served

    async def _served(self, endpoint: _Endpoint) -> tuple[str, ...]:
        """Names from /v1/models; none where the server has no such page."""
        try:
            listing = await self._call(endpoint, "/models")
        except _UnansweredError:
            return ()
        return tuple(str(model["id"]) for model in listing.get("data", []) if isinstance(model, dict) and "id" in model)

    async def _token_ids(self, endpoint: _Endpoint) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids of the words that are single tokens, from vLLM's /tokenize; None where there is no such page."""
        found: list[tuple[int, ...]] = []
        for words in self.words:
            rows = [await self._tokenize(endpoint, word) for word in words]
            if None in rows:
                return None
            found.append(tuple(row[0] for row in rows if row is not None and len(row) == 1))
            if not found[-1]:
                raise JudgeRefusedError(
                    f"{words[0]!r} is not a single token for {self.model} at {endpoint.url}, and must be one"
                )
        return found[0], found[1]

    async def _tokenize(self, endpoint: _Endpoint, word: str) -> list[int] | None:
        body = {"model": self.model, "prompt": word, "add_special_tokens": False}
        tokens = (await self._optional(endpoint, "/tokenize", body)).get("tokens")
        return [int(token) for token in tokens] if isinstance(tokens, list) else None

    async def _optional(self, endpoint: _Endpoint, page: str, body: Json | None = None) -> Json:
        """A page of the server's root that not every server has (and that a gateway may guard otherwise)."""
        try:
            return await self._call(endpoint, root_url(endpoint.url) + page, body)
        except (_UnansweredError, JudgeRefusedError):
            return {}
        except _TransientError as fault:
            if fault.unreachable:
                raise
            return {}

    async def _call(self, endpoint: _Endpoint, path: str, body: Json | None = None) -> Json:
        """One request and its JSON object; its faults sorted into transient, unanswerable and refused."""
        import openai

        try:
            async with asyncio.timeout(self.timeout):  # over all: a body that trickles in would reset the client's own
                if body is None:
                    answer = await endpoint.client.get(path, cast_to=object)
                else:
                    answer = await endpoint.client.post(path, cast_to=object, body=body)
        except (TimeoutError, openai.APITimeoutError):
            raise _TransientError(f"no answer within {self.timeout:g} s", unreachable=True) from None
        except openai.APIConnectionError as fault:
            raise _TransientError(f"no connection: {fault.__cause__ or fault}", unreachable=True) from None
        except openai.APIStatusError as fault:
            raise self._sorted(fault, endpoint, path, body) from None
        except (openai.OpenAIError, ValueError) as fault:
            raise _TransientError(f"an answer that is not JSON ({self._redacted(str(fault))})") from None
        if not isinstance(answer, dict):
            raise _TransientError("an answer that is not a JSON object")
        return answer

    def _sorted(self, fault: Any, endpoint: _Endpoint, path: str, body: Json | None) -> Exception:
        """What an HTTP error status means for a question."""
        status: int = fault.status_code
        reason = f"HTTP {status}: {self._redacted(_message_of(fault))}"
        if status == 422 and isinstance(fault.body, dict) and fault.body.get("type") == DECLINED:
            return _DeclinedError(self._redacted(_message_of(fault)))
        if status in (401, 403):
            return JudgeRefusedError(f"{endpoint.url} refuses the key: {reason}; name its variable with api_key_env")
        if status in (408, 409, 425, 429) or status >= 500:
            return _TransientError(reason, wait=_retry_after(fault.response.headers))
        if status in (400, 422) and "token_ids" in reason and "logprob_token_ids" in (body or {}):
            endpoint.ids = None  # it takes no ids: ask it for the likeliest tokens instead
            return _TransientError(reason)
        if status == 404 and path == "/chat/completions" and endpoint.served is not None:
            endpoint.served = None  # the model may have gone: meet it again, which raises where it has
            return _TransientError(reason)
        return _UnansweredError(reason)

    def _redacted(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text

    def _endpoint(self, url: str, limit: int) -> _Endpoint:
        try:
            from openai import AsyncOpenAI
        except ModuleNotFoundError:
            raise ValueError("a judge over HTTP needs the openai client: pip install 'pacorl[serve]'") from None

        # A key for other services must not travel to this one, so the client never looks for one itself.
        client = AsyncOpenAI(
            base_url=url,
            api_key=self._key or "none",
            max_retries=0,
            timeout=self.timeout,
            default_headers={} if self.decline else {DECLINE_HEADER: "no"},
        )
        return _Endpoint(url, client, asyncio.Semaphore(limit))


class _Call:
    """The questions of one call: each distinct image is encoded once, each distinct question is asked once."""

    def __init__(self, judge: HttpJudge) -> None:
        self._judge = judge
        self._pictures: dict[int, asyncio.Task[Picture]] = {}
        self._asked: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}

    async def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._verdict(question, group)) for question in questions]
        except ExceptionGroup as faults:
            raise _first(faults) from None
        return [task.result() for task in tasks]

    async def _verdict(self, question: Question, group: asyncio.TaskGroup) -> Verdict:
        pictures = [await self._picture(image, name, group) for image, name in _named(question)]
        key = (*(picture.digest for picture in pictures), question.text)
        if key in self._asked:
            self._judge.counters.cached += 1
        else:
            self._asked[key] = group.create_task(self._answer(pictures, question.text))
        return await self._asked[key]

    async def _answer(self, pictures: Sequence[Picture], text: str) -> Verdict:
        try:
            return Verdict(await self._judge._p_yes(pictures, text))
        except _UnansweredError as fault:
            self._judge.counters.missing += 1
            return Verdict(None, str(fault), declined=isinstance(fault, _DeclinedError))

    async def _picture(self, image: Image, name: str, group: asyncio.TaskGroup) -> Picture:
        if id(image) not in self._pictures:
            work = asyncio.to_thread(_encoded, image, name, self._judge.image_format)
            self._pictures[id(image)] = group.create_task(work)
        return await self._pictures[id(image)]


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as it travels."""

    url: str
    """A data URL."""
    digest: str
    """SHA-256 of the bytes: equal images are one, whichever objects hold them."""


def _named(question: Question) -> list[tuple[Image, str]]:
    """The images with what messages call them."""
    return [(image, f"image {number} of {question.text!r}") for number, image in enumerate(question.images, 1)]


def _encoded(image: Image, name: str, image_format: Literal["png", "jpeg"]) -> Picture:
    """The image as the judge in this process would see it. Raises ImageError where none can look at it."""
    return encode(as_rgb(image, name), image_format)


def encode(image: Image, image_format: Literal["png", "jpeg"] = "png") -> Picture:
    """The image's RGB bytes as a data URL."""
    buffer = io.BytesIO()
    # The bytes are read once, by a server that is near: compressing them well would take longer than sending them.
    options: dict[str, Any] = {"compress_level": 1} if image_format == "png" else {"quality": 95, "subsampling": 0}
    image.convert("RGB").save(buffer, format=image_format, **options)
    data = buffer.getvalue()
    url = f"data:image/{image_format};base64,{base64.b64encode(data).decode('ascii')}"
    return Picture(url, hashlib.sha256(data).hexdigest())


# --- reading an answer -----------------------------------------------------------------------------------------


def read_p_yes(
    answer: Json,
    words: Sequence[Sequence[str]] = WORDS,
    *,
    ids: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
) -> float:
    """P(Yes | Yes or No) from the first token's log-probabilities of a chat completion.

    `words` and `ids` are those of Yes and of No; entries named `token_id:N` are read by id, others by their text.
    Tokens that spell the same are added up. Raises where the answer does not determine the probability.
    """
    entries, least = _first_token(answer)
    by_id = ids is not None and any(name.startswith("token_id:") for name, _ in entries)
    names = [[f"token_id:{i}" for i in row] for row in ids] if by_id and ids else words
    yes, no = (_log_sum([value for name, value in entries if name in spellings]) for spellings in names)
    if max(yes, no) <= FLOOR_LOGPROB:
        raise _UnansweredError(f"neither Yes nor No is among the {len(entries)} tokens that the server listed")
    if min(yes, no) <= FLOOR_LOGPROB and _sigmoid((least - max(yes, no)) / temperature) > CUT_TOLERANCE:
        found, lost = ("Yes", "No") if yes > no else ("No", "Yes")
        raise _UnansweredError(f"the server listed {found} and not {lost}, which may be as likely as its least entry")
    return _sigmoid((yes - no) / temperature)


def _first_token(answer: Json) -> tuple[set[tuple[str, float]], float]:
    """The listed (token, log-probability) of the first position, and the least of the likeliest.

    A server that repeats an entry (the sampled token, say) lists it once here.
    """
    try:
        first = answer["choices"][0]["logprobs"]["content"][0]
        sampled = (str(first["token"]), float(first["logprob"]))
        listed = [(str(entry["token"]), float(entry["logprob"])) for entry in first["top_logprobs"]]
    except (KeyError, IndexError, TypeError, ValueError):
        raise _TransientError("an answer without log-probabilities") from None
    entries = {sampled, *listed}
    values = [value for _, value in entries]
    if any(math.isnan(value) or value > MASS_TOLERANCE for value in values):
        raise _TransientError("log-probabilities that are none (NaN, or above 0)")
    if sum(map(math.exp, values)) > 1 + MASS_TOLERANCE:
        raise _TransientError(f"log-probabilities whose probabilities add up to {sum(map(math.exp, values)):.3f}")
    # The sampled token may lie far below the likeliest, and bounds nothing.
    likeliest = [value for name, value in listed if (name, value) != sampled]
    return entries, min(likeliest, default=0.0)


def _log_sum(values: Sequence[float]) -> float:
    top = max(values, default=-math.inf)
    if top <= FLOOR_LOGPROB:
        return -math.inf
    return top + math.log(sum(math.exp(value - top) for value in values))


def _sigmoid(logit: float) -> float:
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


def _text_of(answer: Json) -> str:
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise _TransientError("an answer without text")
    return text.strip()


# --- small parts -----------------------------------------------------------------------------------------------


def _by_id(endpoint: _Endpoint) -> dict[str, Any]:
    if endpoint.ids is None:
        return {}
    return {"logprob_token_ids": [*endpoint.ids[0], *endpoint.ids[1]], "return_tokens_as_token_ids": True}


def _backoff(attempt: int) -> float:
    """Exponential with full jitter, so that ranks that failed together do not come back together."""
    longest = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2**attempt)
    return random.uniform(longest / 2, longest)


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


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"set the environment variable {variable} to the key of the judge's server; it is not set")
    return key


def _first(faults: BaseExceptionGroup[Any]) -> BaseException:
    inner = faults.exceptions[0]
    return _first(inner) if isinstance(inner, BaseExceptionGroup) else inner


def _wait(future: Future[T]) -> T:
    try:
        return future.result()
    except BaseException:
        future.cancel()  # a Ctrl-C here must not leave requests running there
        raise


async def _abandon_tasks() -> None:
    rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


class _Background:
    """One event loop on one thread for all judges of this process."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None
    _judges = 0

    @classmethod
    def join(cls) -> asyncio.AbstractEventLoop:
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                cls._thread = threading.Thread(target=cls._loop.run_forever, name="pacorl-judges", daemon=True)
                cls._thread.start()
            cls._judges += 1
            return cls._loop

    @classmethod
    def leave(cls) -> None:
        with cls._lock:
            cls._judges -= 1
            if cls._judges or cls._loop is None or cls._thread is None:
                return
            cls._loop.call_soon_threadsafe(cls._loop.stop)
            cls._thread.join()
            cls._loop.run_until_complete(_abandon_tasks())
            cls._loop.run_until_complete(cls._loop.shutdown_default_executor())
            cls._loop.close()
            cls._loop = cls._thread = None
