"""The built-in server: `pacorl serve CHECKPOINT --backend builtin`.

FastAPI over `LocalJudge`, for a laptop, a small judge, or tests; vLLM is the one for production. `/v1/models`,
`/v1/chat/completions`, `/tokenize`, `/version`, `/health` and `/metrics`. First-token questions of all callers are
batched together; longer answers are generated one at a time on the same thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from pacorl import __version__
from pacorl.io.images import MAX_PIXELS
from pacorl.judges.http.client import DECLINE_HEADER, DECLINED
from pacorl.judges.http.endpoints import Server
from pacorl.judges.local import LocalJudge, placement
from pacorl.judges.prompting import ChatPrompt
from pacorl.serve.batcher import Batcher, QueueFullError
from pacorl.serve.conversation import Continuation, Conversations, pick_token
from pacorl.serve.fetch import fetch_image
from pacorl.serve.metrics import Metrics
from pacorl.serve.schema import ChatRequest, ImagePart, TokenizeRequest
from pacorl.web.guards import BodyLimit, RefusedError
from pacorl.web.site import validation_message

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may hold."""

    body_bytes: int = 64 * 2**20
    images: int = 8
    pixels: int = MAX_PIXELS
    """Of one image."""
    new_tokens: int = 2048
    waiting: int = 1024
    """Questions that may queue for one model."""
    together: int = 64
    """Questions that are answered in common; what they share is computed once."""


class DeclinedError(Exception):
    """A request about images outside of the judge's domain."""


class ServedModel:
    """One judge under its name, its queue and its thread."""

    def __init__(self, name: str, judge: LocalJudge, limits: Limits) -> None:
        self.name = name
        self.conversations = Conversations(judge)
        self.domain = judge.domain
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=f"judge-{name}")
        self.batcher: Batcher[ChatPrompt, Tensor] = Batcher(
            judge.log_probs, self.executor, largest=limits.together, most_waiting=limits.waiting
        )

    async def check_domain(self, prompt: ChatPrompt) -> None:
        """Raises DeclinedError if an image is outside of what the judge knows."""
        if self.domain and prompt.images:
            images = [distinct.image for distinct in prompt.images]
            if reason := await asyncio.to_thread(self.domain.reason, images):
                raise DeclinedError(reason)

    async def answer(self, request: ChatRequest, prompt: ChatPrompt) -> Continuation:
        """The continuation that a request asks for; a single token goes through the batcher."""
        if request.new_tokens == 1:
            row = await self.batcher.ask(prompt)
            token = pick_token(row, temperature=request.temperature, top_p=request.top_p, seed=request.seed)
            return Continuation((token,), row[None], stopped=self.conversations.ends_with(token))
        work = partial(
            self.conversations.generate,
            prompt,
            max_new_tokens=request.new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            scored=request.logprobs,
        )
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)


def create_app(
    judges: Mapping[str, LocalJudge], *, limits: Limits | None = None, api_key: str = "", allow_urls: bool = False
) -> FastAPI:
    """The server's application, one model per name. `allow_urls`: fetch http images, not data URLs only."""
    limits = limits or Limits()
    models = {name: ServedModel(name, judge, limits) for name, judge in judges.items()}
    metrics = Metrics()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        workers = [asyncio.create_task(model.batcher.work()) for model in models.values()]
        yield
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for model in models.values():
            model.executor.shutdown(cancel_futures=True)

    app = FastAPI(title="pacorl judge", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    _add_guards(app, limits, api_key)
    _add_errors(app)
    _add_pages(app, models, metrics)

    @app.post("/v1/chat/completions")
    async def chat(
        request: ChatRequest, decline: Annotated[Literal["yes", "no"], Header(alias=DECLINE_HEADER)] = "yes"
    ) -> JSONResponse:
        model = _model_of(models, request.model)
        with metrics.request(model.name):
            prompt = await _prompt(model, request, limits, allow_urls)
            if decline == "yes":
                await model.check_domain(prompt)
            continuation = await model.answer(request, prompt)
            metrics.images += len(prompt.images)
            return JSONResponse(completion(request, continuation, model.conversations))

    return app


def load_judges(server: Server, *, dtype: str = "auto") -> dict[str, LocalJudge]:
    """The judges of one server by name; each adapter is merged into weights of its own, each declines what it does
    not know."""
    adapters = {**dict.fromkeys(server.names, ""), **server.adapters}
    device = placement(server.checkpoint, dtype)
    return {
        name: LocalJudge.from_pretrained(server.checkpoint, adapter=adapter, decline=True, **device)
        for name, adapter in adapters.items()
    }


def run_builtin(
    judges: Mapping[str, LocalJudge],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    api_key: str = "",
    allow_urls: bool = False,
) -> None:
    """Serves until a signal ends it."""
    import uvicorn

    app = create_app(judges, limits=limits, api_key=api_key, allow_urls=allow_urls)
    uvicorn.run(app, host=host, port=port, log_level="warning", timeout_graceful_shutdown=10)


# --- requests --------------------------------------------------------------------------------------------------


def _model_of(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    if name not in models:
        raise RefusedError(f"there is no model {name!r}; served are {', '.join(models)}", status=404)
    return models[name]


async def _prompt(model: ServedModel, request: ChatRequest, limits: Limits, allow_urls: bool) -> ChatPrompt:
    urls = [part.image_url.url for message in request.messages for part in message.parts if isinstance(part, ImagePart)]
    if len(urls) > limits.images:
        raise RefusedError(f"{len(urls)} images in one request; at most {limits.images} are taken", status=400)
    if request.new_tokens > limits.new_tokens:
        raise RefusedError(f"max_tokens {request.new_tokens} is above this server's {limits.new_tokens}", status=400)
    beyond = [i for i in request.logprob_token_ids if i >= model.conversations.vocabulary]
    if beyond:
        raise RefusedError(
            f"logprob_token_ids {beyond} are beyond the {model.conversations.vocabulary} tokens", status=400
        )
    load = partial(fetch_image, max_pixels=limits.pixels, max_bytes=limits.body_bytes, allow_urls=allow_urls)
    try:
        images = [await asyncio.to_thread(load, url, name=f"image {i + 1}") for i, url in enumerate(urls)]
        return model.conversations.prompt(request.messages, images)
    except (ValueError, OSError) as fault:
        raise RefusedError(str(fault), status=400) from None


# --- answers ---------------------------------------------------------------------------------------------------


def completion(request: ChatRequest, continuation: Continuation, conversations: Conversations) -> dict[str, Any]:
    """The API's answer to a request."""
    name = partial(_token_name, conversations.tokenizer, by_id=request.return_tokens_as_token_ids)
    content = [
        _position(request, token, row, name)
        for token, row in zip(continuation.ids, continuation.log_probs if request.logprobs else [], strict=False)
    ]
    text = conversations.tokenizer.decode(list(continuation.ids), skip_special_tokens=True)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content} if request.logprobs else None,
        "finish_reason": "stop" if continuation.stopped else "length",
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
    }


def _position(request: ChatRequest, token: int, row: Tensor, name: Callable[[int], str]) -> dict[str, Any]:
    """One generated token, the likeliest there, and those that were asked for by id."""
    top = row.topk(min(request.top_logprobs, len(row))).indices.tolist()
    listed = dict.fromkeys([*top, *request.logprob_token_ids])
    return _entry(token, row, name) | {"top_logprobs": [_entry(i, row, name) for i in listed]}


def _entry(token: int, row: Tensor, name: Callable[[int], str]) -> dict[str, Any]:
    text = name(token)
    return {"token": text, "logprob": max(float(row[token]), -9999.0), "bytes": list(text.encode())}


def _token_name(tokenizer: Any, token: int, *, by_id: bool) -> str:
    return f"token_id:{token}" if by_id else str(tokenizer.decode([token]))


# --- pages, guards, errors -------------------------------------------------------------------------------------


def _add_pages(app: FastAPI, models: Mapping[str, ServedModel], metrics: Metrics) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "pacorl"} for name in models]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        model = _model_of(models, request.model or next(iter(models)))
        tokenizer = model.conversations.tokenizer
        ids = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)
        return {"count": len(ids), "tokens": list(ids)}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": f"pacorl {__version__}"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> str:
        return metrics.text({name: model.batcher for name, model in models.items()})


def _add_guards(app: FastAPI, limits: Limits, api_key: str) -> None:
    # The last one added comes first: who has no key has no body read.
    app.add_middleware(BodyLimit, max_bytes=limits.body_bytes, answer=lambda fault: _error(fault.status, str(fault)))

    @app.middleware("http")
    async def check_key(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if api_key and request.url.path != "/health" and not secrets.compare_digest(sent.encode(), api_key.encode()):
            return _error(401, "a key is needed: send it as `Authorization: Bearer KEY`")
        return await proceed(request)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refused(_: Request, fault: RefusedError) -> JSONResponse:
        return _error(fault.status, str(fault))

    @app.exception_handler(DeclinedError)
    async def declined(_: Request, fault: DeclinedError) -> JSONResponse:
        return _error(422, str(fault), kind=DECLINED)

    @app.exception_handler(QueueFullError)
    async def full(_: Request, fault: QueueFullError) -> JSONResponse:
        return _error(429, "too many questions are waiting; ask again", {"Retry-After": "1"})

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, fault: RequestValidationError) -> JSONResponse:
        return _error(400, validation_message(fault))

    @app.exception_handler(Exception)
    async def broken(_: Request, fault: Exception) -> JSONResponse:
        # What broke is in the server's log; a stranger need not read it.
        return _error(500, f"the judge failed ({type(fault).__name__})")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None, *, kind: str = "") -> JSONResponse:
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=dict(headers or {}))
