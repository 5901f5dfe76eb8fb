"""The built-in server: `pacorl serve CHECKPOINT --backend builtin`.

FastAPI over `LocalJudge`, for a laptop, a small judge, or tests; vLLM is the one for production. `/v1/models`,
`/v1/chat/completions`, `/v1/consistency`, `/tokenize`, `/version`, `/health` and `/metrics`. First-token questions of
all callers are batched together; sets are scored and longer answers generated one at a time on the same thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from pacorl import __version__
from pacorl.io.images import ImageError
from pacorl.io.net import REQUEST_ID
from pacorl.judge.http.client import DECLINE_HEADER, DECLINED
from pacorl.judge.http.endpoints import Server
from pacorl.judge.http.messages import FLOOR_LOGPROB
from pacorl.judge.local import LocalJudge, placement
from pacorl.judge.score_set import check_count
from pacorl.serve.request_images import RequestImages
from pacorl.serve.schema import ChatRequest, ConsistencyRequest, Limits, TokenizeRequest, asking
from pacorl.serve.served_judge import Continuation, DeclinedError, QueueFullError, ServedModel, check_length
from pacorl.types import Size
from pacorl.web.connections import run
from pacorl.web.forms import JsonRoute, validation_message
from pacorl.web.guard import OTHERS, BodyLimit, Guard, RefusedError
from pacorl.web.site import HEADERS, listening, with_headers

if TYPE_CHECKING:
    from torch import Tensor

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds, of the histogram of requests."""


def create_app(
    judges: Mapping[str, LocalJudge], *, limits: Limits | None = None, api_key: str = "", allow_urls: bool = False
) -> FastAPI:
    """The server's application, one model per name. `allow_urls`: fetch http images, not data URLs only."""
    limits = limits or Limits()
    models = {
        name: ServedModel(name, judge, together=limits.together, waiting=limits.waiting)
        for name, judge in judges.items()
    }
    metrics, request_images = Metrics(), RequestImages(limits, allow_urls=allow_urls)

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
    app.router.route_class = JsonRoute
    _add_guards(app, limits, api_key)
    _add_pages(app, models, metrics, limits)

    @app.post("/v1/chat/completions")
    async def chat(
        request: ChatRequest,
        caller: Caller,
        decline: Annotated[Literal["yes", "no"], Header(alias=DECLINE_HEADER)] = "yes",
    ) -> JSONResponse:
        model = _model_of(models, request.model)
        with metrics.request(model.name):
            _check_tokens(model, request, limits)
            received = await request_images.receive(request.image_urls)
            sizes = [image.size for image in received]
            with _asking():
                text = await asyncio.to_thread(model.text, request.messages, sizes, most_tokens=limits.prompt_tokens)
            async with request_images.decoded(received, caller=caller) as images:
                prompt = await asyncio.to_thread(model.prompt, text, images)
                if decline == "yes":
                    await model.check_domain(prompt)
                continuation = await model.answer(request, prompt)
            metrics.images += len(images)
            return JSONResponse(completion(request, continuation, model.tokenizer))

    @app.post("/v1/consistency")
    async def consistency(request: ConsistencyRequest, caller: Caller) -> dict[str, Any]:
        model = _model_of(models, request.model or next(iter(models)))
        with metrics.request(model.name):
            received = await request_images.receive(request.images)
            with _asking():
                await asyncio.to_thread(_check_set, model, request, [image.size for image in received], limits)
            async with request_images.decoded(received, caller=caller) as images:
                scores = await model.score(request, images)
            metrics.images += len(images)
            return {"model": model.name, **scores.to_dict()}

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
    app = create_app(judges, limits=limits, api_key=api_key, allow_urls=allow_urls)
    with listening(host, port) as (listener, _):
        run(app, sockets=[listener], grace_seconds=10)


# --- requests and answers --------------------------------------------------------------------------------------


async def _caller(request: Request) -> str:
    return request.client.host if request.client else ""


Caller = Annotated[str, Depends(_caller)]
"""Address of whoever asks."""


def _model_of(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    if name not in models:
        raise RefusedError(f"there is no model {name!r}; served are {', '.join(models)}", status=404)
    return models[name]


@contextmanager
def _asking() -> Iterator[None]:
    """Within the block a fault of what was sent is the caller's."""
    try:
        yield
    except (ValueError, OSError) as fault:
        raise RefusedError(str(fault), status=400) from None


def _check_set(model: ServedModel, request: ConsistencyRequest, sizes: Sequence[Size], limits: Limits) -> None:
    """Raises ValueError if there is nothing to compare, or if a question about the two largest images is too long."""
    check_count(len(sizes), ranking=request.ranking)
    largest = sorted(sizes, key=lambda size: size.height * size.width)[-2:]
    for question in request.questions:
        model.text([asking(question.text, images=2)], largest, most_tokens=limits.prompt_tokens)


def _check_tokens(model: ServedModel, request: ChatRequest, limits: Limits) -> None:
    """Raises RefusedError for more new tokens than the server allows, and for tokens that the model does not have."""
    if request.new_tokens > limits.new_tokens:
        raise RefusedError(f"max_tokens {request.new_tokens} is above this server's {limits.new_tokens}", status=400)
    if beyond := [i for i in request.logprob_token_ids if i >= model.vocabulary]:
        raise RefusedError(f"logprob_token_ids {beyond} are beyond the {model.vocabulary} tokens", status=400)


def completion(request: ChatRequest, continuation: Continuation, tokenizer: Any) -> dict[str, Any]:
    """The API's answer to a request."""

    def entry(token: int, row: Tensor) -> dict[str, Any]:
        text = f"token_id:{token}" if request.return_tokens_as_token_ids else str(tokenizer.decode([token]))
        # JSON has no −inf.
        return {"token": text, "logprob": max(float(row[token]), FLOOR_LOGPROB), "bytes": list(text.encode())}

    content = []
    for token, row in zip(continuation.ids, continuation.log_probs if request.logprobs else [], strict=False):
        top = row.topk(min(request.top_logprobs, len(row))).indices.tolist()
        listed = dict.fromkeys([*top, *request.logprob_token_ids])
        content.append(entry(token, row) | {"top_logprobs": [entry(i, row) for i in listed]})
    text = tokenizer.decode(list(continuation.ids), skip_special_tokens=True)
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


# --- pages, guards, errors -------------------------------------------------------------------------------------


def _add_pages(app: FastAPI, models: Mapping[str, ServedModel], metrics: Metrics, limits: Limits) -> None:
    @app.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": name, "object": "model", "owned_by": "pacorl"} for name in models]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> dict[str, Any]:
        tokenizer = _model_of(models, request.model or next(iter(models))).tokenizer
        options = {"add_special_tokens": request.add_special_tokens}
        try:
            check_length(request.prompt, most_tokens=limits.prompt_tokens)
        except ValueError as fault:
            raise RefusedError(str(fault), status=400) from None
        ids = await asyncio.to_thread(tokenizer.encode, request.prompt, **options)
        return {"count": len(ids), "tokens": list(ids)}

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": f"pacorl {__version__}"}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> str:
        return metrics.text(models)


def _add_guards(app: FastAPI, limits: Limits, api_key: str) -> None:
    async def check_key(request: Request) -> None:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        # Not by `request.url`, which begins with the Host header: a stranger may write /health there.
        is_health = request.scope["path"] == "/health"
        # Compared in constant time, or the time of an answer would tell how much of a key is right.
        if api_key and not is_health and not secrets.compare_digest(sent.encode(), api_key.encode()):
            raise RefusedError("a key is needed: send it as `Authorization: Bearer KEY`", status=401)

    def refusal(fault: RefusedError) -> JSONResponse:
        return _error(fault.status, str(fault))

    with_images = dict.fromkeys(("/v1/chat/completions", "/v1/consistency"), BodyLimit(limits.body_bytes))
    app.add_middleware(Guard, answer=refusal, limits={OTHERS: BodyLimit(), **with_images}, admit=check_key)
    app.middleware("http")(with_headers)

    @app.middleware("http")
    async def echo_id(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await proceed(request)
        if sent := request.headers.get(REQUEST_ID):
            response.headers[REQUEST_ID] = sent[:200]  # it ties the answer to its question, whatever stands between
        return response

    for kind in (RefusedError, ImageError, DeclinedError, QueueFullError, RequestValidationError, Exception):
        app.add_exception_handler(kind, _fault)


async def _fault(_: Request, fault: Exception) -> JSONResponse:
    match fault:
        case RefusedError():
            return _error(fault.status, str(fault))
        case ImageError():
            return _error(400, str(fault))
        case DeclinedError():
            return _error(422, str(fault), kind=DECLINED)
        case QueueFullError():
            return _error(429, "too many questions are waiting; ask again", {"Retry-After": "1"})
        case RequestValidationError():
            return _error(400, validation_message(fault))
    # What broke is in the server's log; a stranger need not read it.
    return _error(500, f"the judge failed ({type(fault).__name__})")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None, *, kind: str = "") -> JSONResponse:
    kind = kind or ("invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return JSONResponse(body, status_code=status, headers=HEADERS | dict(headers or {}))


class Metrics:
    """Requests by model and outcome, their time, and the batches that answered them, in Prometheus' text format."""

    def __init__(self) -> None:
        self.images = 0
        self._seconds: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0] * (len(BUCKETS) + 2))
        """(model, outcome) → counts up to each bucket, count of all, sum."""

    @contextmanager
    def request(self, model: str) -> Iterator[None]:
        """Times one request; one that raises counts as failed."""
        start, outcome = time.perf_counter(), "failed"
        try:
            yield
            outcome = "answered"
        finally:
            seconds, row = time.perf_counter() - start, self._seconds[model, outcome]
            for index, bound in enumerate(BUCKETS):
                row[index] += seconds <= bound
            row[-2] += 1
            row[-1] += seconds

    def text(self, models: Mapping[str, ServedModel]) -> str:
        """The page that Prometheus reads."""
        escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
        lines = ["# TYPE pacorl_request_seconds histogram"]
        for (model, outcome), row in sorted(self._seconds.items()):
            labels = f'model="{model.translate(escapes)}",outcome="{outcome}"'
            for bound, count in zip((*BUCKETS, "+Inf"), row, strict=False):
                lines.append(f'pacorl_request_seconds_bucket{{{labels},le="{bound}"}} {count:g}')
            lines.append(f"pacorl_request_seconds_count{{{labels}}} {row[-2]:g}")
            lines.append(f"pacorl_request_seconds_sum{{{labels}}} {row[-1]:.6f}")
        lines += ["# TYPE pacorl_images_total counter", f"pacorl_images_total {self.images}"]
        batchers = {name.translate(escapes): model.batcher for name, model in models.items()}
        counts = {
            "batches_total counter": {name: batcher.batches for name, batcher in batchers.items()},
            "batched_questions_total counter": {name: batcher.questions for name, batcher in batchers.items()},
            "waiting_questions gauge": {name: batcher.waiting for name, batcher in batchers.items()},
        }
        for metric, count_of in counts.items():
            lines.append(f"# TYPE pacorl_{metric}")
            lines += [f'pacorl_{metric.split()[0]}{{model="{name}"}} {count}' for name, count in count_of.items()]
        return "\n".join(lines) + "\n"
