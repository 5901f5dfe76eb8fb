"""`pacorl serve`: a judge behind an OpenAI-compatible API, for a laptop, a small judge, or tests.

First-token questions are answered in batches, sets and longer answers one at a time, on one thread. For load there is
vLLM (`pacorl.serve.vllm`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from pacorl import __version__
from pacorl.core.questions import text_fault
from pacorl.gate.check import ControlError, check_set
from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.scores import score_set
from pacorl.io.images import MAX_PIXELS, ImageError
from pacorl.io.uploads import submit_upload
from pacorl.judge.http import FLOOR_LOGPROB
from pacorl.judge.local import LocalJudge, answer_ids
from pacorl.judge.prompting import ChatPrompt
from pacorl.types import Question
from pacorl.web import HEALTH, Guard, RefusedError, refused

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")

BODY_BYTES = 64 * 2**20
"""Limit of a request."""
MOST_IMAGES = 64
LETTERS = 2**16
"""Limit of a text: one thread answers all callers, and tokenizing a megabyte takes 20 s."""
TOGETHER = 64
"""Questions of one batch; their common beginning is computed once."""
WINDOW_SECONDS = 0.003
"""Wait of a batch's first question: short against a forward, long enough for the requests of one call."""


Text = Annotated[str, Field(max_length=LETTERS)]
Images = Annotated[list[str], Field(min_length=1, max_length=MOST_IMAGES)]
"""Data URLs."""


class Part(BaseModel):
    """A text or an image of a turn."""

    type: Literal["text", "image_url"]
    text: Text = ""
    image_url: dict[str, str] = {}


class Turn(BaseModel):
    """A question: its images, then its text."""

    role: Literal["user"]
    content: list[Part] = Field(min_length=1, max_length=MOST_IMAGES + 1)


class Form(BaseModel):
    """The JSON of a request. Unknown fields are refused by name, so that no setting is dropped in silence."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    model: str = ""

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields: Any) -> Any:
        """Leave out fields that are null, which is the default of each, also of OpenAI's that are unknown here."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    def check_model(self, served: str) -> None:
        """Refuse a request for another model than the served one."""
        if self.model not in ("", served):
            raise RefusedError(f"model {self.model!r} is not served here; {served!r} is", status=404)


class ChatRequest(Form):
    """Question to answer. The text is the likeliest; log-probabilities are the model's at temperature 1."""

    messages: list[Turn] = Field(min_length=1, max_length=1)
    max_tokens: int = Field(512, ge=1, le=2048)
    max_completion_tokens: int = Field(2048, ge=1, le=2048)
    """OpenAI's newer name of `max_tokens`; the smaller counts."""
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: Literal[1] = 1
    """Penalty of a first token; a longer answer has the checkpoint's."""
    logprobs: bool = False
    """Whether to list the first token's likeliest alternatives, and all spellings of Yes and No."""
    top_logprobs: int = Field(0, ge=0, le=20)
    chat_template_kwargs: dict[Literal["enable_thinking"], Literal[False]] = {}
    """A judge answers at once."""
    # Fields that clients send, at their neutral values.
    stream: Literal[False] = False
    n: Literal[1] = 1
    frequency_penalty: Literal[0] = 0
    presence_penalty: Literal[0] = 0
    seed: int = 0
    user: str = ""

    @property
    def most_tokens(self) -> int:
        """Most tokens of the answer."""
        return min(self.max_tokens, self.max_completion_tokens)


class ConsistencyRequest(Form):
    """Set of images to score, or with `least` to pass the gate."""

    images: Images
    theme: Text = ""
    least: float | None = Field(None, ge=0, le=1)
    """Threshold of a panel's score; asks for a verdict, after the controls."""
    ranking: bool = False
    """Whether to compare only the first image with each other image."""
    references: dict[Text, Images] = Field({}, max_length=16)
    """Character → its reference images, which every panel of a gate must show."""

    @model_validator(mode="after")
    def check_use(self) -> ConsistencyRequest:
        """Refuse fields that the other use has."""
        if self.least is None and self.references:
            raise ValueError("references are a gate's; give least too")
        if self.least is not None and self.ranking:
            raise ValueError("a gate has no ranking; leave out least or ranking")
        return self


REFUSALS = """`{"detail": MESSAGE, "error": {"message": MESSAGE, "code": STATUS}}`:
400 a fault of the request, 401 no key or another, 404 another model, 413 too large, 421 another host,
422 a judge that fails its controls, 503 a server that stops: ask again after Retry-After."""
"""Description of all refusals in the schema."""


class ServedJudge:
    """A judge with its name, its one thread, the first-token questions that wait for it, and its two routes."""

    def __init__(self, name: str, judge: LocalJudge) -> None:
        self.name = name
        self.judge = judge
        self.about = PacoReward(judge, name=name).about
        """Its name and caveats, for the documents of scores."""
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self.waiting: list[tuple[ChatPrompt, Future[Tensor]]] = []

    def submit(self, work: Callable[..., T], *arguments: Any, **options: Any) -> asyncio.Future[T]:
        """Run work on the judge's thread."""
        return asyncio.wrap_future(self.thread.submit(work, *arguments, **options))

    def log_probs(self, prompt: ChatPrompt) -> asyncio.Future[Tensor]:
        """Compute the (V,) log-probabilities of a prompt's first answer token."""
        answer: Future[Tensor] = Future()
        self.waiting.append((prompt, answer))
        self.thread.submit(self._answer)
        return asyncio.wrap_future(answer)

    def _answer(self) -> None:
        """Answer the questions that wait when the thread is free, in one forward; none may be left."""
        if not self.waiting:
            return
        time.sleep(WINDOW_SECONDS)  # for the other questions of a call
        batch = []
        for _ in self.waiting[:TOGETHER]:
            prompt, answer = self.waiting.pop(0)
            # A caller may have hung up.
            if answer.set_running_or_notify_cancel():
                batch.append((prompt, answer))
        try:
            rows = self.judge.log_probs([prompt for prompt, _ in batch])
        except Exception as fault:
            for _, answer in batch:
                answer.set_exception(fault)
            return
        for (_, answer), row in zip(batch, rows, strict=True):
            answer.set_result(row)

    # --- routes ------------------------------------------------------------------------------------------------

    async def chat(self, request: ChatRequest) -> dict[str, Any]:
        """Answer a question by OpenAI's `ChatCompletion`; first tokens of concurrent requests share a batch."""
        request.check_model(self.name)
        *image_items, last = request.messages[0].content
        if [*{item.type for item in image_items}, last.type] not in (["image_url", "text"], ["text"]):
            raise RefusedError("messages: a question is one turn of images, and then one text")
        if fault := text_fault(last.text):
            raise RefusedError(f"messages: {fault}")
        images = await decoded([item.image_url.get("url", "") for item in image_items])
        (prompt,) = self.judge.prompting.chat_prompts([Question(tuple(images), last.text)])
        if request.most_tokens == 1:
            row_V = await self.log_probs(prompt)
            return completion(request, self, prompt, [int(row_V.argmax())], row_V)
        if request.logprobs:
            raise RefusedError("log-probabilities are those of one token; set max_tokens to 1")
        ids = await self.submit(self.judge.generate, prompt, max_tokens=request.most_tokens)
        return completion(request, self, prompt, ids)

    async def consistency(self, request: ConsistencyRequest) -> dict[str, Any]:
        """Score or check a set: the documents of `pacorl score --json` and `pacorl check --json`."""
        request.check_model(self.name)
        panels = await decoded(request.images)
        if len(panels) < 2 and not request.references:
            raise RefusedError("1 image has nothing to be compared with; give two or more")
        if request.least is None:
            scores = await self.submit(score_set, self.judge, panels, theme=request.theme, ranking=request.ranking)
            return self.about | scores.to_dict()
        characters = [(name, await decoded(urls)) for name, urls in request.references.items()]
        check = await self.submit(
            check_set, self.judge, panels, least=request.least, theme=request.theme, characters=characters
        )
        return self.about | check.to_dict()


async def decoded(urls: Sequence[str]) -> list[Image]:
    """Decode data URLs in the confined process, where they share the pixels of a request. Raises ImageError."""
    decoding = []
    for number, url in enumerate(urls, 1):
        name = f"image {number}"
        content = await asyncio.to_thread(data_of, url, name=name)
        decoding.append(submit_upload(content, name=name, max_pixels=MAX_PIXELS // len(urls)))
    return [await asyncio.wrap_future(future) for future in decoding]


def data_of(url: str, *, name: str) -> bytes:
    """Return the content of a data URL. Raises ImageError naming the image."""
    head, _, encoded = url.partition(";base64,")
    try:
        # Validated, since letters outside of the alphabet would be skipped, and a damaged URL could pass as an image.
        return base64.b64decode(encoded if head.startswith("data:") else "-", validate=True)
    except ValueError:
        raise ImageError(f"{name} is no data URL, data:image/png;base64,…; this server fetches no image") from None


def create_app(name: str, judge: LocalJudge, *, api_key: str = "", identity: str = "") -> FastAPI:
    """Build the server's application for one judge.

    Args:
        api_key: The callers' key; empty for none.
        identity: Digest of the weights (`identity_at`), to which clients bind their calibrations.
    """
    served = ServedJudge(name, judge)
    model = {"id": name, "object": "model", "identity": identity, **served.about}
    registry = CollectorRegistry()
    seconds = Histogram("pacorl_request_seconds", "Time of a request.", ["path", "status"], registry=registry)
    open_requests = Gauge("pacorl_requests_open", "Requests without an answer, this one too.", registry=registry)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        # What waits is dropped, or Python would answer it before it exits. Meanwhile the loop refuses the callers.
        await asyncio.to_thread(served.thread.shutdown, cancel_futures=True)

    def admit(connection: HTTPConnection) -> None:
        _, _, sent = connection.headers.get("authorization", "").partition(" ")
        # Compared in constant time, or the time of an answer would show how much of a key is right.
        is_right = secrets.compare_digest(sent.encode(), api_key.encode())
        if api_key and not is_right and connection.scope["path"] != HEALTH:
            fault = "got another one" if sent else "got none"
            raise RefusedError(f"this server needs its key and {fault}; `Authorization: Bearer KEY` has it", status=401)

    async def measured(request: Request, proceed: Callable[[Request], Any]) -> Response:
        start = time.perf_counter()
        with open_requests.track_inprogress():
            try:
                response: Response = await proceed(request)
            except asyncio.CancelledError:
                # The server stops, and its grace is over. A status 500 would pass for a fault of the request.
                response = refused("this server stops; ask again in 10 seconds", 503)
        if response.status_code == 413:
            response = refused("a request may have 64 MiB; ask about fewer or smaller images", 413)
        path = getattr(request.scope.get("route"), "path", "other")
        seconds.labels(path, str(response.status_code)).observe(time.perf_counter() - start)
        return response

    faults = (HTTPException, ImageError, ControlError, RequestValidationError)
    handlers: dict[Any, Any] = dict.fromkeys(faults, refusal_of)
    app = FastAPI(
        title="pacorl judge",
        version=__version__,
        responses={"default": {"description": REFUSALS}},
        lifespan=lifespan,
        exception_handlers=handlers,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(Guard, admit=admit)
    app.middleware("http")(measured)
    # `admit` checks the key; this describes it in the schema.
    keyed = [Security(HTTPBearer(auto_error=False))] if api_key else []

    @app.get(HEALTH)
    def health() -> dict[str, str]:
        """Whether the server answers; without a key."""
        return {"status": "ok"}

    @app.get("/metrics", dependencies=keyed, response_class=Response)
    def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", dependencies=keyed)
    def models() -> dict[str, Any]:
        """The served model, with the digest of its weights as `identity`."""
        return {"object": "list", "data": [model]}

    # Limited here, inside of `measured`, which words the refusal.
    app.post("/v1/chat/completions", dependencies=keyed, max_body_size=BODY_BYTES)(served.chat)
    app.post("/v1/consistency", dependencies=keyed, max_body_size=BODY_BYTES)(served.consistency)
    return app


def completion(
    request: ChatRequest, served: ServedJudge, prompt: ChatPrompt, ids: Sequence[int], row_V: Tensor | None = None
) -> dict[str, Any]:
    """Write the API's answer of some tokens; `row_V` are the log-probabilities of a single one."""
    tokenizer: Any = served.judge.processor.tokenizer
    log_probs = None
    if request.logprobs and row_V is not None:
        # The likeliest, of which half may give way to the spellings of Yes and No: P(Yes) needs both.
        (yes, *yes_spellings), (no, *no_spellings) = answer_ids(tokenizer, variants=True)
        spellings = [yes, no, *yes_spellings, *no_spellings][: request.top_logprobs // 2]
        rank_V = row_V.clone()
        rank_V[spellings] = 1.0
        listed = rank_V.topk(min(request.top_logprobs, len(row_V))).indices
        entries = []
        for token in [ids[0], *listed[row_V[listed].argsort(descending=True)].tolist()]:
            # JSON has no −inf.
            entries.append({"token": tokenizer.decode([token]), "logprob": max(float(row_V[token]), FLOOR_LOGPROB)})
        log_probs = {"content": [{**entries[0], "top_logprobs": entries[1:]}]}
    # A token that ends the answer may be the last that is allowed.
    ended = len(ids) < request.most_tokens or ids[-1] in tokenizer.all_special_ids
    asked = len(served.judge.prompting.encode([prompt])[0].ids)
    return {
        "id": f"chatcmpl-{time.time_ns()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": tokenizer.decode(list(ids), skip_special_tokens=True)},
                "logprobs": log_probs,
                "finish_reason": "stop" if ended else "length",
            }
        ],
        "usage": {"prompt_tokens": asked, "completion_tokens": len(ids), "total_tokens": asked + len(ids)},
    }


def refusal_of(_: Request, fault: Exception) -> Response:
    """Answer with a fault of a request in words alone: FastAPI's own answer would hold the request's images."""
    if isinstance(fault, HTTPException):
        return refused(fault.detail, fault.status_code)
    if isinstance(fault, RequestValidationError):
        first = fault.errors()[0]
        fix = "/openapi.json has the fields, and the header is Content-Type: application/json"
        return refused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}; {fix}", 400)
    return refused(str(fault), 422 if isinstance(fault, ControlError) else 400)
