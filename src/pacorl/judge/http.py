"""The remote judge: a model on a server (vLLM, `pacorl serve`, or any with log-probabilities).

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: an answer without the probabilities of Yes and No becomes a missing verdict
with its reason. Only permanent faults are raised: a missing model, a refused key, a wrong address, a tokenizer without
single tokens for Yes and No, log-probabilities taken after sampling.
"""

import asyncio
import logging
import math
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from operator import itemgetter
from typing import Any, Self, TypeVar

import numpy as np

from pacorl.config.options import JUDGE_KEY
from pacorl.core.questions import text_fault
from pacorl.io.net import (
    OUTAGE_SECONDS,
    ServiceFault,
    ServiceRefusedError,
    UnreachableError,
    client_options,
    own_headers,
    service_faults,
)
from pacorl.judge.calibration import Calibration
from pacorl.judge.images import DistinctImage, distinct_images
from pacorl.judge.judge import ANSWER_SECONDS, CONCURRENCY, MOST_WORDS, RETRIES, VARIANTS, WORDS, split_address
from pacorl.types import Question, Verdict

T = TypeVar("T")
Json = Mapping[str, Any]
TokenIds = tuple[tuple[int, ...], tuple[int, ...]]
"""The ids of Yes and of No."""

logger = logging.getLogger(__name__)

PROBE_SECONDS = 5.0
"""Longest time between two attempts in an outage, so that a restarted server is used within seconds."""
TOP_LOGPROBS = 20  # the most that the API allows
AT_ONCE = {"chat_template_kwargs": {"enable_thinking": False}}
"""Key of a request by which a model answers without thinking first; OpenAI's own service refuses it."""
CUT_TOLERANCE = 1e-3
"""Tolerance for a list of the likeliest tokens without one of Yes and No, which is at most as likely as the list's
least. If that leaves P(Yes) open by more, the verdict is missing."""
ROUNDING = 1e-2  # a server in bf16 may list a log-probability above 0 by so much
FLOOR_LOGPROB = -9999.0  # vLLM's encoding of −inf


# --- requests --------------------------------------------------------------------------------------------------


def chat_body(images: Sequence[DistinctImage], text: str, **options: Any) -> dict[str, Any]:
    """Build a request of one user turn, its images before its text, with further keys."""
    content: list[dict[str, Any]] = []
    for image in images:
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image.png}"}})
    return {"messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}], **options}


def verdict_body(images: Sequence[DistinctImage], text: str, *, ids: TokenIds | None) -> dict[str, Any]:
    """Build a request for the first token's log-probabilities.

    With `ids` the words are requested by id, so that the server lists them even if they are unlikely.
    """
    # The sampled token is unused. At temperature 1 a server that reports log-probabilities after the sampler's changes
    # reports the model's own.
    sampling = {"temperature": 1, "top_p": 1, "logprobs": True, "top_logprobs": TOP_LOGPROBS}
    body = chat_body(images, text, max_tokens=1, **sampling)
    if ids:
        # A checkpoint's penalty is meant for reasons: it would lower a Yes or No in the question.
        body |= {"repetition_penalty": 1, "logprob_token_ids": [*ids[0], *ids[1]], "return_tokens_as_token_ids": True}
    return body


def decision_body(images: Sequence[DistinctImage], text: str) -> dict[str, Any]:
    """Build a request of transformers' `/v1/systemone`, for servers without log-probabilities."""
    assets = {}
    for number, image in enumerate(images, 1):
        assets[f"image-{number}"] = {"type": "image", "format": "png", "data_base64": image.png}
    question = {"type": "noul", "instructions": text}
    return {"state": "".join(assets), "questions": {"same": question}, "assets": assets}


# --- answers ---------------------------------------------------------------------------------------------------


def read_p_yes(answer: Json, words: Sequence[Sequence[str]] = WORDS, *, ids: TokenIds | None = None) -> float:
    """Read P(Yes | Yes or No) from the first token's log-probabilities of a chat completion.

    Args:
        words: The spellings of Yes and of No; tokens with equal spelling are added up.
        ids: Their token ids; if requested, the server's entries are named `token_id:N`.

    Raises:
        ServiceRefusedError: if the log-probabilities are of a sampler, and not of the model.
        ServiceFault: if the answer does not determine the probability.
        LookupError, TypeError, ValueError: if it has another form.
    """
    # The likeliest tokens, and the sampled one, which may be far less likely than they and is no bound.
    first = choice_of(answer)["logprobs"]["content"][0]
    sampled = _entry(first)
    listed = [_entry(entry) for entry in first["top_logprobs"]]
    entries = {*listed, sampled} if sampled[0] not in dict(listed) else set(listed)
    values = sorted((value for _, value in entries), reverse=True)
    # Greedy sampling moves all probability to one token, and hides the model's own.
    if values[0] >= 0 and all(value <= FLOOR_LOGPROB for value in values[1:]):
        raise ServiceRefusedError(
            f"the server's log-probabilities are taken after greedy sampling ({sampled[0]!r:.40} has all of the "
            "probability); start vLLM with --logprobs-mode raw_logprobs"
        )

    # The entries of Yes and No, by id or by text.
    sums = []
    for spellings, tokens in zip(words, ids or ((), ()), strict=True):
        names = {*spellings, *(f"token_id:{token}" for token in tokens)}
        log_probs = [value for name, value in entries if name in names and value > FLOOR_LOGPROB]
        sums.append(float(np.logaddexp.reduce(log_probs)))
    yes, no = sums

    # Their probabilities, if the list determines them.
    if max(yes, no) <= FLOOR_LOGPROB:
        likeliest, _ = max(entries, key=itemgetter(1))
        raise ServiceFault(
            f"neither Yes nor No is among the {len(entries)} tokens that the server listed, the likeliest is "
            f"{likeliest!r:.40}; a model that thinks first cannot judge"
        )
    # The absent one of Yes and No is at most as likely as the least entry; that bound may decide nothing.
    least = min((value for name, value in listed if (name, value) != sampled), default=0.0)
    if min(yes, no) <= FLOOR_LOGPROB and _sigmoid(least - max(yes, no)) > CUT_TOLERANCE:
        present, absent = ("Yes", "No") if yes > no else ("No", "Yes")
        raise ServiceFault(f"the server listed {present} and not {absent}, which may be as likely as its least entry")
    return _sigmoid(yes - no)


def read_decision(answer: Json) -> float:
    """Read P(Yes) from an answer of `/v1/systemone`. Raises as `read_p_yes` does."""
    p_yes = float(answer["answers"]["same"]["noul"])
    if not 0 <= p_yes <= 1:
        raise ValueError(f"{p_yes} is no probability")
    return p_yes


def read_text(answer: Json) -> str:
    """Read the words of a chat completion."""
    return str(choice_of(answer)["message"]["content"].strip())


def read_models(answer: Json) -> dict[str, Json]:
    """Read the entries of the served models by their names."""
    return {str(model["id"]): model for model in answer.get("data", [])}


def choice_of(answer: Json) -> Any:
    """Return the choice of a chat completion. Raises ServiceFault with the words of an error in its place."""
    if "choices" not in answer and "error" in answer:
        raise ServiceFault(f"an error in place of an answer: {str(answer['error'])[:200]}")
    return answer["choices"][0]


def _entry(entry: Json) -> tuple[str, float]:
    """Return a token and its log-probability, which is finite and, up to rounding, not above 0."""
    log_prob = entry["logprob"]
    if type(log_prob) not in (int, float) or not -math.inf < log_prob <= ROUNDING:
        raise ValueError(f"{log_prob!r:.40} is no log-probability")
    return str(entry["token"]), float(log_prob)


def _sigmoid(logit: float) -> float:
    return math.exp(-np.logaddexp(0.0, -logit))


# --- the judge -------------------------------------------------------------------------------------------------


class HttpJudge(AbstractContextManager["HttpJudge", None]):
    """Client of one model on a server; thread-safe. A call sends every distinct question once."""

    def __init__(
        self, source: str, *, processes: int = 1, variants: bool = False, calibration: Calibration | None = None
    ) -> None:
        """
        Args:
            source: `URL[#MODEL]`; a server's only model needs no name. The server's key is in `JUDGE_KEY`, if it has
                one.
            processes: Ranks that share the server's `CONCURRENCY`.
            variants: Add up the spellings `VARIANTS`.
            calibration: Curves that map the verdicts' P(Yes).
        """
        import httpx2
        import openai
        from anyio.from_thread import start_blocking_portal

        self.url, self.model = split_address(source)
        self.words = VARIANTS if variants else WORDS
        self.calibration = calibration
        # Results of the handshake.
        self.ids: TokenIds | None = None
        """Token ids of Yes and No; None if unknown, or before `check`."""
        self.switch: dict[str, Any] = AT_ONCE
        """Key against thinking; empty if the server refuses it."""
        self.decides = False
        """Whether the server is asked for decisions, because it has no log-probabilities."""
        self.identity = ""
        """Identity of the weights, or the model's name if the server publishes none; empty before `check`."""
        self.note = ""
        """Caveat of the server about its judge, with its address; empty for most servers, and before `check`."""
        # Outages.
        self._patience = 0.0
        """Seconds for which a silence is waited out."""
        self._answered_at = -math.inf
        self.is_silent = False
        """Whether the last request had no answer: openai's client repeats none until the server answers again."""
        self._is_announced = False
        """Whether the present outage was logged."""

        # The key is the transport's: variables for OpenAI's own service stay here.
        self._key = os.environ.get(JUDGE_KEY, "").strip()
        transport = httpx2.AsyncClient(**client_options(self.url, seconds=ANSWER_SECONDS, key=self._key))
        self._client: Any = openai.AsyncOpenAI(base_url=self.url, api_key="-", http_client=transport)
        self._slots = asyncio.Semaphore(max(1, CONCURRENCY // processes))
        # An event loop on a thread of its own, so that blocking code, notebooks included, can wait for coroutines.
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())

    @classmethod
    def connect(cls, source: str, *, startup: float = 0.0, **options: Any) -> Self:
        """Build a judge after a handshake with its server.

        Args:
            startup: Seconds to wait for a server that does not answer yet.

        Raises:
            ServiceRefusedError: for a wrong model name, key or address.
            UnreachableError: if the server is silent.
            UsageError: if the calibration is of another judge.
        """
        judge = cls(source, **options)
        try:
            judge._run(judge._check, startup)
            if judge.calibration:
                judge.calibration.check_judge(source, judge.model, judge.identity)
        except BaseException:  # a Ctrl-C too: the judge's thread would outlive it
            judge.close()
            raise
        return judge

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order. Raises ServiceRefusedError or ImageError for permanent faults."""
        verdicts = self._run(self._verdicts, questions)
        if self.calibration:
            return self.calibration.calibrated(verdicts)
        return verdicts

    def explain(self, question: Question) -> str:
        """Answer in words. Raises RuntimeError if the server gives no answer."""
        return self._run(self._explain, question)

    def wait_for_outages(self, seconds: float = OUTAGE_SECONDS) -> None:
        """Retry unanswered questions from now on, for up to `seconds`.

        `verdicts` then raises UnreachableError if the outage lasts longer.
        """
        self._patience = seconds

    def close(self) -> None:
        """Abandon running requests, and end the judge's thread."""
        with suppress(RuntimeError):  # closed before
            self._portal.call(self._portal.stop, True)
        self._stack.close()

    def _run(self, work: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine on the judge's thread; Ctrl-C cancels it."""
        try:
            future = self._portal.start_task_soon(work, *arguments)
        except RuntimeError:
            raise RuntimeError(f"the judge at {self.url} is closed; ask it before its block ends") from None
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- questions ---------------------------------------------------------------------------------------------

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        images = await asyncio.to_thread(distinct_images, questions)
        keys = [(images[number], question.text) for number, question in enumerate(questions)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {key: group.create_task(self._verdict(*key)) for key in dict.fromkeys(keys)}
        except ExceptionGroup as faults:
            # All have the same cause: a refusal, or an outage.
            raise faults.exceptions[0] from None
        return [tasks[key].result() for key in keys]

    async def _verdict(self, images: Sequence[DistinctImage], text: str) -> Verdict:
        try:
            if self.decides:
                return Verdict(await self._ask(text, "systemone", decision_body(images, text), read=read_decision))
            body = verdict_body(images, text, ids=self.ids) | self.switch
            read = partial(read_p_yes, words=self.words, ids=self.ids)
            return Verdict(await self._ask(text, "chat/completions", body, read=read))
        except ServiceFault as fault:
            return Verdict(None, str(fault))

    async def _explain(self, question: Question) -> str:
        (images,) = await asyncio.to_thread(distinct_images, [question])
        # Greedy: the same request gets the same answer.
        body = chat_body(images, question.text, max_tokens=MOST_WORDS, temperature=0, **self.switch)
        try:
            return await self._ask(question.text, "chat/completions", body, read=read_text)
        except ServiceFault as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    async def _ask(self, text: str, page: str, body: Json, *, read: Callable[[Any], T]) -> T:
        """Ask a question; in an outage again, until the server answers.

        Raises:
            ServiceFault: if there is no answer.
            UnreachableError: if the server stays silent for the seconds of `wait_for_outages`.
            ServiceRefusedError: for a wrong model name, key or address.
        """
        if reason := text_fault(text):
            raise ServiceFault(reason)
        asked = {"model": self.model, **body}
        async with self._slots:
            started_at = time.monotonic()
            again = False
            while True:
                sent_at = time.monotonic()
                retries = 0 if self.is_silent else RETRIES
                try:
                    return await self._exchange(f"{self.url}/{page}", asked, read=read, retries=retries)
                except ServiceFault as fault:
                    # Only an outage is waited for. Questions that were answered meanwhile mean none.
                    answered_meanwhile = self._answered_at > sent_at
                    if not (fault.unreachable and self._patience) or (answered_meanwhile and again):
                        raise
                    # Again at once if the server answers other questions, else after a pause.
                    again = answered_meanwhile
                    if not again:
                        await self._sit_out(fault, since=max(started_at, self._answered_at))

    async def _sit_out(self, fault: Exception, *, since: float) -> None:
        """Sleep before the next attempt in an outage. Raises UnreachableError if it has lasted too long."""
        silence = time.monotonic() - since
        if silence >= self._patience:
            raise UnreachableError(f"judge {self.model} at {self.url} has not answered for {silence:.0f} s ({fault})")
        # A single broken connection is not worth a line.
        if silence > 1 and not self._is_announced:
            self._is_announced = True
            logger.warning("no judge answers at %s (%s); retrying for up to %g s", self.url, fault, self._patience)
        await asyncio.sleep(min(PROBE_SECONDS, max(0.5, silence / 4)) * random.uniform(0.5, 1))

    async def _exchange(self, url: str, body: Json | None = None, *, read: Callable[[Any], T], retries: int = 0) -> T:
        """Exchange one request, read its JSON, and note whether the server answers.

        Raises:
            ServiceFault: if there is no answer, or none that `read` accepts.
            ServiceRefusedError: for a refused key or a wrong address.
        """
        import httpx2

        send = self._client.get if body is None else partial(self._client.post, body=body)
        options = {"headers": own_headers(), "max_retries": retries}
        service = {"model": self.model, "key": self._key, "key_variable": JUDGE_KEY}
        # A refusal is an answer too: only an unreachable server is silent.
        is_silent = False
        try:
            with service_faults(self.url, seconds=ANSWER_SECONDS, **service):
                # Over everything: each chunk of a slow body would reset the client's own limit.
                async with asyncio.timeout(ANSWER_SECONDS * (1 + retries)):
                    response = await send(url, cast_to=httpx2.Response, options=options)
                return read(response.json())
        except ServiceFault as fault:
            is_silent = fault.unreachable
            raise
        finally:
            self.is_silent = is_silent
            if not is_silent:
                self._answered_at = time.monotonic()
                self._is_announced = False

    # --- the handshake -----------------------------------------------------------------------------------------

    async def _check(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                return await self._handshake()
            except ServiceFault as fault:
                if time.monotonic() >= deadline:
                    raise UnreachableError(f"no judge at {self.url}: {fault} (`pacorl serve` serves one)") from None
                if not self._is_announced:
                    self._is_announced = True
                    logger.warning("no judge at %s: %s; waiting up to %g s for it", self.url, fault, patience)
                await asyncio.sleep(1.0)

    async def _handshake(self) -> None:
        """Query the server's models and token ids."""
        # The model, by its name or because it is alone.
        models: dict[str, Json] = {}
        try:
            models = await self._exchange(f"{self.url}/models", read=read_models)
        except ServiceFault as fault:
            # `transformers serve` lists the hub's cache, and fails without one.
            if fault.unreachable or not self.model:
                raise
        names = ", ".join([*models][:20])[:500]
        if not self.model and len(models) != 1:
            raise ServiceRefusedError(f"{self.url} serves {names or 'no list of models'}; name one as URL#MODEL")
        self.model = self.model or next(iter(models))
        entry = models.get(self.model, {})
        if entry.get("note"):
            self.note = f"{self.url}: {entry['note']}"
        self.identity = str(entry.get("identity") or f"model {self.model}")

        # Its tokens. `transformers serve` has no log-probabilities, but a page for probabilities.
        base = self.url.removesuffix("/v1")
        self.ids = await self._token_ids(f"{base}/tokenize")
        if self.ids is None:
            self.decides = "/v1/systemone" in str((await self._page(f"{base}/openapi.json")).get("paths"))
            trial = {"model": self.model, **chat_body([], "Yes or No?", max_tokens=1, **AT_ONCE)}
            if not self.decides and not await self._page(f"{self.url}/chat/completions", trial):
                self.switch = {}
        if models and self.model not in models and not self.decides:
            raise ServiceRefusedError(f"{self.url} serves no model {self.model!r}; it serves {names}")

    async def _token_ids(self, page: str) -> TokenIds | None:
        """Query the ids of single-token words from vLLM's /tokenize; None if there is no such page."""
        ids: list[tuple[int, ...]] = []
        for words in self.words:
            single: list[int] = []
            for word in words:
                question = {"model": self.model, "prompt": word, "add_special_tokens": False}
                tokens = (await self._page(page, question)).get("tokens")
                if not isinstance(tokens, list):
                    return None
                # A score is read from one position, so spellings of several tokens cannot count.
                single += tokens if len(tokens) == 1 else []
            if not single:
                raise ServiceRefusedError(f"{words[0]!r} is not a single token for {self.model} at {self.url}")
            ids.append(tuple(single))
        return ids[0], ids[1]

    async def _page(self, url: str, body: Json | None = None) -> Json:
        """Read an optional page of a server; empty without it."""
        try:
            return await self._exchange(url, body, read=dict)
        except ServiceFault as fault:
            if fault.unreachable:
                raise
        except ServiceRefusedError:  # a gateway may guard such pages
            pass
        return {}
