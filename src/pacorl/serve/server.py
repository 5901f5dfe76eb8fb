"""`pacorl serve`: a judge behind an OpenAI-compatible API, for a laptop, a small judge, or tests.

The first-token questions of all callers are answered in batches, sets and longer answers one at a time, on one
thread. For load there is vLLM (`pacorl.serve.vllm`).
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

import torch
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from pacorl import __version__
from pacorl.config.options import UsageError
from pacorl.core.questions import text_fault
from pacorl.gate.check import Check, ControlError, check_set
from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.scores import Scores, check_count, questions_about, score_set
from pacorl.io.images import MAX_PIXELS, ImageError, check_shape
from pacorl.io.uploads import submit_upload, upload_size
from pacorl.judge.calibration import threshold
from pacorl.judge.http import FLOOR_LOGPROB
from pacorl.judge.local import LocalJudge
from pacorl.judge.prompting import ChatPrompt, DistinctImage, chat_text
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
WAITING = 1024
"""Questions that may wait; further ones are refused."""
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


class Form(BaseModel):
    """The JSON of a request. Unknown fields are refused by name, so that no setting is dropped in silence."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ImageUrl(Form):
    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class TextPart(Form):
    type: Literal["text"]
    text: Text


class ImagePart(Form):
    type: Literal["image_url"]
    image_url: ImageUrl
    uuid: str | None = None
    """Key of vLLM's cache; not used here."""


class Message(Form):
    role: Literal["system", "user", "assistant"]
    content: Text | Annotated[list[Annotated[TextPart | ImagePart, Field(discriminator="type")]], Field(max_length=512)]


class ChatRequest(Form):
    """Conversation to continue. The text is the likeliest; log-probabilities are the model's at temperature 1."""

    model: str
    messages: list[Message] = Field(min_length=1, max_length=32)
    max_tokens: int = Field(512, ge=1, le=2048)
    max_completion_tokens: int | None = Field(None, ge=1, le=2048)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=2)
    """Penalty in longer answers; None for the checkpoint's."""
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    logprob_token_ids: list[Annotated[int, Field(ge=0)]] = Field([], max_length=128)
    """Tokens whose log-probabilities are listed besides the likeliest."""
    return_tokens_as_token_ids: bool = False
    """Whether tokens are named `token_id:N`, since two tokens may share a text."""
    chat_template_kwargs: dict[Literal["enable_thinking"], Literal[False]] = {}
    """A judge answers at once."""
    n: Literal[1] = 1
    stream: Literal[False] = False
    user: str = ""

    @property
    def length(self) -> int:
        """Most tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens


class ConsistencyRequest(Form):
    """Set of images to score, and with `least` to pass the gate."""

    images: Images
    model: str = ""
    theme: Text = ""
    criteria: dict[Text, Text] = Field({}, max_length=64)
    """Label → criterion in words."""
    symmetric: bool = False
    ranking: bool = False
    """Whether the first image is compared with each further image, instead of all pairs."""
    gate: bool = False
    """Whether to give a verdict after the controls, with the calibration's threshold."""
    least: float | None = Field(None, ge=0, le=1)
    """Threshold of a panel's score; asks for a verdict too."""
    references: dict[Text, Images] = Field({}, max_length=16)
    """Character → its reference images, which every panel of a gate must show."""


class TokenizeRequest(Form):
    model: str = ""
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
        self.queue: asyncio.Queue[tuple[ChatPrompt, asyncio.Future[Tensor]]] = asyncio.Queue(WAITING)
        self.registry = CollectorRegistry()
        of_server: Any = {"registry": self.registry}
        self.seconds = Histogram("pacorl_request_seconds", "Time of a request.", ["path", "status"], **of_server)
        self.batches = Counter("pacorl_batches", "Batches of first-token questions.", **of_server)
        self.questions = Counter("pacorl_batched_questions", "Questions of these batches.", **of_server)
        waiting = Gauge("pacorl_waiting_questions", "Questions that wait for the judge.", **of_server)
        waiting.set_function(self.queue.qsize)

    async def on_thread(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run work on the judge's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, partial(work, *arguments, **options))

    async def log_probs(self, prompt: ChatPrompt) -> Tensor:
        """Return the (V,) log-probabilities of a prompt's first answer token. Raises RefusedError at a full queue."""
        answer: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        try:
            self.queue.put_nowait((prompt, answer))
        except asyncio.QueueFull:
            raise RefusedError("too many questions are waiting; ask again", status=429) from None
        return await answer

    async def work(self) -> None:
        """Answer questions until the task is cancelled: all that wait when the thread is free share a forward."""
        while True:
            # The first question opens a window for the rest of its call.
            batch = [await self.queue.get()]
            await asyncio.sleep(WINDOW_SECONDS)
            while len(batch) < TOGETHER and not self.queue.empty():
                batch.append(self.queue.get_nowait())
            # Callers who have hung up need no answer.
            batch = [(prompt, answer) for prompt, answer in batch if not answer.done()]
            self.batches.inc()
            self.questions.inc(len(batch))
            rows = await self._rows([prompt for prompt, _ in batch])
            for (_, answer), row in zip(batch, rows, strict=True):
                if not answer.done():
                    answer.set_exception(row) if isinstance(row, Exception) else answer.set_result(row)

    async def _rows(self, prompts: Sequence[ChatPrompt]) -> list[Tensor | Exception]:
        """Return each prompt's log-probabilities or fault, in one forward if no prompt is at fault."""
        try:
            return list(await self.on_thread(self.judge.log_probs, prompts))
        except Exception as fault:
            if len(prompts) == 1:
                return [fault]
        # One by one: the prompt at fault must not fail the others.
        rows = []
        for prompt in prompts:
            rows += await self._rows([prompt])
        return rows

    async def prompt(self, messages: Sequence[Message]) -> tuple[ChatPrompt, int]:
        """Build the prompt of a conversation, and count its tokens.

        Raises:
            RefusedError: for a prompt that is too long.
            ImageError: for an invalid image, or too many.
        """
        turns = []
        urls = []
        for message in messages:
            content: list[dict[str, str]] = []
            for part in [message.content] if isinstance(message.content, str) else message.content:
                if isinstance(part, ImagePart):
                    urls.append(part.image_url.url)
                    content.append({"type": "image"})
                else:
                    content.append({"type": "text", "text": part if isinstance(part, str) else part.text})
            turns.append({"role": message.role, "content": content})
        images = await decoded(urls)
        text = chat_text(self.judge.processor, turns)
        distinct = tuple(DistinctImage.of(image, name=f"image {number}") for number, image in enumerate(images, 1))
        tokens = self.judge.prompting.count(text, [Size(image.height, image.width) for image in images])
        if tokens > PROMPT_TOKENS:
            raise RefusedError(f"the request is {tokens:,} tokens long; at most {PROMPT_TOKENS:,} are taken")
        return ChatPrompt(text, distinct), tokens


async def decoded(urls: Sequence[str]) -> list[Image]:
    """Decode data URLs in the confined process, after their headers are checked.

    Raises:
        ImageError: if there are too many, they have too many pixels together, or one cannot be read.
    """
    if len(urls) > MOST_IMAGES:
        raise ImageError(f"{len(urls)} images in one request; this server takes {MOST_IMAGES}")
    files = []
    for number, url in enumerate(urls, 1):
        name = f"image {number}"
        content = await asyncio.to_thread(data_of, url, name=name)
        size = upload_size(content, name=name)
        check_shape(size, name)
        files.append((content, name, size.height * size.width))
    total = sum(pixels for _, _, pixels in files)
    if total > MAX_PIXELS:
        raise ImageError(f"the images of this request have {total:,} pixels together; send at most {MAX_PIXELS:,}")
    # A header can be false: no more pixels are decoded than it states.
    decoding = [submit_upload(content, name=name, max_pixels=pixels) for content, name, pixels in files]
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

router = APIRouter()


# Async, or FastAPI would call it on a thread.
async def _served(request: Request) -> ServedJudge:
    served: ServedJudge = request.app.state.served
    return served


Judge = Annotated[ServedJudge, Depends(_served)]


def check_model(asked: str, served: ServedJudge) -> None:
    """Raise RefusedError for another model's name."""
    if asked not in ("", served.name):
        raise RefusedError(f"there is no model {asked!r}; served is {served.name}", status=404)


@router.post("/v1/chat/completions")
async def chat(request: ChatRequest, served: Judge) -> dict[str, Any]:
    """Continue a conversation; a first token is answered in a batch with those of other callers."""
    check_model(request.model, served)
    vocabulary = served.judge.model.get_input_embeddings().num_embeddings
    if beyond := [token for token in request.logprob_token_ids if token >= vocabulary]:
        raise RefusedError(f"logprob_token_ids {beyond} are beyond the {vocabulary} tokens")
    prompt, tokens = await served.prompt(request.messages)
    if request.length == 1:
        row = await served.log_probs(prompt)
        return completion(request, served, [int(row.argmax())], row, prompt_tokens=tokens)
    if request.logprobs:
        raise RefusedError("log-probabilities are those of one token; set max_tokens to 1")
    options: dict[str, Any] = {"max_new_tokens": request.length, "do_sample": False}
    if request.repetition_penalty is not None:
        options["repetition_penalty"] = request.repetition_penalty
    output = await served.on_thread(served.judge.generate, prompt, **options)
    return completion(request, served, output.sequences[0].tolist(), torch.empty(0), prompt_tokens=tokens)


@router.post("/v1/consistency")
async def consistency(request: ConsistencyRequest, served: Judge) -> dict[str, Any]:
    """Score a set, or check it: the documents of `pacorl score --json` and `pacorl check --json`."""
    check_model(request.model, served)
    panels = await decoded(request.images)
    asked: Any = {"questions": questions_about(request.theme, request.criteria), "symmetric": request.symmetric}
    work: Callable[..., Scores | Check]
    try:
        if request.gate or request.least is not None:
            least = threshold(
                served.judge.calibration,
                request.least,
                panels=len(panels),
                references=list(map(len, request.references.values())),
                plain=not (request.theme or request.criteria),
            )
            characters = [(name, await decoded(urls)) for name, urls in request.references.items()]
            work = partial(check_set, least=least, characters=characters, **asked)
        else:
            check_count(len(panels), ranking=request.ranking)
            work = partial(score_set, ranking=request.ranking, **asked)
    except ValueError as fault:
        raise RefusedError(str(fault)) from None
    result: Scores | Check = await served.on_thread(work, served.judge, panels)
    return {"judge": served.name, "model": served.name, "note": served.note} | result.to_dict()


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, served: Judge) -> dict[str, Any]:
    """Cut a text into tokens, as vLLM does."""
    check_model(request.model, served)
    encode = partial(served.tokenizer.encode, add_special_tokens=request.add_special_tokens)
    ids = await asyncio.to_thread(encode, request.prompt)
    return {"count": len(ids), "tokens": list(ids)}


@router.get("/v1/models")
async def models(served: Judge) -> dict[str, Any]:
    """List the model, with the note of its answers."""
    model = {"id": served.name, "object": "model", "owned_by": "pacorl", "note": served.note}
    return {"object": "list", "data": [model]}


@router.get(HEALTH)
async def health() -> dict[str, str]:
    """Answer without a key, for a load balancer."""
    return {"status": "ok"}


@router.get("/metrics")
async def show_metrics(served: Judge) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(generate_latest(served.registry), media_type=CONTENT_TYPE_LATEST)


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
        scheme, _, sent = connection.headers.get("authorization", "").partition(" ")
        if not api_key or connection.scope["path"] == HEALTH:
            return
        if scheme.lower() != "bearer" or not sent:
            raise RefusedError("a key is needed: send it as `Authorization: Bearer KEY`", status=401)
        # Compared in constant time, or the time of an answer would show how much of a key is right.
        if not secrets.compare_digest(sent.encode(), api_key.encode()):
            raise RefusedError("the key is not this server's", status=401)

    app = FastAPI(title="pacorl judge", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.served = served
    app.include_router(router)
    uploads = ("/v1/chat/completions", "/v1/consistency")
    app.add_middleware(Guard, answer=error_of, admit=admit, is_upload=uploads.__contains__, upload_bytes=BODY_BYTES)
    app.middleware("http")(_measured)
    for kind in (RefusedError, ImageError, UsageError, ControlError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, lambda _, fault: error_of(fault))
    return app


async def _measured(request: Request, proceed: Callable[[Request], Any]) -> Response:
    """Measure the time of each response, by known paths and status."""
    start = time.perf_counter()
    response: Response = await proceed(request)
    path = request.scope["path"]
    known = path if path in {route.path for route in router.routes} else "other"  # type: ignore[attr-defined]
    seconds = request.app.state.served.seconds
    seconds.labels(known, str(response.status_code)).observe(time.perf_counter() - start)
    return response


def completion(
    request: ChatRequest, served: ServedJudge, ids: Sequence[int], row_V: Tensor, *, prompt_tokens: int
) -> dict[str, Any]:
    """Write the API's answer of some tokens; `row_V` are the log-probabilities of a single one."""

    def entry(token: int) -> dict[str, Any]:
        text = f"token_id:{token}" if request.return_tokens_as_token_ids else str(served.tokenizer.decode([token]))
        # JSON has no −inf.
        return {"token": text, "logprob": max(float(row_V[token]), FLOOR_LOGPROB)}

    log_probs = None
    if request.logprobs:
        likeliest = row_V.topk(min(request.top_logprobs, len(row_V))).indices.tolist()
        listed = dict.fromkeys([*likeliest, *request.logprob_token_ids])
        log_probs = {"content": [entry(ids[0]) | {"top_logprobs": list(map(entry, listed))}]}
    ends = served.judge.model.generation_config.eos_token_id
    stopped = bool(ids) and ids[-1] in ([ends] if isinstance(ends, int) else ends or [])
    message = {"role": "assistant", "content": served.tokenizer.decode(list(ids), skip_special_tokens=True)}
    reason = "stop" if stopped else "length"
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": len(ids)}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": served.name,
        "choices": [{"index": 0, "message": message, "logprobs": log_probs, "finish_reason": reason}],
        "usage": counts | {"total_tokens": prompt_tokens + len(ids)},
    }


def error_of(fault: Exception) -> JSONResponse:
    """Write an error as the API does."""
    # Any other class is a fault of the judge: the server's log has it, and a client need not read it.
    status, message, kind = 500, f"the judge failed ({type(fault).__name__})", "server_error"
    if isinstance(fault, ControlError):
        status, message, kind = 422, str(fault), "refused"
    elif isinstance(fault, RequestValidationError):
        faults = [f"{'.'.join(map(str, each['loc'][1:]))}: {each['msg']}"[:200] for each in fault.errors()[:3]]
        status, message, kind = 400, "; ".join(faults), "invalid_request_error"
    elif isinstance(fault, HTTPException):  # an unknown path or method, or a body that is no JSON
        status, message, kind = fault.status_code, str(fault.detail), "invalid_request_error"
    elif isinstance(fault, RefusedError | ImageError | UsageError):
        status, message, kind = getattr(fault, "status", 400), str(fault), "invalid_request_error"
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}.get(status)
    error = {"message": message, "type": kind, "param": None, "code": status}
    if isinstance(fault, ControlError):
        error |= fault.to_dict()
    return JSONResponse({"error": error}, status_code=status, headers=headers)


def serve_judge(served: Served, judge: LocalJudge, *, api_key: str = "") -> None:
    """Serve until a signal ends it."""
    app = create_app(served.name, judge, api_key=api_key)
    with listening(served.host, served.port) as (listener, _):
        run(app, listener, grace_seconds=GRACE_SECONDS)
