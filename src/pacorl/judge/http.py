"""The remote judge: one model on one or several servers (vLLM, `pacorl serve`, or any with log-probabilities).

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: an answer without the probabilities of Yes and No becomes a missing verdict
with its reason. Only permanent faults are raised: a missing model, a refused key, a wrong address, a tokenizer without
single tokens for Yes and No, log-probabilities taken after sampling.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import logging
import math
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

from pacorl.config.options import JUDGE_KEY
from pacorl.core.questions import text_fault
from pacorl.io.images import as_rgb
from pacorl.io.net import (
    MALFORMED,
    PASSING,
    TransientError,
    client_options,
    is_loopback,
    key_from,
    own_headers,
    status_fault,
    wire_fault,
)
from pacorl.io.outage import OUTAGE_SECONDS, PATIENCE, Outage, UnreachableError, backoff
from pacorl.judge.calibration import Calibration
from pacorl.judge.judge import RETRIES, VARIANTS, WORDS, Counters, JudgeRefusedError, split_address
from pacorl.judge.pairwise import mean_of_orders, with_turned
from pacorl.types import Chat, Question, Verdict

T = TypeVar("T")
Json = Mapping[str, Any]
TokenIds = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of Yes and of No."""

logger = logging.getLogger(__name__)

COOLDOWN_SECONDS = 10.0
"""Time for which a silent server is asked only if all others are silent too."""
HOMES = 10_000
"""Most images whose servers are remembered."""
TOP_LOGPROBS = 20  # the most that the API allows
CUT_TOLERANCE = 1e-3
"""Tolerance for a list of the likeliest tokens without one of Yes and No, which is at most as likely as the list's
least. If that leaves P(Yes) open by more, the verdict is missing."""
ROUNDING = 1e-2  # a server in bf16 may list a log-probability above 0 by so much
FLOOR_LOGPROB = -9999.0  # vLLM's encoding of −inf
OPTIONAL_FIELDS = ("chat_template_kwargs", "repetition_penalty", "logprob_token_ids", "return_tokens_as_token_ids")
"""Fields beyond OpenAI's API, left out of requests to servers that refuse them by name."""


class UnansweredError(Exception):
    """Permanent lack of an answer to a question."""


# --- requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image encoded for the request."""

    url: str
    """A data URL of a PNG."""
    digest: str
    """SHA-256 of the size and the pixels, which identifies equal images."""


def encode(questions: Iterable[Question]) -> dict[int, EncodedImage]:
    """Encode the RGB pixels that a judge in this process would see, each distinct image once.

    Returns:
        id of an image → the image encoded.

    Raises:
        ImageError: for an invalid image.
    """
    encoded: dict[int, EncodedImage] = {}
    by_digest: dict[str, EncodedImage] = {}
    for question in questions:
        for number, image in enumerate(question.images, 1):
            if id(image) in encoded:
                continue
            rgb = as_rgb(image, f"image {number} of {question.text!r}")
            digest = hashlib.sha256(repr(rgb.size).encode() + rgb.tobytes()).hexdigest()
            if digest not in by_digest:
                buffer = io.BytesIO()
                # Fast compression: for a nearby server, better compression takes longer than sending.
                rgb.save(buffer, format="png", compress_level=1)
                content = base64.b64encode(buffer.getvalue()).decode("ascii")
                by_digest[digest] = EncodedImage(f"data:image/png;base64,{content}", digest)
            encoded[id(image)] = by_digest[digest]
    return encoded


def turn_body(model: str, content: Sequence[EncodedImage | str], *, max_tokens: int) -> dict[str, Any]:
    """Build a request of one user turn of images and texts, without thinking."""
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts.append({"type": "image_url", "image_url": {"url": part.url}})
    messages = [{"role": "user", "content": parts}]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    return {"model": model, "messages": messages, "max_tokens": max_tokens} | thinking


def verdict_body(
    model: str, images: Sequence[EncodedImage], text: str, *, ids: TokenIds | None = None
) -> dict[str, Any]:
    """Build a request for the first token's log-probabilities.

    With `ids` the words are requested by id, so that the server lists them even if they are unlikely.
    """
    # The sampled token is unused. At temperature 1 a server that reports log-probabilities after the sampler's changes
    # reports the model's own. A checkpoint's penalty is meant for reasons: it would lower a Yes or No in the question.
    sampling = {"temperature": 1, "top_p": 1, "repetition_penalty": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    by_id: dict[str, Any] = {}
    if ids:
        by_id = {"logprob_token_ids": [*ids[0], *ids[1]], "return_tokens_as_token_ids": True}
    return turn_body(model, [*images, text], max_tokens=1) | sampling | by_id


def decision_body(model: str, images: Sequence[EncodedImage], text: str) -> dict[str, Any]:
    """Build a request of transformers' `/v1/systemone`, for servers without log-probabilities."""
    assets = {}
    for number, image in enumerate(images, 1):
        content = image.url.partition(",")[2]
        assets[f"image-{number}"] = {"type": "image", "format": "png", "data_base64": content}
    question = {"type": "noul", "instructions": text}
    return {"model": model, "state": "".join(assets), "questions": {"same": question}, "assets": assets}


def read_decision(answer: Json, *, temperature: float = 1.0) -> float:
    """Read P(Yes) from an answer of `/v1/systemone`."""
    p_yes = answer["answers"]["same"]["noul"]
    if not isinstance(p_yes, float) or not 0 <= p_yes <= 1:
        raise TransientError(f"a probability that is none: {str(p_yes)[:40]}")
    if p_yes in (0, 1):
        return p_yes
    return _sigmoid((math.log(p_yes) - math.log1p(-p_yes)) / temperature)


def sharing_order(questions: Sequence[Question]) -> list[int]:
    """Order the questions so that those with the same first images follow one another, for a server's prefix cache."""
    position: dict[int, int] = {}
    for question in questions:
        for image in question.images:
            position.setdefault(id(image), len(position))
    return sorted(range(len(questions)), key=lambda number: [position[id(image)] for image in questions[number].images])


# --- answers ---------------------------------------------------------------------------------------------------


def read_p_yes(
    answer: Json,
    words: Sequence[Sequence[str]] = WORDS,
    *,
    ids: TokenIds | None = None,
    temperature: float = 1.0,
) -> float:
    """Read P(Yes | Yes or No) from the first token's log-probabilities of a chat completion.

    Args:
        words: The spellings of Yes and of No; tokens with equal spelling are added up.
        ids: Their token ids; entries named `token_id:N` are read by id, further entries by their text.
        temperature: Divisor of the Yes − No logit.

    Raises:
        JudgeRefusedError: if the log-probabilities are of a sampler, and not of the model.
        UnansweredError: if the answer does not determine the probability.
        TransientError, LookupError, TypeError: if it has another form.
    """
    # The likeliest tokens, and the sampled one, which may be far less likely than they and is no bound.
    first = choice_of(answer)["logprobs"]["content"][0]
    sampled = _entry(first)
    listed = [_entry(entry) for entry in first["top_logprobs"]]
    entries = {*listed, sampled} if sampled[0] not in dict(listed) else set(listed)
    values = sorted((value for _, value in entries), reverse=True)
    if values[0] >= 0 and all(value <= FLOOR_LOGPROB for value in values[1:]):
        raise JudgeRefusedError(
            f"the server's log-probabilities are taken after greedy sampling ({sampled[0]!r:.40} has all of the "
            "probability); start vLLM with --logprobs-mode raw_logprobs"
        )

    # The entries of Yes and No, by id or by text.
    names = words
    if ids and any(name.startswith("token_id:") for name, _ in entries):
        names = [[f"token_id:{i}" for i in row] for row in ids]
    yes = _log_sum([value for name, value in entries if name in names[0]])
    no = _log_sum([value for name, value in entries if name in names[1]])

    # Their probabilities, if the list determines them.
    if max(yes, no) <= FLOOR_LOGPROB:
        likeliest = max(entries, key=lambda entry: entry[1])[0]
        raise UnansweredError(
            f"neither Yes nor No is among the {len(entries)} tokens that the server listed, the likeliest is "
            f"{likeliest!r:.40}; a model that thinks first cannot judge"
        )
    least = min((value for name, value in listed if (name, value) != sampled), default=0.0)
    if min(yes, no) <= FLOOR_LOGPROB and _sigmoid((least - max(yes, no)) / temperature) > CUT_TOLERANCE:
        present, absent = ("Yes", "No") if yes > no else ("No", "Yes")
        raise UnansweredError(
            f"the server listed {present} and not {absent}, which may be as likely as its least entry"
        )
    return _sigmoid((yes - no) / temperature)


def read_text(answer: Json) -> str:
    """Read the text of a chat completion."""
    text = choice_of(answer)["message"]["content"]
    if not isinstance(text, str):
        raise TransientError("an answer without text")
    return text.strip()


def choice_of(answer: Json) -> Any:
    """Return the choice of a chat completion. Raises TransientError with the words of an error in its place."""
    if "choices" not in answer and "error" in answer:
        raise TransientError(f"an error in place of an answer: {str(answer['error'])[:200]}")
    return answer["choices"][0]


def check_model(answer: Json, model: str) -> None:
    """Raise TransientError if another model answered, as of a gateway; dated and qualified names are accepted."""
    name = str(answer.get("model") or model)
    if not re.fullmatch(rf"(.*/)?{re.escape(model)}(-20\d\d[-\d]*)?", name):
        raise TransientError(f"{name[:80]!r} answered instead of {model!r}")


def _entry(entry: Json) -> tuple[str, float]:
    name = entry["token"]
    log_prob = entry["logprob"]
    if not isinstance(name, str) or isinstance(log_prob, bool) or not isinstance(log_prob, int | float):
        raise TransientError("a token or log-probability of another type")
    if not -math.inf < log_prob <= ROUNDING:  # nor NaN
        raise TransientError("log-probabilities that are none (not finite, or above 0)")
    return name, float(log_prob)


def _log_sum(log_probs: Sequence[float]) -> float:
    top = max(log_probs, default=-math.inf)
    if top <= FLOOR_LOGPROB:
        return -math.inf
    # Relative to the largest: exp of very negative values would be 0, which has no logarithm.
    return top + math.log(sum(math.exp(log_prob - top) for log_prob in log_probs))


def _sigmoid(logit: float) -> float:
    # By cases, since exp of a large number overflows.
    if logit >= 0:
        return 1 / (1 + math.exp(-logit))
    return math.exp(logit) / (1 + math.exp(logit))


# --- the judge -------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Server:
    """One server, its client, and the results of its handshake."""

    url: str
    client: Any
    slots: asyncio.Semaphore
    load: int = 0
    """Number of waiting and running questions."""
    silent_until: float = 0.0
    """Time until which it is asked only if all others are silent too."""
    handshaking: asyncio.Lock = field(default_factory=asyncio.Lock)
    known: bool = False
    """Whether the handshake is complete."""
    ids: TokenIds | None = None
    """Token ids of Yes and No; None if unknown or unsupported."""
    refused_fields: set[str] = field(default_factory=set)
    """Refused `OPTIONAL_FIELDS`, left out from then on."""
    decides: bool = False
    """Whether it is asked for decisions, because it has no log-probabilities."""
    note: str = ""
    """Caveat of the server about the judge; empty for most."""


class HttpJudge:
    """Client of one model on one or several servers; thread-safe. A call sends every distinct question once."""

    def __init__(
        self,
        model: str,
        urls: Sequence[str],
        *,
        api_key_env: str = "",
        concurrency: int = 32,
        processes: int = 1,
        timeout: float = 60.0,
        retries: int = RETRIES,
        temperature: float = 1.0,
        symmetric: bool = False,
        variants: bool = False,
        calibration: Calibration | None = None,
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        """
        Args:
            model: The model's name there; empty for a server's only one.
            urls: Base URLs of the servers.
            api_key_env: The environment variable of the key.
            concurrency: Concurrent requests per server, of all `processes` (ranks) together.
            timeout: Seconds for a whole answer, its body included.
            retries: Further attempts before a verdict is missing.
            temperature: Divisor of the Yes − No logit.
            symmetric: Ask about every pair in both orders (`judge.pairwise`).
            variants: Add up the spellings `VARIANTS`.
            calibration: Curves that map the verdicts' P(Yes).
            outage: Seconds of retries while no server answers, after `wait_for_outages`; 0 disables them.
        """
        import httpx2
        import openai
        from anyio.from_thread import start_blocking_portal

        if not urls:
            raise ValueError("a judge over HTTP needs at least one address, e.g. http://127.0.0.1:8000/v1")
        self.model = model
        self.temperature = temperature
        self.symmetric = symmetric
        self.words = VARIANTS if variants else WORDS
        self.calibration = calibration
        self.timeout = timeout
        self.retries = retries
        self.counters = Counters()
        """Counts so far."""

        # The servers. The key is the transport's: variables for OpenAI's own service stay here.
        self._key = key_from(api_key_env)
        self._slots = max(1, concurrency // processes)
        self.servers: list[Server] = []
        for url in split_address(",".join(urls))[0]:
            transport = httpx2.AsyncClient(**client_options(url, seconds=timeout, key=self._key))
            client = openai.AsyncOpenAI(base_url=url, api_key="-", http_client=transport, max_retries=0)
            self.servers.append(Server(url, client, asyncio.Semaphore(self._slots)))
        self._homes: dict[str, Server] = {}
        """Digest of an image → the server that was last asked about it."""
        self._silence = Outage(self._name, seconds=math.inf)
        self._waits = False
        self._outage = outage
        # An event loop on a thread of its own, so that blocking code, notebooks included, can wait for coroutines.
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())

    @classmethod
    def connect(cls, source: str, *, model: str = "", startup: float = 0.0, **options: Any) -> Self:
        """Build a judge from `URL[,URL…][#MODEL]`, after a handshake with every server.

        Args:
            startup: Seconds that servers which do not answer yet are waited for.

        Raises:
            JudgeRefusedError: for a wrong model name, key or address.
            UnreachableError: if a server is silent.
        """
        urls, named = split_address(source)
        judge = cls(model or named, urls, **options)
        try:
            judge.check(patience=startup)
        except BaseException:  # a Ctrl-C too: the judge's thread would outlive it
            judge.close()
            raise
        return judge

    @property
    def _name(self) -> str:
        return f"judge {self.model} at {', '.join(server.url for server in self.servers)}"

    @property
    def note(self) -> str:
        """Caveat of a server about its judge, with its address; empty for most servers, and before `check`."""
        return next((f"{server.url}: {server.note}" for server in self.servers if server.note), "")

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order. Raises JudgeRefusedError or ImageError for permanent faults."""
        return self._run(self._verdicts, list(questions))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """Answer in words. Raises RuntimeError if the server gives no answer."""
        return self.reply(Chat((*question.images, question.text)), max_new_tokens=max_new_tokens)

    def reply(self, chat: Chat, *, max_new_tokens: int = 512) -> str:
        """Answer a whole turn in words. Raises RuntimeError if the server gives no answer."""
        return self._run(self._reply, chat, max_new_tokens)

    def check(self, *, patience: float = 0.0) -> None:
        """Shake hands with every server, waiting up to `patience` seconds for silent servers.

        Raises:
            JudgeRefusedError: for a wrong model name, key or address.
            UnreachableError: if a server stays silent.
        """
        self._run(self._check, patience)

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry questions that no server answers, for up to `seconds`, by default the option's.

        `verdicts` then raises UnreachableError if the outage lasts longer.
        """
        seconds = self._outage if seconds is None else seconds
        self._waits = seconds > 0
        self._silence = Outage(self._name, seconds=seconds or math.inf)

    def close(self) -> None:
        """Abandon running requests, and end the judge's thread."""
        with suppress(RuntimeError):  # closed before
            self._portal.call(self._portal.stop, True)
        self._stack.close()

    def _run(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine on the judge's thread; Ctrl-C cancels it."""
        future = self._portal.start_task_soon(work, *arguments)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- questions ---------------------------------------------------------------------------------------------

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        # Both orders in one batch, which share encoded images.
        turned = with_turned(questions) if self.symmetric else questions
        images = await asyncio.to_thread(encode, turned)
        tasks: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}
        numbered: dict[int, asyncio.Task[Verdict]] = {}
        try:
            async with asyncio.TaskGroup() as group:
                for number in sharing_order(turned):
                    question = turned[number]
                    of_question = [images[id(image)] for image in question.images]
                    # By content: the panels of two grids may be equal without being one object.
                    key = (*(image.digest for image in of_question), question.text)
                    if key in tasks:
                        self.counters.cached += 1
                    else:
                        tasks[key] = group.create_task(self._verdict(of_question, question.text))
                    numbered[number] = tasks[key]
        except ExceptionGroup as faults:
            # All have the same cause: a refusal, or an outage.
            raise faults.exceptions[0] from None
        verdicts = [numbered[number].result() for number in range(len(turned))]
        if self.symmetric:
            verdicts = mean_of_orders(questions, verdicts)
        return self.calibration.calibrated(verdicts) if self.calibration else verdicts

    async def _verdict(self, images: Sequence[EncodedImage], text: str) -> Verdict:
        def body(server: Server) -> dict[str, Any]:
            if server.decides:
                return decision_body(self.model, images, text)
            return verdict_body(self.model, images, text, ids=server.ids)

        def read(answer: Json, server: Server) -> float:
            if "answers" in answer:
                return read_decision(answer, temperature=self.temperature)
            return read_p_yes(answer, self.words, ids=server.ids, temperature=self.temperature)

        try:
            if reason := text_fault(text):
                raise UnansweredError(reason)
            return Verdict(await self._ask(body, read, [image.digest for image in images]))
        except UnansweredError as fault:
            self.counters.missing += 1
            return Verdict(None, str(fault))

    async def _reply(self, chat: Chat, max_new_tokens: int) -> str:
        images = await asyncio.to_thread(encode, [Question(chat.images, chat.text)])
        content = [part if isinstance(part, str) else images[id(part)] for part in chat.content]

        def body(_: Server) -> dict[str, Any]:
            # Greedy: the same request gets the same answer.
            return turn_body(self.model, content, max_tokens=max_new_tokens) | {"temperature": 0}

        try:
            if reason := text_fault(chat.text):
                raise UnansweredError(reason)
            return await self._ask(
                body, lambda answer, _: read_text(answer), [image.digest for image in images.values()]
            )
        except UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    async def _ask(
        self, body: Callable[[Server], dict[str, Any]], read: Callable[[Json, Server], T], images: Sequence[str]
    ) -> T:
        """Ask until `read` accepts an answer; `images` are the digests of the question's images.

        Raises:
            UnansweredError: after the last retry.
            UnreachableError: if all servers stay silent for the seconds of `wait_for_outages`.
            JudgeRefusedError: for a wrong model name, key or address.
        """
        tried: Server | None = None
        failed = 0
        again = False
        while True:
            server = self._choose(images, tried)
            tried = server
            server.load += 1
            try:
                async with server.slots:
                    sent_at = time.monotonic()
                    # It may have fallen silent while this question waited, and another server may not.
                    if min(other.silent_until for other in self.servers) <= sent_at < server.silent_until:
                        continue
                    self.counters.retries += again
                    await self._handshake(server)
                    answer = await self._post(server, body)
                check_model(answer, self.model)
                return _parsed(partial(read, answer, server))
            except TransientError as error:
                fault = error
            finally:
                server.load -= 1
            again = True

            # In an outage of all servers no attempt counts.
            wait = self._silence.wait(fault, sent_at=sent_at) if fault.unreachable else None
            if wait is not None and self._waits:
                await asyncio.sleep(wait)
                continue
            failed += 1
            hangs = wait is not None and self._silence.lasts >= PATIENCE * self.timeout
            if failed > self.retries or hangs:
                raise UnansweredError(f"{fault} (attempt {failed}, the last)")
            await asyncio.sleep(max(fault.wait, backoff(failed)))

    def _choose(self, images: Sequence[str], tried: Server | None) -> Server:
        """Choose the server that was asked about these images, or else the least loaded one.

        Silent servers come last, and before them the one that this question has just `tried`.
        """
        now = time.monotonic()
        home = next((self._homes[image] for image in images if image in self._homes), None)

        def preference(server: Server) -> tuple[bool, bool, bool, int, float]:
            # A home behind by all its slots is left: computing a prefix again is cheaper than waiting.
            away = home is not None and server is not home and home.load < server.load + self._slots
            return now < server.silent_until, server is tried, away, server.load, server.silent_until

        server = min(self.servers, key=preference)
        # Forgetting costs a prefix computed again; an entry for every image of a long run would cost memory.
        if len(self._homes) > HOMES:
            self._homes.clear()
        self._homes |= dict.fromkeys(images, server)
        return server

    async def _post(self, server: Server, body: Callable[[Server], dict[str, Any]]) -> Json:
        """Send a question, and once more without each optional field that the server refuses by name."""
        import openai

        while True:
            self.counters.requests += 1
            sent = {name: value for name, value in body(server).items() if name not in server.refused_fields}
            try:
                page = "systemone" if "assets" in sent else "chat/completions"
                return await self._exchange(server, f"{server.url}/{page}", sent)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                fault = str(status_fault(error.response, key=self._key))
                refused = {name for name in OPTIONAL_FIELDS if name in sent and name in fault}
                server.refused_fields |= refused
                if not refused:
                    raise UnansweredError(fault) from None
            except openai.APIStatusError as error:
                raise self._refusal(error.response) from None

    async def _exchange(self, server: Server, url: str, body: Json | None = None) -> Json:
        """Exchange one request, and note whether the server answers.

        Raises:
            TransientError: for a fault of the wire, a status that passes, or an answer that is no JSON object.
            openai.APIStatusError: for any other status.
        """
        import httpx2
        import openai

        try:
            # Over everything: each chunk of a slow body would reset the client's own limit.
            async with asyncio.timeout(self.timeout):
                options: Any = {"headers": own_headers()}
                if body is None:
                    response = await server.client.get(url, cast_to=httpx2.Response, options=options)
                else:
                    response = await server.client.post(url, cast_to=httpx2.Response, body=body, options=options)
        except (TimeoutError, openai.APITimeoutError):
            fault = TransientError(f"no answer within {self.timeout:g} s", unreachable=True)
        except openai.APIConnectionError as error:
            fault = wire_fault(server.url, error)
        except openai.APIStatusError as error:
            fault = status_fault(error.response, key=self._key)
            if not fault.unreachable:
                self._note_answer(server)
                if error.status_code in PASSING or error.status_code >= 500:
                    raise fault from None
                raise
        else:
            self._note_answer(server)
            return _parsed(lambda: dict(response.json()))
        server.silent_until = time.monotonic() + COOLDOWN_SECONDS
        raise fault from None

    def _note_answer(self, server: Server) -> None:
        server.silent_until = 0.0
        self._silence.note_answer()

    def _refusal(self, response: Any) -> Exception:
        """Map a status that no retry changes to an exception."""
        fault = f"{response.request.url}: {status_fault(response, key=self._key)}"
        if response.status_code in (401, 403):
            return JudgeRefusedError(
                f"{fault}; put the server's key into {JUDGE_KEY} (in a run's config: judge.api_key_env)"
            )
        if response.status_code == 404 or response.has_redirect_location:
            return JudgeRefusedError(f"{fault}; check the judge's address and the model's name {self.model!r}")
        return UnansweredError(fault)

    # --- the handshake -----------------------------------------------------------------------------------------

    async def _check(self, patience: float) -> None:
        # One deadline for all servers, which start at the same time.
        deadline = time.monotonic() + patience
        announced = not patience
        for server in self.servers:
            while True:
                try:
                    await self._handshake(server)
                    break
                except TransientError as fault:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise UnreachableError(f"no judge at {server.url}: {fault}{_remedy(server.url)}") from None
                    if not announced:
                        announced = True
                        logger.warning("no judge at %s: %s; waiting up to %g s for it", server.url, fault, patience)
                await asyncio.sleep(min(1.0, left))

    async def _handshake(self, server: Server) -> None:
        """Query a server's models and token ids, once."""
        async with server.handshaking:
            if server.known:
                return
            notes = _notes_by_model(await self._optional(server, f"{server.url}/models") or {})
            names = ", ".join([*notes][:20])[:500]
            if not self.model and len(notes) != 1:
                raise JudgeRefusedError(f"{server.url} serves {names or 'no list of models'}; name one as URL#MODEL")
            self.model = self.model or next(iter(notes))
            if notes and self.model not in notes and not await self._decides(server):
                raise JudgeRefusedError(f"{server.url} serves no model {self.model!r}; it serves {names}")
            server.note = notes.get(self.model, "")
            server.ids = await self._token_ids(server)
            # `transformers serve` has no log-probabilities, and another page for probabilities.
            server.decides = server.ids is None and await self._decides(server)
            server.known = True  # last: it marks the handshake as complete

    async def _decides(self, server: Server) -> bool:
        """Whether a server has transformers' page of decisions, which is there for posts alone."""
        import openai

        try:
            await self._exchange(server, f"{server.url}/systemone")
        except openai.APIStatusError as error:
            return error.status_code == 405
        except TransientError as fault:
            if fault.unreachable:
                raise
        return False

    async def _token_ids(self, server: Server) -> TokenIds | None:
        """Query the ids of single-token words from vLLM's /tokenize; None if there is no such page."""
        ids: list[tuple[int, ...]] = []
        for words in self.words:
            single: list[int] = []
            for word in words:
                body = {"model": self.model, "prompt": word, "add_special_tokens": False}
                answer = await self._optional(server, f"{server.url.removesuffix('/v1')}/tokenize", body)
                tokens = (answer or {}).get("tokens")
                if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
                    return None
                # A score is read from one position, so spellings of several tokens cannot count.
                if len(tokens) == 1:
                    single += tokens
            if not single:
                raise JudgeRefusedError(f"{words[0]!r} is not a single token for {self.model} at {server.url}")
            ids.append(tuple(single))
        return ids[0], ids[1]

    async def _optional(self, server: Server, url: str, body: Json | None = None) -> Json | None:
        """Read a page that not every server has."""
        import openai

        try:
            return await self._exchange(server, url, body)
        except openai.APIStatusError as error:
            # A gateway may guard the pages outside of the API differently.
            if error.status_code in (401, 403) and url.startswith(server.url):
                raise self._refusal(error.response) from None
            return None
        except TransientError as fault:
            if fault.unreachable:
                raise
            return None


def _parsed(parse: Callable[[], T]) -> T:
    """Parse an answer. Raises TransientError for a malformed one: another try may be answered well."""
    try:
        return parse()
    except JudgeRefusedError:
        raise
    except MALFORMED as error:
        raise TransientError(f"an answer of another form ({type(error).__name__})") from None


def _remedy(url: str) -> str:
    """Name the command that serves a judge at an address of this machine, as a clause; empty for any other address."""
    parts = urlsplit(url)
    return f" (`pacorl serve CHECKPOINT --port {parts.port}` serves one)" if is_loopback(parts.hostname or "") else ""


def _notes_by_model(document: Json) -> dict[str, str]:
    """Read the models by name, each with its note, which `pacorl serve` alone gives."""
    models = document.get("data")
    notes = {}
    for model in models if isinstance(models, list) else ():
        if isinstance(model, dict) and "id" in model:
            notes[str(model["id"])] = " ".join(str(model.get("note") or "").split())[:500]
    return notes
