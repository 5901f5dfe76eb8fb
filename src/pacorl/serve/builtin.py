"""Built-in judge server: `pacorl serve CHECKPOINT --backend builtin`.

FastAPI over `LocalJudge`, for a laptop, a small judge, or tests; vLLM is for production. First-token questions of all
callers are batched together. Sets are scored and longer answers generated one at a time, on the same thread.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from pacorl import __version__
from pacorl.gate.paco_reward import PacoReward
from pacorl.io.images import ImageError
from pacorl.judge.calibration import Calibration
from pacorl.judge.http import FLOOR_LOGPROB
from pacorl.judge.local import LocalJudge, placement
from pacorl.serve.forms import JsonRoute, validation_message
from pacorl.serve.request_images import RequestImages
from pacorl.serve.schema import (
    ChatRequest,
    CheckAnswer,
    CheckRequest,
    ConsistencyRequest,
    ErrorAnswer,
    Limits,
    ScoresAnswer,
    SetRequest,
    TokenizeRequest,
    asking,
)
from pacorl.serve.served_judge import Continuation, ServedModel, UnjudgedError, check_length
from pacorl.serve.vllm import Served
from pacorl.types import Size
from pacorl.web import HEADERS, HEALTH, Guard, RefusedError, listening, run

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

GRACE_SECONDS = 10
"""Most seconds for requests that run when the server is stopped."""
BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the request histogram, in seconds."""

SERVER_ERROR = "server_error"
"""Error type of a fault of the server."""
ERROR_TYPE = "X-Pacorl-Error"
"""Header of an error's type, for the access log of this server or of a proxy."""
REQUEST_ID = "X-Request-Id"
OUTCOMES = ("answered", "refused", "failed")
"""Outcomes of a request in the metrics."""


@dataclass(frozen=True, slots=True)
class AppState:
    """Objects that the endpoints share."""

    models: Mapping[str, ServedModel]
    limits: Limits
    images: RequestImages
    metrics: Metrics

    def model(self, name: str) -> ServedModel:
        """Return the model of a name, or the first for an empty name. Raises RefusedError for an unknown name."""
        name = name or next(iter(self.models))
        if name not in self.models:
            raise RefusedError(f"there is no model {name!r}; served are {', '.join(self.models)}", status=404)
        return self.models[name]


def create_app(
    judges: Mapping[str, LocalJudge],
    *,
    limits: Limits | None = None,
    api_key: str | Collection[str] = "",
    access_log: Callable[[str], None] | None = None,
) -> FastAPI:
    """Build the server's application, a model per name.

    Args:
        api_key: the key of callers, or several, whose list may change while the server runs; empty for none.
        access_log: called with a line of JSON per request; /health, which is polled, is left out.
    """
    limits = limits or Limits()
    models = {}
    for name, judge in judges.items():
        models[name] = ServedModel(name, judge, together=limits.together, waiting=limits.waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        # On the server's own loop, which exists only now.
        workers = [asyncio.create_task(model.batcher.work()) for model in models.values()]
        yield
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        for model in models.values():
            model.executor.shutdown(cancel_futures=True)

    app = FastAPI(title="pacorl judge", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.shared = AppState(models, limits, RequestImages(limits), Metrics(models))
    _add_guards(app, limits, [api_key] if isinstance(api_key, str) else api_key)
    # Outside of the guards, whose refusals count too.
    _add_records(app, access_log=access_log)
    # The schema alone: the guard checks the key before a body is read.
    scheme = [Security(HTTPBearer(auto_error=False))] if any(api_key) else []
    app.include_router(router, dependencies=scheme, responses=ERRORS)
    app.include_router(public)
    # The models of requests have no limit of this server's own.
    schemas = app.openapi()["components"]["schemas"]
    for form, field in ((ConsistencyRequest, "images"), (CheckRequest, "panels")):
        schemas[form.__name__]["properties"][field]["maxItems"] = limits.images
    return app


def load_judge(served: Served, *, calibration: Calibration | None = None) -> LocalJudge:
    """Load the judge of a server, its adapter merged into its weights.

    `calibration` maps the answers of /v1/consistency and /v1/check; log-probabilities stay the model's own.
    """
    options = {**placement(served.checkpoint), "calibration": calibration}
    return LocalJudge.from_pretrained(served.checkpoint, adapter=served.adapter, **options)


def run_builtin(
    judges: Mapping[str, LocalJudge],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    limits: Limits | None = None,
    api_key: str | Collection[str] = "",
    access_log: Callable[[str], None] | None = None,
) -> None:
    """Serve until a signal ends it, with the arguments of `create_app`."""
    app = create_app(judges, limits=limits, api_key=api_key, access_log=access_log)
    with listening(host, port) as (listener, _):
        run(app, listener, grace_seconds=GRACE_SECONDS)


# --- endpoints -------------------------------------------------------------------------------------------------

router = APIRouter(route_class=JsonRoute)
public = APIRouter()
"""Routes without a key."""
ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorAnswer, "description": "The request is malformed."},
    401: {"model": ErrorAnswer, "description": "The key is missing or wrong."},
    404: {"model": ErrorAnswer, "description": "There is no such model or path."},
    413: {"model": ErrorAnswer, "description": "The body is too large."},
    421: {"model": ErrorAnswer, "description": "The server has another name; `PACORL_HOSTS` adds this one."},
    422: {"model": ErrorAnswer, "description": "The judge fails its controls."},
    429: {"model": ErrorAnswer, "description": "Too many questions wait; `Retry-After` has the seconds."},
}


# Async, or FastAPI would call it on a thread.
async def _state(request: Request) -> AppState:
    state: AppState = request.app.state.shared
    return state


State = Annotated[AppState, Depends(_state)]


@router.post("/v1/chat/completions")
async def chat(request: ChatRequest, state: State) -> JSONResponse:
    """Continue a conversation."""
    model = state.model(request.model)
    limits = state.limits
    with state.metrics.request(model.name):
        # Check everything that needs no pixels.
        model.check_tokens(request, limits.new_tokens)
        received = await state.images.receive(request.image_urls)
        sizes = [image.size for image in received]
        with _callers_faults():
            text, tokens = await asyncio.to_thread(
                model.text, request.messages, sizes, most_tokens=limits.prompt_tokens
            )

        # Decode and answer.
        images = await state.images.decoded(received, resized=model.judge.prompting.resized)
        prompt = await asyncio.to_thread(model.prompt, text, images)
        continuation = await model.answer(request, prompt)
        state.metrics.images += len(images)
        return JSONResponse(completion(request, continuation, model.tokenizer, prompt_tokens=tokens))


@router.post("/v1/consistency", response_model=None, responses={200: {"model": ScoresAnswer}})
async def consistency(request: ConsistencyRequest, state: State) -> dict[str, Any]:
    """Score a set of images."""
    model = state.model(request.model)
    async with _set_images(model, request, state) as images:
        scores = await model.score(request, images)
    return {"model": model.name, **scores.to_dict()}


@router.post("/v1/check", response_model=None, responses={200: {"model": CheckAnswer}})
async def check(request: CheckRequest, state: State) -> dict[str, Any]:
    """Check that all panels show the same, after the controls, and name the panel that does not belong."""
    model = state.model(request.model)
    with _callers_faults():
        least = request.threshold(model.judge.calibration)
    async with _set_images(model, request, state) as images:
        checked = await model.check(request, images, least=least)
    reward = PacoReward(model.judge, name=model.name)
    return {"judge": reward.name, "note": reward.note} | checked.to_dict()


@router.post("/tokenize")
async def tokenize(request: TokenizeRequest, state: State) -> dict[str, Any]:
    """Cut a text into tokens."""
    model = state.model(request.model)
    with _callers_faults():
        check_length(request.prompt, most_tokens=state.limits.prompt_tokens)
    options = {"add_special_tokens": request.add_special_tokens}
    ids = await asyncio.to_thread(model.tokenizer.encode, request.prompt, **options)
    return {"count": len(ids), "tokens": list(ids)}


@router.get("/v1/models")
async def list_models(state: State) -> dict[str, Any]:
    """List the models by name, each with the note of its answers."""
    models = []
    for name, model in state.models.items():
        note = PacoReward(model.judge, name=name).note
        models.append({"id": name, "object": "model", "owned_by": "pacorl", "note": note})
    return {"object": "list", "data": models}


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the package's version."""
    return {"version": f"pacorl {__version__}"}


@public.get(HEALTH)
@public.head(HEALTH, include_in_schema=False)
async def health() -> dict[str, str]:
    """Answer without a key, for a load balancer."""
    return {"status": "ok"}


@router.get("/metrics", response_class=PlainTextResponse)
async def show_metrics(state: State) -> str:
    """Return the metrics in Prometheus' text format."""
    return state.metrics.text(state.models)


@contextmanager
def _callers_faults() -> Iterator[None]:
    """Refuse the request for an error of the block, which checks only input of the caller."""
    try:
        yield
    except (ValueError, OSError) as fault:
        raise RefusedError(str(fault), status=400) from None


@asynccontextmanager
async def _set_images(
    model: ServedModel, request: ConsistencyRequest | CheckRequest, state: AppState
) -> AsyncIterator[list[Image]]:
    """Decode the images of a set for a block, which the metrics count."""
    with state.metrics.request(model.name):
        received = await state.images.receive(request.images)
        sizes = [image.size for image in received]
        with _callers_faults():
            await asyncio.to_thread(_check_length, model, request, sizes, most_tokens=state.limits.prompt_tokens)

        images = await state.images.decoded(received, resized=model.judge.prompting.resized)
        yield images
        state.metrics.images += len(images)


def _check_length(model: ServedModel, request: SetRequest, sizes: Sequence[Size], *, most_tokens: int) -> None:
    """Raise ValueError if a question about the two largest images is too long."""
    # Each question shows two images, so the two largest make the longest.
    largest = sorted(sizes, key=lambda size: size.height * size.width)[-2:]
    for question in request.questions:
        model.text([asking(question.text, images=2)], largest, most_tokens=most_tokens)


def completion(
    request: ChatRequest, continuation: Continuation, tokenizer: Any, *, prompt_tokens: int
) -> dict[str, Any]:
    """Write the API's answer to a request."""

    def entry(token: int, row: Tensor) -> dict[str, Any]:
        text = f"token_id:{token}" if request.return_tokens_as_token_ids else str(tokenizer.decode([token]))
        # JSON has no −inf.
        return {"token": text, "logprob": max(float(row[token]), FLOOR_LOGPROB), "bytes": list(text.encode())}

    # Log-probabilities of each position: its token, the likeliest tokens, and the tokens that were asked for.
    logprobs = None
    if request.logprobs:
        content = []
        for token, row in zip(continuation.ids, continuation.log_probs, strict=False):
            top = row.topk(min(request.top_logprobs, len(row))).indices.tolist()
            listed = dict.fromkeys([*top, *request.logprob_token_ids])
            content.append(entry(token, row) | {"top_logprobs": [entry(i, row) for i in listed]})
        logprobs = {"content": content}

    # The answer in the fields of OpenAI's API.
    text = tokenizer.decode(list(continuation.ids), skip_special_tokens=True)
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": logprobs,
        "finish_reason": "stop" if continuation.stopped else "length",
    }
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(continuation.ids),
            "total_tokens": prompt_tokens + len(continuation.ids),
        },
    }


# --- guards and errors -----------------------------------------------------------------------------------------


def _add_guards(app: FastAPI, limits: Limits, keys: Collection[str]) -> None:
    async def check_key(request: HTTPConnection) -> None:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        # Not by `request.url`, which begins with the Host header: a client may write /health there.
        is_health = request.scope["path"] == HEALTH
        # Compared in constant time, or the time of an answer would show how much of a key is right.
        if not any(keys) or is_health:
            return
        if scheme.lower() != "bearer" or not sent:
            raise RefusedError("a key is needed: send it as `Authorization: Bearer KEY`", status=401)
        if not any(secrets.compare_digest(sent.encode(), key.encode()) for key in keys):
            raise RefusedError("the key is not this server's", status=401)

    uploads = ("/v1/chat/completions", "/v1/consistency", "/v1/check")
    is_upload = uploads.__contains__
    app.add_middleware(Guard, answer=_error, admit=check_key, is_upload=is_upload, upload_bytes=limits.body_bytes)

    for kind in (RefusedError, ImageError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_fault)


def _add_records(app: FastAPI, *, access_log: Callable[[str], None] | None) -> None:
    @app.middleware("http")
    async def count(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        """Count and log every response, and echo the request's id, which connects them across proxies."""
        start = time.perf_counter()
        sent = request.headers.get(REQUEST_ID, "")[:200] or uuid.uuid4().hex
        # For the answer to a fault of the server.
        request.state.id = sent

        def record(status: int, kind: str) -> None:
            app.state.shared.metrics.responses[status] += 1
            if access_log and request.scope["path"] != HEALTH:
                line = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "client": request.client.host if request.client else "",
                    "method": request.method,
                    "path": request.scope["path"],
                    "status": status,
                    "seconds": round(time.perf_counter() - start, 3),
                    "id": sent,
                    "error": kind,
                }
                # As JSON, which escapes line breaks: a client must not forge a line.
                access_log(json.dumps(line))

        try:
            response = await proceed(request)
        except Exception:
            record(500, SERVER_ERROR)  # the answer is made outside of all middleware
            raise
        record(response.status_code, response.headers.get(ERROR_TYPE, ""))
        response.headers[REQUEST_ID] = sent
        return response


def _answer_fault(request: Request, fault: Exception) -> JSONResponse:
    response = _error(fault)
    response.headers[REQUEST_ID] = request.state.id
    return response


def _error(fault: Exception) -> JSONResponse:
    """Write an error as the API does."""
    # The server's log has the fault itself; a client need not read it.
    status = 500
    message = f"the judge failed ({type(fault).__name__})"
    headers = dict(HEADERS)
    if isinstance(fault, RequestValidationError):
        status = 400
        message = validation_message(fault)
    elif isinstance(fault, RefusedError | ImageError):
        status = getattr(fault, "status", 400)
        message = str(fault)
    elif isinstance(fault, HTTPException):  # an unknown path or method
        status = fault.status_code
        message = fault.detail
        headers |= fault.headers or {}

    # OpenAI's names, which clients tell apart.
    kind = SERVER_ERROR if status == 500 else "invalid_request_error"
    error: dict[str, Any] = {"message": message, "type": kind, "param": None, "code": status}
    if isinstance(fault, UnjudgedError):
        error |= fault.fields
    headers[ERROR_TYPE] = str(error["type"])
    if status == 429:
        headers["Retry-After"] = "1"
    elif status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse({"error": error}, status_code=status, headers=headers)


class Metrics:
    """Counts and durations of requests by model and outcome, and of the batches that answered them."""

    def __init__(self, models: Iterable[str]) -> None:
        self.images = 0
        self.responses: Counter[int] = Counter()
        """HTTP status → responses."""
        # From the start: the rate of a series that begins with its first failure does not see it.
        self._seconds = {key: [0.0] * (len(BUCKETS) + 2) for key in product(models, OUTCOMES)}
        """(model, outcome) → counts up to each bucket, count of all, sum."""

    @contextmanager
    def request(self, model: str) -> Iterator[None]:
        """Time a request; a fault of the caller counts as refused, any other as failed."""
        start = time.perf_counter()
        outcome = "failed"
        try:
            yield
            outcome = "answered"
        except (RefusedError, ImageError):
            outcome = "refused"
            raise
        finally:
            # Prometheus' buckets are cumulative.
            seconds = time.perf_counter() - start
            row = self._seconds[model, outcome]
            for index, bound in enumerate(BUCKETS):
                row[index] += seconds <= bound
            row[-2] += 1
            row[-1] += seconds

    def text(self, models: Mapping[str, ServedModel]) -> str:
        """Write the metrics in Prometheus' text format."""
        # Label values may contain quotes and line breaks, which the format escapes.
        escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

        lines = _head("build_info", "gauge", "Version of the server.")
        lines.append(f'pacorl_build_info{{version="{__version__}"}} 1')

        # Requests by model and outcome.
        lines += _head("request_seconds", "histogram", "Time of a request, by model and outcome.")
        for (model, outcome), row in sorted(self._seconds.items()):
            labels = f'model="{model.translate(escapes)}",outcome="{outcome}"'
            for bound, count in zip((*BUCKETS, "+Inf"), row, strict=False):
                lines.append(f'pacorl_request_seconds_bucket{{{labels},le="{bound}"}} {count:g}')
            lines.append(f"pacorl_request_seconds_count{{{labels}}} {row[-2]:g}")
            lines.append(f"pacorl_request_seconds_sum{{{labels}}} {row[-1]:.6f}")
        lines += _head("responses_total", "counter", "Responses by HTTP status.")
        for status, count in sorted(self.responses.items()):
            lines.append(f'pacorl_responses_total{{status="{status}"}} {count}')
        lines += _head("images_total", "counter", "Images decoded.")
        lines.append(f"pacorl_images_total {self.images}")

        # Batches by model.
        for name, kind, text, attribute in (
            ("batches_total", "counter", "Batches of questions; a whole set is one.", "batches"),
            ("batched_questions_total", "counter", "Questions of these batches.", "questions"),
            ("waiting_questions", "gauge", "Questions that wait for the judge, those of sets included.", "waiting"),
        ):
            lines += _head(name, kind, text)
            for model, served in models.items():
                count = getattr(served.batcher, attribute)
                lines.append(f'pacorl_{name}{{model="{model.translate(escapes)}"}} {count}')
        return "\n".join(lines) + "\n"


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP pacorl_{name} {text}", f"# TYPE pacorl_{name} {kind}"]
