"""The judge that asks one model on one or several servers: vLLM, the built-in one, or any with log-probabilities.

    judge = HttpJudge.connect("http://127.0.0.1:8000/v1", model="PaCo-Reward-7B")
    judge.verdicts([Question((first, second), same_theme("a red fox"))])

A verdict is right or missing, never wrong: whatever the server does, an answer that does not hold the probabilities
of Yes and No becomes a missing verdict with its reason. Only what no retry can mend is raised: a model that is not
served, a key that is refused, a tokenizer for which Yes or No is no single token.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from pacorl.core.questions import text_fault
from pacorl.io.net import LoopThread, is_url, key_from
from pacorl.io.outage import OUTAGE_SECONDS, Answers
from pacorl.judge.http.batch import RequestBatch, encoded
from pacorl.judge.http.client import Endpoint, EndpointPool, facts_of
from pacorl.judge.http.endpoints import api_url, load_endpoints
from pacorl.judge.http.messages import (
    EncodedImage,
    ImageFormat,
    Json,
    UnansweredError,
    chat_body,
    check_model,
    question_key,
    read_p_yes,
    read_text,
    verdict_body,
)
from pacorl.judge.judge import VARIANTS, WORDS, Counters, JudgeFacts
from pacorl.judge.pairwise import mean_of_orders, with_turned
from pacorl.types import Question, Verdict


class HttpJudge:
    """Asks one model on one or several servers, every distinct (images, question) of a call once; for any thread."""

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
        outage: float = OUTAGE_SECONDS,
    ) -> None:
        """
        Args:
            api_key_env: The environment variable of the key.
            concurrency: Requests that one endpoint is sent at a time by all `processes` (ranks) together.
            timeout: Seconds for a whole answer, its body included.
            retries: Further attempts before a verdict is missing.
            temperature: Divides the Yes − No logit.
            symmetric: Asks about every pair in both orders (`judge.pairwise`).
            variants: Adds up the spellings `VARIANTS`.
            image_format: PNG is exact; JPEG (quality 95) is smaller.
            decline: A server may decline images outside of its judge's domain (`judge.domain`): a missing verdict.
            outage: Seconds for which questions are retried that no endpoint answers, once `keep_answers` was called; 0
                if they are given up as before.
        """
        if not endpoints:
            raise ValueError("a judge over HTTP needs at least one endpoint, e.g. http://127.0.0.1:8000/v1")
        self.model, self.temperature, self.symmetric, self.image_format = model, temperature, symmetric, image_format
        self.counters = Counters()
        """What it has asked so far."""
        self.answers: Answers | None = None
        """Those that are kept; None if none are."""
        self._outage = outage
        self.pool = EndpointPool(
            model,
            endpoints,
            words=VARIANTS if variants else WORDS,
            key=key_from(api_key_env),
            slots=max(1, concurrency // processes),
            timeout=timeout,
            retries=retries,
            decline=decline,
            counters=self.counters,
        )
        """The endpoints, and which of them answer."""
        self._loop = LoopThread()

    @classmethod
    def connect(cls, source: str | Path, *, model: str = "", api_key_env: str = "", **options: Any) -> HttpJudge:
        """A judge from a URL (then `model` is its name there), or from an endpoints YAML (then `model` chooses)."""
        if is_url(url := str(source)):
            if not model:
                names = f"`curl {api_url(url)}/models` lists them"
                raise ValueError(f"name the model to ask at {url}, by --judge-model or model=; {names}")
            return cls(model, [url], api_key_env=api_key_env, **options)
        document = load_endpoints(Path(source))
        served = document.named(model)
        return cls(served.name, served.endpoints, api_key_env=api_key_env or document.api_key_env, **options)

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One verdict per question, in order. Raises JudgeRefusedError or ImageError if asking on is pointless."""
        return self._loop.run(self._verdicts(list(questions)))

    def submit(self, questions: Sequence[Question]) -> Future[list[Verdict]]:
        """`verdicts` in the background; do not change the images before the future is done."""
        return self._loop.submit(self._verdicts(list(questions)))

    def explain(self, question: Question, *, max_new_tokens: int = 512) -> str:
        """The answer in words. Raises RuntimeError if the server gives none."""
        return self._loop.run(self._explain(question, max_new_tokens))

    def check(self, *, patience: float = 0.0) -> list[Endpoint]:
        """Shakes hands with every endpoint, as `EndpointPool.check` does, and returns what they said of themselves."""
        return self._loop.run(self.pool.check(patience=patience))

    def facts(self) -> JudgeFacts:
        """What the endpoints say of themselves; raises as `check` does."""
        return facts_of(self.check())

    def keep_answers(self, answers: Answers) -> None:
        """From now on keep each answer, take those that are known, and retry questions during an outage.

        `verdicts` then raises UnreachableError if the outage lasts too long.
        """
        self.answers = answers
        if self._outage:
            self.pool.wait_for_outages(self._outage)

    def close(self) -> None:
        """Abandons what is running, and ends the judge's thread."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def _verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        turned = with_turned(questions) if self.symmetric else questions
        verdicts = await RequestBatch(self._answer, self.counters, self.image_format).verdicts(turned)
        return mean_of_orders(questions, verdicts) if self.symmetric else verdicts

    async def _answer(self, images: Sequence[EncodedImage], text: str) -> float:
        async def ask() -> float:
            return await self.pool.ask(lambda server: verdict_body(self.model, images, text, ids=server.ids), self.read)

        return await self.answers.of(question_key(images, text), ask) if self.answers else await ask()

    async def _explain(self, question: Question, max_new_tokens: int) -> str:
        images = [await encoded(image, question, n, self.image_format) for n, image in enumerate(question.images, 1)]
        # Greedy: the same question gets the same reasons.
        body = chat_body(self.model, images, question.text, max_tokens=max_new_tokens) | {"temperature": 0}
        try:
            if reason := text_fault(question.text):
                raise UnansweredError(reason)
            return await self.pool.ask(lambda _: body, lambda answer, _: read_text(answer, self.model))
        except UnansweredError as fault:
            raise RuntimeError(f"{self.model} gave no reasons: {fault}") from None

    def read(self, answer: Json, endpoint: Endpoint) -> float:
        """P(Yes | Yes or No) of an answer, if it is this model's."""
        check_model(answer, self.model)
        return read_p_yes(answer, self.pool.words, ids=endpoint.ids, temperature=self.temperature)
