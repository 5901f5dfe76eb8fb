"""`pacorl serve`: a judge behind an OpenAI-compatible API, for a laptop, a small judge, or tests.

First-token questions are answered in batches, sets and longer answers one at a time, on one thread. For load there is
vLLM (`pacorl.serve.vllm`).
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.requests import HTTPConnection

from pacorl import __version__
from pacorl.config.options import UsageError
from pacorl.core.questions import text_fault
from pacorl.gate.check import Check, ControlError, check_set
from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.scores import Scores, questions_about, score_set
from pacorl.io.images import MAX_PIXELS, ImageError
from pacorl.io.uploads import submit_upload
from pacorl.judge.calibration import threshold
from pacorl.judge.http import FLOOR_LOGPROB
from pacorl.judge.images import DistinctImage
from pacorl.judge.local import LocalJudge
from pacorl.judge.prompting import ChatPrompt, chat_text
from pacorl.serve.vllm import Served
from pacorl.types import Size
from pacorl.web import HEALTH, Guard, RefusedError, listening, run

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

T = TypeVar("T")

GRACE_SECONDS = 10
"""Most seconds for requests that run when the server is stopped."""
BODY_BYTES = 64 * 2**20
"""Limit of a request with images."""
MOST_IMAGES = 64
PROMPT_TOKENS = 8192
"""Limit of a prompt, images included: one thread answers all callers, and a tenfold prompt stalls it."""
LETTERS = 16 * PROMPT_TOKENS
"""Limit of a text, which is more than its tokens have in any prose: tokenizing a megabyte takes 20 s."""
TOGETHER = 64
"""Questions of one batch; their common beginning is computed once."""
WINDOW_SECONDS = 0.003
"""Wait of a batch's first question: short against a forward, long enough for the requests of one call."""


# --- requests --------------------------------------------------------------------------------------------------


def _plain(text: str) -> str:
    if fault := text_fault(text):
        raise ValueError(fault)
    return text


Text = Annotated[str, Field(max_length=LETTERS), AfterValidator(_plain)]
Images = Annotated[list[str], Field(min_length=1, max_length=MOST_IMAGES)]
"""Data URLs."""


class ImageUrl(BaseModel):
    url: str = ""


class Part(BaseModel):
    """A text or an image of a message."""

    type: Literal["text", "image_url"]
    text: Text = ""
    image_url: ImageUrl = ImageUrl()


class Message(BaseModel):
    role: Literal["system", "user", "assistant"]
    content: Text | list[Part]

    @property
    def parts(self) -> list[Part]:
        return [Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content


class Form(BaseModel):
    """The JSON of a request. Unknown fields are refused by name, so that no setting is dropped in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    model: str = ""


class ChatRequest(Form):
    """Conversation to continue. The text is the likeliest; log-probabilities are the model's at temperature 1."""

    messages: list[Message] = Field(min_length=1)
    max_tokens: int = Field(512, ge=1, le=2048)
    temperature: float = 1.0
    top_p: float = 1.0
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    """Penalty in longer answers; None for the checkpoint's."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Whether tokens are named `token_id:N`, since two tokens may share a text."""
    chat_template_kwargs: dict[Literal["enable_thinking"], Literal[False]] = {}
    """A judge answers at once."""


class ConsistencyRequest(Form):
    """Set of images to score, or with `least` or `gate` to pass the gate."""

    images: Images
    theme: Text = ""
    gate: bool = False
    """Whether to give a verdict after the controls, with the calibration's threshold."""
    least: float | None = Field(None, ge=0, le=1)
    """Threshold of a panel's score; asks for a verdict too."""
    ranking: bool = False
    """Whether to compare the first image alone with each of the others."""
    references: dict[Text, Images] = Field({}, max_length=16)
    """Character → its reference images, which every panel of a gate must show."""


class TokenizeRequest(Form):
    prompt: Text
    add_special_tokens: bool = False


# --- the judge and its queue -----------------------------------------------------------------------------------


class ServedJudge:
    """A judge with its name, its one thread, the queue of first-token questions, and metrics."""

    def __init__(self, name: str, judge: LocalJudge) -> None:
        self.name = name
        self.judge = judge
        self.note = PacoReward(judge, name=name).note
        self.tokenizer: Any = judge.processor.tokenizer
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="judge")
        self.queue: asyncio.Queue[tuple[ChatPrompt, asyncio.Future[Tensor]]] = asyncio.Queue()
        self.registry = CollectorRegistry()
        labels = ["path", "status"]
        self.seconds = Histogram("pacorl_request_seconds", "Time of a request.", labels, registry=self.registry)

    async def on_thread(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run work on the judge's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(work, *arguments, **options))

    async def log_probs(self, prompt: ChatPrompt) -> Tensor:
        """Return the (V,) log-probabilities of a prompt's first answer token."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self.queue.put_nowait((prompt, answer))
        return await answer

    async def work(self) -> None:
        """Answer questions until the task is cancelled: all that wait when the thread is free share a forward."""
        while True:
            # The first question opens a window for the rest of its call.
            batch = [await self.queue.get()]
            await asyncio.sleep(WINDOW_SECONDS)
            while len(batch) < TOGETHER and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            try:
                rows: Sequence[Tensor | Exception] = await self.on_thread(
                    self.judge.log_probs, [prompt for prompt, _ in batch]
                )
            except Exception as fault:
                rows = [fault] * len(batch)
            for (_, answer), row in zip(batch, rows, strict=True):
                if not answer.done():  # the caller may have hung up
                    answer.set_exception(row) if isinstance(row, Exception) else answer.set_result(row)

    async def prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        """Build the prompt of a conversation. Raises ImageError for its images, and RefusedError if it is too long."""
        turns = []
        urls = []
        for message in messages:
            content = []
            for part in message.parts:
                if part.type == "image_url":
                    urls.append(part.image_url.url)
                    content.append({"type": "image"})
                else:
                    content.append({"type": "text", "text": part.text})
            turns.append({"role": message.role, "content": content})
        images = await decoded(urls)
        text = chat_text(self.judge.processor, turns)
        tokens = self.judge.prompting.count(text, [Size(image.height, image.width) for image in images])
        if tokens > PROMPT_TOKENS:
            raise RefusedError(f"the request is {tokens:,} tokens long; at most {PROMPT_TOKENS:,} are taken")
        return ChatPrompt(text, tuple(DistinctImage.of(image, name="an image") for image in images))


async def decoded(urls: Sequence[str]) -> list[Image]:
    """Decode data URLs in the confined process, where they share the pixels of a request. Raises ImageError."""
    if len(urls) > MOST_IMAGES:
        raise ImageError(f"{len(urls)} images in one request; this server takes {MOST_IMAGES}")
    decoding = []
    for number, url in enumerate(urls, 1):
        name = f"image {number}"
        content = await asyncio.to_thread(data_of, url, name=name)
        decoding.append(submit_upload(content, name=name, max_pixels=MAX_PIXELS // len(urls)))
    return [await asyncio.wrap_future(future) for future in decoding]


def data_of(url: str, *, name: str) -> bytes:
    """Return the content of a data URL. Raises ImageError naming the image and the fault."""
    head, _, encoded = url.partition(";base64,")
    if not head.startswith("data:") or not encoded:
        raise ImageError(f"{name}: only data URLs are taken, as data:image/png;base64,…; this server fetches no image")
    try:
        # Validated, since letters outside of the alphabet would be skipped, and a damaged URL could pass as an image.
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ImageError(f"{name}: its data URL is not base64 ({error})") from None


# --- the application -------------------------------------------------------------------------------------------


def create_app(name: str, judge: LocalJudge, *, api_key: str = "") -> FastAPI:
    """Build the server's application for one judge; `api_key` is the callers' key, empty for none."""
    served = ServedJudge(name, judge)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.create_task(served.work())
        yield
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        served.thread.shutdown(cancel_futures=True)

    async def admit(connection: HTTPConnection) -> None:
        _, _, sent = connection.headers.get("authorization", "").partition(" ")
        # Compared in constant time, or the time of an answer would show how much of a key is right.
        is_right = secrets.compare_digest(sent.encode(), api_key.encode())
        if api_key and not is_right and connection.scope["path"] != HEALTH:
            raise RefusedError("this server needs its key: send it as `Authorization: Bearer KEY`", status=401)

    async def measured(request: Request, proceed: Callable[[Request], Any]) -> Response:
        start = time.perf_counter()
        response: Response = await proceed(request)
        path = getattr(request.scope.get("route"), "path", "other")
        served.seconds.labels(path, str(response.status_code)).observe(time.perf_counter() - start)
        return response

    app = FastAPI(title="pacorl judge", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    uploads = ("/v1/chat/completions", "/v1/consistency")
    app.add_middleware(Guard, answer=error_of, admit=admit, is_upload=uploads.__contains__, upload_bytes=BODY_BYTES)
    app.middleware("http")(measured)
    for kind in (RefusedError, ImageError, UsageError, ControlError, RequestValidationError, Exception):
        app.add_exception_handler(kind, lambda _, fault: error_of(fault))
    add_routes(app, served)
    return app


def add_routes(app: FastAPI, served: ServedJudge) -> None:  # noqa: C901 - a list of routes
    judge = served.judge

    @app.post("/v1/chat/completions")
    async def chat(request: ChatRequest) -> dict[str, Any]:
        """Continue a conversation; a first token is answered in a batch with those of other callers."""
        prompt = await served.prompt(request.messages)
        if request.max_tokens == 1:
            row = await served.log_probs(prompt)
            return completion(request, served, [int(row.argmax())], row)
        if request.logprobs:
            raise RefusedError("log-probabilities are those of one token; set max_tokens to 1")
        options: dict[str, Any] = {"max_new_tokens": request.max_tokens, "do_sample": False}
        if request.repetition_penalty is not None:
            options["repetition_penalty"] = request.repetition_penalty
        output = await served.on_thread(judge.generate, prompt, **options)
        return completion(request, served, output.sequences[0].tolist())

    @app.post("/v1/consistency")
    async def consistency(request: ConsistencyRequest) -> dict[str, Any]:
        """Score or check a set: the documents of `pacorl score --json` and `pacorl check --json`."""
        panels = await decoded(request.images)
        if len(panels) < 2 and not request.references:
            raise RefusedError("1 image has nothing to be compared with; give two or more")
        questions = questions_about(request.theme)
        ask: Callable[..., Scores | Check] = partial(score_set, questions=questions, ranking=request.ranking)
        if request.gate or request.least is not None:
            characters = [(name, await decoded(urls)) for name, urls in request.references.items()]
            counts = [len(images) for _, images in characters]
            of_set: dict[str, Any] = {"panels": len(panels), "references": counts, "plain": not request.theme}
            least = threshold(judge.calibration, request.least, **of_set)
            ask = partial(check_set, least=least, characters=characters, questions=questions)
        result = await served.on_thread(ask, judge, panels)
        return {"judge": served.name, "note": served.note} | result.to_dict()

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        """Cut a text into tokens, as vLLM does."""
        encode = partial(served.tokenizer.encode, add_special_tokens=request.add_special_tokens)
        ids = await asyncio.to_thread(encode, request.prompt)
        return {"count": len(ids), "tokens": list(ids)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model, with the note of its answers."""
        model = {"id": served.name, "object": "model", "owned_by": "pacorl", "note": served.note}
        return {"object": "list", "data": [model]}

    @app.get(HEALTH)
    async def health() -> dict[str, str]:
        """Answer without a key, for a load balancer."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def show_metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(served.registry), media_type=CONTENT_TYPE_LATEST)


def completion(
    request: ChatRequest, served: ServedJudge, ids: Sequence[int], row_V: Tensor | None = None
) -> dict[str, Any]:
    """Write the API's answer of some tokens; `row_V` are the log-probabilities of a single one."""
    log_probs = None
    if request.logprobs and row_V is not None:
        likeliest = row_V.topk(min(request.top_logprobs, len(row_V))).indices.tolist()
        entries = []
        for token in [ids[0], *dict.fromkeys([*likeliest, *request.logprob_token_ids])]:
            name = f"token_id:{token}" if request.return_tokens_as_token_ids else served.tokenizer.decode([token])
            # JSON has no −inf.
            entries.append({"token": name, "logprob": max(float(row_V[token]), FLOOR_LOGPROB)})
        log_probs = {"content": [{**entries[0], "top_logprobs": entries[1:]}]}
    ends = served.judge.model.generation_config.eos_token_id
    stopped = ids[-1] in (ends if isinstance(ends, list) else [ends])
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": served.tokenizer.decode(list(ids), skip_special_tokens=True)},
        "logprobs": log_probs,
        "finish_reason": "stop" if stopped else "length",
    }
    about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": "chat.completion", "created": int(time.time())}
    return {**about, "model": served.name, "choices": [choice]}


def error_of(fault: Exception) -> JSONResponse:
    """Write an error as the API does."""
    status, message, kind = getattr(fault, "status", 400), str(fault), "invalid_request_error"
    document: dict[str, Any] = {}
    if isinstance(fault, ControlError):
        status, kind, document = 422, "refused", fault.to_dict()
    elif isinstance(fault, RequestValidationError):
        faults = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}"[:200] for each in fault.errors()[:3]]
        message = "; ".join(faults)
    elif not isinstance(fault, RefusedError | ImageError | UsageError):
        # A fault of the judge: the server's log has it, and a client need not read it.
        status, message, kind = 500, f"the judge failed ({type(fault).__name__})", "server_error"
    error = {"message": message, "type": kind, "code": status, **document}
    return JSONResponse({"error": error}, status_code=status)


def serve_judge(served: Served, judge: LocalJudge, *, api_key: str = "") -> None:
    """Serve until a signal ends it."""
    app = create_app(served.name, judge, api_key=api_key)
    with listening(served.host, served.port) as (listener, _):
        run(app, listener, grace_seconds=GRACE_SECONDS)
