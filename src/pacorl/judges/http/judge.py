"""A judge behind an OpenAI-compatible API: vLLM, the built-in server, or any other that returns log-probabilities.

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1", model="PaCo-Reward-7B")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: whatever the server does, an answer that does not hold the probabilities
of Yes and No becomes a missing verdict with its reason. Only what no retry can mend is raised: a model that is not
served, a key that is refused, a tokenizer for which Yes or No is no single token.

`messages` writes requests and reads answers, `client` sends them, `loop` is the thread on which that happens.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from pacorl.config.base import Positive
from pacorl.judges.http.client import Endpoint, EndpointPool, EndpointReport
from pacorl.judges.http.endpoints import address_of, api_url, listens, load_endpoints
from pacorl.judges.http.loop import BackgroundLoop, first_of, wait
from pacorl.judges.http.messages import (
    DeclinedError,
    EncodedImage,
    ImageFormat,
    Json,
    TransientError,
    UnansweredError,
    chat_body,
    encode,
    id_options,
    named_images,
    read_p_yes,
    read_text,
    verdict_body,
)
from pacorl.judges.judge import VARIANTS, WORDS, Counters, JudgeFacts, JudgeOptions, JudgeSpec
from pacorl.judges.pairwise import mean_of_orders, with_turned
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image


class HttpOptions(JudgeOptions):
    """A judge behind an OpenAI-compatible API."""

    backend: Literal["http"] = "http"
    checkpoint: str = ""
    """A URL, or a YAML file of endpoints."""
    model: str = ""
    """The model's name there."""
    api_key_env: str = ""
    """The environment variable that holds the key."""
    concurrency: Positive = 32
    """Requests that an endpoint is sent at a time, by all processes together."""
    timeout: float = Field(60.0, gt=0)
    """Seconds for an answer."""
    retries: int = Field(6, ge=0)
    """Further attempts before a verdict is missing."""

    @model_validator(mode="before")
    @classmethod
    def _no_adapter(cls, section: Any) -> Any:
        if isinstance(section, dict) and (adapter := section.get("adapter")):
            raise ValueError(f"adapter {adapter} is a server's own affair; name it there, and here as the model")
        return section

    @model_validator(mode="after")
    def _has_an_address(self) -> HttpOptions:
        url = is_url(self.checkpoint)
        if not url and not is_endpoints_file(self.checkpoint):
            raise ValueError(
                f"checkpoint {self.checkpoint!r} is no address; backend http needs a URL such as "
                "http://127.0.0.1:8000/v1, or a YAML file of endpoints"
            )
        if url and not self.model:
            raise ValueError(f"model is empty; name the model to ask at {self.checkpoint}")
        return self

    @property
    def name(self) -> str:
        return self.model or self.checkpoint


def is_url(source: str) -> bool:
    """Whether a judge's name is a server's address."""
    return source.startswith(("http://", "https://"))


def is_endpoints_file(source: str) -> bool:
    """Whether a judge's name is a YAML of endpoints."""
    return source.endswith((".yaml", ".yml"))


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
        image_format: ImageFormat = "png",
        decline: bool = False,
    ) -> None:
        """
        Args:
            api_key_env: The environment variable of the key.
            concurrency: Requests that one endpoint is sent at a time by all `processes` (ranks) together.
            timeout: Seconds for a whole answer, its body included.
            retries: Further attempts before a verdict is missing.
            temperature: Divides the Yes − No logit.
            symmetric: Asks about every pair in both orders (`judges.pairwise`).
            variants: Adds up the spellings `VARIANTS`.
            image_format: PNG is exact; JPEG (quality 95) is smaller.
            decline: A server may decline images outside of its judge's domain (`judges.domain`), which makes their
                verdicts missing; by default it is told not to, because a reward needs an answer to everything.
        """
        if not endpoints:
            raise ValueError("a judge over HTTP needs at least one endpoint, e.g. http://127.0.0.1:8000/v1")
        self.model, self.temperature, self.symmetric, self.image_format = model, temperature, symmetric, image_format
        self.counters = Counters()
        self.pool = EndpointPool(
            model,
            endpoints,
            words=VARIANTS if variants else WORDS,
            key=_read_key(api_key_env),
            slots=max(1, concurrency // processes),
            timeout=timeout,
            retries=retries,
            decline=decline,
            counters=self.counters,
        )
        self._running: set[Future[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = BackgroundLoop.join()

    @classmethod
    def connect(cls, source: str | Path, *, model: str = "", api_key_env: str = "", **options: Any) -> HttpJudge:
        """A judge from a URL (then `model` is its name there), or from an endpoints YAML (then `model` chooses)."""
        if is_url(str(source)):
            if not model:
                raise ValueError(f"name the model to ask at {source}; `curl {api_url(str(source))}/models` lists them")
            return cls(model, [str(source)], api_key_env=api_key_env, **options)
        document = load_endpoints(Path(source))
        served = document.named(model)
        return cls(served.name, served.endpoints, api_key_env=api_key_env or document.api_key_env, **options)

    # --- what callers do ---------------------------------------------------------------------------------------

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order.

        Raises:
            JudgeRefusedError: if asking on is pointless.
            ImageError: if an image cannot be looked at.
        """
        return wait(self.submit(questions))

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """`verdicts` in the background; do not change the images before the future is done."""
        return self._start(self._verdicts(list(questions)))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """The answer in words. Raises RuntimeError if the server gives none."""
        return str(wait(self._start(self._explain(question, max_new_tokens))))

    def check(self) -> list[EndpointReport]:
        """Shakes hands with every endpoint now.

        Raises:
            JudgeRefusedError: for a wrong name or key.
            ConnectionError: if an endpoint is down.
        """
        return wait(self._start(self.pool.check()))

    def facts(self) -> JudgeFacts:
        """What the endpoints say of themselves; raises as `check` does."""
        reports = self.check()
        yes_ids, no_ids = next(((report.yes_ids, report.no_ids) for report in reports if report.yes_ids), ((), ()))
        return JudgeFacts(
            yes_ids=yes_ids,
            no_ids=no_ids,
            served={report.url: report.served for report in reports},
            versions={f"server at {report.url}": report.version for report in reports if report.version},
        )

    def close(self) -> None:
        """Abandons what is running; the last judge of the process ends the background loop."""
        if self._loop is None:
            return
        for future in list(self._running):
            future.cancel()
        asyncio.run_coroutine_threadsafe(self.pool.close(), self._loop).result()
        self._loop = None
        BackgroundLoop.leave()

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

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        if not self.symmetric:
            return await RequestBatch(self).verdicts(questions)
        return mean_of_orders(questions, await RequestBatch(self).verdicts(with_turned(questions)))

    async def _explain(self, question: Question, max_new_tokens: int) -> str:
        images = [
            await asyncio.to_thread(encode, image, name, self.image_format) for image, name in named_images(question)
        ]
        # Greedy: the same question gets the same reasons.
        body = chat_body(self.model, images, question.text, max_tokens=max_new_tokens) | {"temperature": 0}
        try:
            return await self.pool.ask(lambda _: body, lambda answer, _: read_text(answer))
        except UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    async def p_yes(self, images: Sequence[EncodedImage], text: str) -> float:
        """P(Yes | Yes or No) for images that are already encoded; on the judge's own loop only."""
        body = verdict_body(self.model, images, text)
        return await self.pool.ask(lambda endpoint: body | id_options(endpoint.ids), self._read)

    def _read(self, answer: Json, endpoint: Endpoint) -> float:
        name = answer.get("model") or self.model
        # Some servers answer with a dated or a qualified name: `judge-2026-11-21`, `org/judge`.
        if not (str(name).startswith(self.model) or str(name).endswith(f"/{self.model}")):
            raise TransientError(f"{name} answered instead of {self.model}")
        return read_p_yes(answer, self.pool.words, ids=endpoint.ids, temperature=self.temperature)


class RequestBatch:
    """The questions of one call: each distinct image is encoded once, each distinct question is asked once."""

    def __init__(self, judge: HttpJudge) -> None:
        self._judge = judge
        self._images: dict[int, asyncio.Task[EncodedImage]] = {}
        self._verdicts: dict[tuple[str, ...], asyncio.Task[Verdict]] = {}

    async def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._verdict(question, group)) for question in questions]
        except ExceptionGroup as faults:
            raise first_of(faults) from None
        return [task.result() for task in tasks]

    async def _verdict(self, question: Question, group: asyncio.TaskGroup) -> Verdict:
        images = [await self._encoded(image, name, group) for image, name in named_images(question)]
        key = (*(image.digest for image in images), question.text)
        if key in self._verdicts:
            self._judge.counters.cached += 1
        else:
            self._verdicts[key] = group.create_task(self._answer(images, question.text))
        return await self._verdicts[key]

    async def _answer(self, images: Sequence[EncodedImage], text: str) -> Verdict:
        try:
            return Verdict(await self._judge.p_yes(images, text))
        except UnansweredError as fault:
            self._judge.counters.missing += 1
            return Verdict(None, str(fault), declined=isinstance(fault, DeclinedError))

    async def _encoded(self, image: Image, name: str, group: asyncio.TaskGroup) -> EncodedImage:
        if id(image) not in self._images:
            work = asyncio.to_thread(encode, image, name, self._judge.image_format)
            self._images[id(image)] = group.create_task(work)
        return await self._images[id(image)]


def _read_key(variable: str) -> str:
    if not variable:
        return ""
    key = os.environ.get(variable, "")
    if not key:
        raise ValueError(f"set the environment variable {variable} to the key of the judge's server; it is not set")
    return key


def open_http(options: HttpOptions, *, processes: int = 1, device: Any = None) -> HttpJudge:
    """The judge of a config, after it shook hands with every endpoint; `device` means nothing to it."""
    return connected(
        options.checkpoint,
        model=options.model,
        api_key_env=options.api_key_env,
        concurrency=options.concurrency,
        processes=processes,
        timeout=options.timeout,
        retries=options.retries,
        symmetric=options.symmetric,
        variants=options.variants,
    )


def connected(source: str | Path, **options: Any) -> HttpJudge:
    """`HttpJudge.connect`, closed again if an endpoint does not answer its handshake."""
    judge = HttpJudge.connect(source, **options)
    try:
        judge.check()
    except BaseException:
        judge.close()
        raise
    return judge


def how_to_serve(options: HttpOptions) -> str:
    """For a server of this machine at whose port nobody listens, how to start it."""
    from_file = is_endpoints_file(options.checkpoint)
    urls = load_endpoints(Path(options.checkpoint)).urls if from_file else [options.checkpoint]
    silent = [(host, port) for host, port in map(address_of, urls) if host and not listens(host, port)]
    if not silent:
        return ""
    ports = ", ".join(f"{host}:{port}" for host, port in silent)
    served = options.checkpoint if from_file else f"CHECKPOINT --name {options.model} --port {silent[0][1]}"
    return f" (nobody listens at {ports}: `pacorl serve {served} --backend vllm`)"


def named_http(source: str, *, adapter: str = "", **options: Any) -> tuple[HttpJudge, str]:
    """A judge by its address, after it shook hands."""
    if adapter:
        raise ValueError("a server's adapters have names of their own; name one as the model instead of an adapter")
    judge = connected(source, **options)
    return judge, judge.model


SPEC = JudgeSpec(
    options=HttpOptions,
    open=open_http,
    from_source=named_http,
    claims=lambda source: is_url(source) or is_endpoints_file(source),
    remedy=how_to_serve,
)
