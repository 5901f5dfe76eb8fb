"""The judge that asks one model on one or several servers: vLLM, the built-in one, or any with log-probabilities.

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1", model="PaCo-Reward-7B")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: whatever the server does, an answer that does not hold the probabilities
of Yes and No becomes a missing verdict with its reason. Only what no retry can mend is raised: a model that is not
served, a key that is refused, a tokenizer for which Yes or No is no single token.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pacorl.io.net import is_url
from pacorl.judges.http.client import Endpoint, EndpointPool
from pacorl.judges.http.endpoints import api_url, load_endpoints
from pacorl.judges.http.messages import (
    DeclinedError,
    EncodedImage,
    ImageFormat,
    Json,
    TransientError,
    UnansweredError,
    chat_body,
    encode,
    read_p_yes,
    read_text,
    verdict_body,
)
from pacorl.judges.judge import VARIANTS, WORDS, Counters, JudgeFacts
from pacorl.judges.pairwise import mean_of_orders, with_turned
from pacorl.types import Question, Verdict

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")


class HttpJudge:
    """Asks one model on one or several servers; safe to share between threads.

    A judge has an event loop on a thread of its own. `verdicts` blocks, `submit` returns at once, and both ask every
    distinct (images, question) of a call once and encode every image once.
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
        if api_key_env and not os.environ.get(api_key_env):
            raise ValueError(
                f"set the environment variable {api_key_env} to the key of the judge's server; it is not set"
            )
        self.model, self.temperature, self.symmetric, self.image_format = model, temperature, symmetric, image_format
        self.counters = Counters()
        self.pool = EndpointPool(
            model,
            endpoints,
            words=VARIANTS if variants else WORDS,
            key=os.environ[api_key_env] if api_key_env else "",
            slots=max(1, concurrency // processes),
            timeout=timeout,
            retries=retries,
            decline=decline,
            counters=self.counters,
        )
        self._running: set[Future[Any]] = set()
        # By its own factory, since the runner would otherwise make the loop the caller's thread's current one.
        self._runner: asyncio.Runner | None = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._thread = Thread(target=self._runner.get_loop().run_forever, name="pacorl-judge", daemon=True)
        self._thread.start()

    @classmethod
    def connect(cls, source: str | Path, *, model: str = "", api_key_env: str = "", **options: Any) -> HttpJudge:
        """A judge from a URL (then `model` is its name there), or from an endpoints YAML (then `model` chooses)."""
        if is_url(url := str(source)):
            if not model:
                raise ValueError(f"name the model to ask at {url}; `curl {api_url(url)}/models` lists them")
            return cls(model, [url], api_key_env=api_key_env, **options)
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
        return self._wait(self._verdicts(list(questions)))

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """`verdicts` in the background; do not change the images before the future is done."""
        return self._start(self._verdicts(list(questions)))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """The answer in words. Raises RuntimeError if the server gives none."""
        return self._wait(self._explain(question, max_new_tokens))

    def check(self) -> list[Endpoint]:
        """Shakes hands with every endpoint now, and returns them with what they said of themselves.

        Raises:
            JudgeRefusedError: for a wrong name or key.
            ConnectionError: if an endpoint is down.
        """
        return self._wait(self.pool.check())

    def facts(self) -> JudgeFacts:
        """What the endpoints say of themselves; raises as `check` does."""
        endpoints = self.check()
        yes_ids, no_ids = next((endpoint.ids for endpoint in endpoints if endpoint.ids), ((), ()))
        return JudgeFacts(
            yes_ids=yes_ids,
            no_ids=no_ids,
            served={endpoint.url: endpoint.served or () for endpoint in endpoints},
            versions={f"server at {endpoint.url}": endpoint.version for endpoint in endpoints if endpoint.version},
        )

    def close(self) -> None:
        """Abandons what is running, and ends the judge's thread."""
        if self._runner is None:
            return
        runner, self._runner = self._runner, None
        for future in list(self._running):  # a copy: each takes itself out of the set when it is done
            future.cancel()
        loop = runner.get_loop()
        asyncio.run_coroutine_threadsafe(self.pool.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        runner.close()  # after the thread: it runs the loop once more, here, to see the cancelled tasks end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- on the judge's own thread -----------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._runner is None:
            work.close()  # Python would warn of a coroutine that nobody awaits
            raise RuntimeError("this judge is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._runner.get_loop())
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # a Ctrl-C here must not leave requests running there
            raise

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        if not self.symmetric:
            return await RequestBatch(self).verdicts(questions)
        return mean_of_orders(questions, await RequestBatch(self).verdicts(with_turned(questions)))

    async def _explain(self, question: Question, max_new_tokens: int) -> str:
        images = [await self.encoded(image, question, number) for number, image in enumerate(question.images, 1)]
        # Greedy: the same question gets the same reasons.
        body = chat_body(self.model, images, question.text, max_tokens=max_new_tokens) | {"temperature": 0}
        try:
            return await self.pool.ask(lambda _: body, lambda answer, _: read_text(answer))
        except UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    def encoded(self, image: Image, question: Question, number: int) -> Coroutine[Any, Any, EncodedImage]:
        """Encodes an image on another thread, so that requests go out meanwhile; messages call it by its number."""
        return asyncio.to_thread(encode, image, f"image {number} of {question.text!r}", self.image_format)

    def read(self, answer: Json, endpoint: Endpoint) -> float:
        """P(Yes | Yes or No) of an answer, if it is this model's."""
        name = str(answer.get("model") or self.model)
        # Some servers answer with a dated or a qualified name: `judge-2026-11-21`, `org/judge`.
        if not (name.startswith(self.model) or name.endswith(f"/{self.model}")):
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
            # The others fail for the same reason: an image's task takes every question about it along.
            raise faults.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _verdict(self, question: Question, group: asyncio.TaskGroup) -> Verdict:
        for number, image in enumerate(question.images, 1):
            if id(image) not in self._images:
                self._images[id(image)] = group.create_task(self._judge.encoded(image, question, number))
        images = [await self._images[id(image)] for image in question.images]
        # By content: the panels of two grids may be equal without being one object.
        key = (*(image.digest for image in images), question.text)
        if key in self._verdicts:
            self._judge.counters.cached += 1
        else:
            self._verdicts[key] = group.create_task(self._answer(images, question.text))
        return await self._verdicts[key]

    async def _answer(self, images: Sequence[EncodedImage], text: str) -> Verdict:
        judge = self._judge
        try:
            p_yes = await judge.pool.ask(
                lambda endpoint: verdict_body(judge.model, images, text, ids=endpoint.ids), judge.read
            )
        except UnansweredError as fault:
            judge.counters.missing += 1
            return Verdict(None, str(fault), declined=isinstance(fault, DeclinedError))
        return Verdict(p_yes)
