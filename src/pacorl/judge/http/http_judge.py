"""The remote judge: one model on one or several servers (vLLM, the built-in server, or any with log-probabilities).

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1", model="PaCo-Reward-7B")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: an answer without the probabilities of Yes and No becomes a missing verdict
with its reason. Only permanent faults are raised: a missing model, a refused key, a tokenizer without single tokens for
Yes and No.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from pacorl.core.questions import text_fault
from pacorl.io.net import LoopThread, is_url, key_from
from pacorl.io.outage import OUTAGE_SECONDS
from pacorl.judge.calibration import Calibration
from pacorl.judge.http.batch import RequestBatch, encoded
from pacorl.judge.http.client import Endpoint, EndpointPool
from pacorl.judge.http.endpoints import api_url, load_endpoints
from pacorl.judge.http.messages import (
    EncodedImage,
    ImageFormat,
    Json,
    UnansweredError,
    check_model,
    read_p_yes,
    read_text,
    turn_body,
    verdict_body,
)
from pacorl.judge.judge import VARIANTS, WORDS, Counters
from pacorl.judge.pairwise import mean_of_orders, with_turned
from pacorl.types import Chat, Question, Verdict

KEPT_BYTES = 2**26
"""Most bytes of encoded images that are kept between calls."""


class HttpJudge:
    """Client of one model on one or several servers; thread-safe. A call sends every distinct question once."""

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
        calibration: Calibration | None = None,
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        """
        Args:
            api_key_env: The environment variable of the key.
            concurrency: Concurrent requests per endpoint, of all `processes` (ranks) together.
            timeout: Seconds for a whole answer, its body included.
            retries: Further attempts before a verdict is missing.
            temperature: Divisor of the Yes − No logit.
            symmetric: Ask about every pair in both orders (`judge.pairwise`).
            variants: Add up the spellings `VARIANTS`.
            image_format: PNG is exact; JPEG (quality 95) is smaller.
            calibration: Curves that map the verdicts' P(Yes).
            outage: Seconds of retries while no endpoint answers, after `wait_for_outages`; 0 disables them.
        """
        # Settings of requests.
        if not endpoints:
            raise ValueError("a judge over HTTP needs at least one endpoint, e.g. http://127.0.0.1:8000/v1")
        self.model = model
        self.temperature = temperature
        self.symmetric = symmetric
        self.image_format = image_format
        self.calibration = calibration
        self.counters = Counters()
        """Counts so far."""
        self._encoded: Mapping[str, EncodedImage] = {}
        """The last call's images by digest: a second reward asks about the same."""

        # The endpoints, on an event loop in a thread.
        self._outage = outage
        self.pool = EndpointPool(
            model,
            endpoints,
            words=VARIANTS if variants else WORDS,
            key=key_from(api_key_env),
            slots=max(1, concurrency // processes),
            timeout=timeout,
            retries=retries,
            counters=self.counters,
        )
        """The endpoints and their state."""
        self._loop = LoopThread()

    @classmethod
    def connect(cls, source: str | Path, *, model: str = "", api_key_env: str = "", **options: Any) -> HttpJudge:
        """Connect to a URL, with the `model`'s name there, or to a judge of an endpoints YAML, selected by `model`."""
        url = str(source)
        if is_url(url):
            if not model:
                names = f"`curl {api_url(url)}/models` lists them"
                raise ValueError(f"name the model to ask at {url}, by --judge-model or model=; {names}")
            return cls(model, [url], api_key_env=api_key_env, **options)
        document = load_endpoints(Path(source))
        served = document.named(model)
        return cls(served.name, served.endpoints, api_key_env=api_key_env or document.api_key_env, **options)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """Return one verdict per question, in order. Raises JudgeRefusedError or ImageError for permanent faults."""
        return self._loop.run(self._verdicts(list(questions)))

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """Run `verdicts` in the background; the images must not change before the future is done."""
        return self._loop.submit(self._verdicts(list(questions)))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """Answer in words. Raises RuntimeError if the server gives no answer."""
        return self.reply(Chat((*question.images, question.text)), max_new_tokens=max_new_tokens)

    def reply(self, chat: Chat, *, max_new_tokens: int = 512) -> str:
        """Answer a whole turn in words. Raises RuntimeError if the server gives no answer."""
        return self._loop.run(self._reply(chat, max_new_tokens))

    def check(self, *, patience: float = 0.0) -> list[Endpoint]:
        """Shake hands with every endpoint by `EndpointPool.check`, and return the endpoints."""
        return self._loop.run(self.pool.check(patience=patience))

    @property
    def note(self) -> str:
        """Caveat of a server about its judge, with its address; empty for most servers, and before `check`."""
        for endpoint in self.pool.endpoints:
            if endpoint.note:
                return f"{endpoint.url}: {endpoint.note}"
        return ""

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry questions that no server answers, for up to `seconds`, by default the option's.

        `verdicts` then raises UnreachableError if the outage lasts longer.
        """
        seconds = self._outage if seconds is None else seconds
        if seconds:
            self.pool.wait_for_outages(seconds)

    def close(self) -> None:
        """Abandon running requests, and end the judge's thread."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        # One batch for both orders, which may share encoded images.
        turned = with_turned(questions) if self.symmetric else questions
        batch = RequestBatch(self._answer, self.counters, self.image_format, self._encoded)
        verdicts = await batch.verdicts(turned)
        self._encoded = batch.images
        if sum(len(image.url) for image in self._encoded.values()) > KEPT_BYTES:
            self._encoded = {}
        if self.symmetric:
            verdicts = mean_of_orders(questions, verdicts)
        if self.calibration:
            verdicts = self.calibration.calibrated(questions, verdicts)
        return verdicts

    async def _answer(self, images: Sequence[EncodedImage], text: str) -> float:
        digests = [image.digest for image in images]
        return await self.pool.ask(
            lambda server: verdict_body(self.model, images, text, ids=server.ids), self.read, images=digests
        )

    async def _reply(self, chat: Chat, max_new_tokens: int) -> str:
        question = Question(chat.images, chat.text)
        content: list[EncodedImage | str] = []
        for part in chat.content:
            if isinstance(part, str):
                content.append(part)
            else:
                content.append(await encoded(part, question, len(content) + 1, self.image_format))
        # Greedy: the same request gets the same answer.
        body = turn_body(self.model, content, max_tokens=max_new_tokens) | {"temperature": 0}
        try:
            reason = text_fault(chat.text)
            if reason:
                raise UnansweredError(reason)
            return await self.pool.ask(lambda _: body, lambda answer, _: read_text(answer, self.model))
        except UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    def read(self, answer: Json, endpoint: Endpoint) -> float:
        """Read P(Yes | Yes or No) from an answer of this model."""
        check_model(answer, self.model)
        return read_p_yes(answer, self.pool.words, ids=endpoint.ids, temperature=self.temperature)
