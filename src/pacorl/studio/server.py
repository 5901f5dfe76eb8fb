"""The HTTP API and the page (`pacorl studio`).

    GET    /join/TOKEN             opens the page as the owner of the token
    GET    /api/state              models, words, limits, what is under way
    GET    /api/example            something to ask for
    POST   /api/sets               {theme, panels, …} → a job that paints and ranks candidates
    POST   /api/uploads?name=…     the bytes of one picture; DELETE /api/uploads/ID takes it back
    POST   /api/judgements         {uploads, theme, …} → a job that judges every pair
    GET    /api/jobs/ID            how far it is, and its result; DELETE cancels it
    GET    /pictures/ID/NAME.png   a job's picture

Everything but the page itself asks for the token, as a cookie or as `Authorization: Bearer`. Nothing is written to the
disk, and the page may ask for nothing outside this server.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from pacorl.core.grid import parse_layout
from pacorl.studio.jobs import BusyError, Job, Jobs
from pacorl.studio.uploads import MAX_BYTES, MAX_PICTURES, MAX_PIXELS, Upload, Uploads
from pacorl.studio.work import Bench, JudgeOrder, Models, SetOrder, example, prompt_for, words
from pacorl.types import TINY, Grid, Size
from pacorl.web.body_limit import BodyLimit

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"page.js": "text/javascript", "style.css": "text/css"}
COOKIE = "pacorl_studio"
MAX_CANDIDATES = 9

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the link holds a token
}

Text = Annotated[str, Field(max_length=4000)]


class SetForm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    theme: Text
    panels: Annotated[list[Text], Field(max_length=16)]
    layout: Annotated[str, Field(max_length=9)] = ""
    candidates: Annotated[int, Field(ge=1, le=MAX_CANDIDATES)] = 4
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    steps: Annotated[int, Field(ge=1, le=200)] | None = None
    size: Annotated[str, Field(max_length=11)] = ""
    compare: bool = True


class JudgeForm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    uploads: Annotated[list[str], Field(max_length=MAX_PICTURES)]
    theme: Text = ""
    criteria: Annotated[list[Text], Field(max_length=12)] = []
    layout: Annotated[str, Field(max_length=9)] = ""
    symmetric: bool = False


class RefusedError(Exception):
    """What an endpoint will not do, and why."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Studio:
    """What the endpoints share."""

    token: str
    models: Models = field(default_factory=Models)
    jobs: Jobs = field(default_factory=Jobs)
    uploads: Uploads = field(default_factory=Uploads)
    bench: Bench = field(init=False)
    loading: Job = field(init=False)

    def __post_init__(self) -> None:
        self.bench = Bench(self.models)
        self.loading = self.jobs.submit("load", self.bench.load)

    def close(self) -> None:
        self.jobs.close()
        self.bench.close()


def make_app(studio: Studio) -> FastAPI:
    """The server of one studio."""
    app = FastAPI(title="pacorl studio", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.studio = studio
    app.add_middleware(BodyLimit, max_bytes=MAX_BYTES)
    app.middleware("http")(_guard)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(ValueError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/", lambda: FileResponse(PAGE / "index.html")),
        ("GET", "/page/{name}", page_file),
        ("GET", "/health", lambda: {"status": "ok"}),
        ("GET", "/join/{token}", join),
        ("GET", "/api/state", state),
        ("GET", "/api/example", give_example),
        ("POST", "/api/sets", make_set),
        ("POST", "/api/uploads", upload),
        ("GET", "/uploads/{name}", uploaded),
        ("DELETE", "/api/uploads/{name}", take_back),
        ("POST", "/api/judgements", judge),
        ("GET", "/api/jobs/{name}", job_state),
        ("DELETE", "/api/jobs/{name}", cancel),
        ("GET", "/pictures/{name}/{file}.png", picture),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


async def _guard(request: Request, proceed: Callable[[Request], Any]) -> Response:
    """Sets the headers of every answer."""
    response: Response = await proceed(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def _refused(request: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RefusedError) else 429 if isinstance(error, BusyError) else 422
    return JSONResponse({"error": str(error)}, status_code=status)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in faults)
    return JSONResponse({"error": told or "malformed request"}, status_code=422)


def _studio(request: Request) -> Studio:
    studio: Studio = request.app.state.studio
    return studio


def _owner(request: Request) -> Studio:
    studio = _studio(request)
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    token = bearer if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
    if not hmac.compare_digest(token.encode(), studio.token.encode()):
        raise RefusedError("open the page by the link that the command printed", status=401)
    return studio


Anyone = Annotated[Studio, Depends(_studio)]
Owner = Annotated[Studio, Depends(_owner)]


def join(token: str, studio: Anyone) -> Response:
    """Trades the link's token for a cookie, so that it leaves the address bar."""
    if not hmac.compare_digest(token.encode(), studio.token.encode()):
        return PlainTextResponse("this link is not, or no longer, the studio's; use the one that it printed\n", 401)
    response = RedirectResponse("/", status_code=303)
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
    return response


def page_file(name: str) -> Response:
    if name not in PAGE_FILES:
        raise RefusedError("there is no such file", status=404)
    return FileResponse(PAGE / name, media_type=PAGE_FILES[name])


# --- state -----------------------------------------------------------------------------------------------------


def state(studio: Owner) -> dict[str, Any]:
    """What the page needs to draw itself, after a reload too."""
    latest = {kind: job.id for kind in ("set", "judgement") if (job := studio.jobs.latest(kind))}
    return {
        "model": studio.models.model,
        "adapter": studio.models.adapter,
        "judge": studio.models.judge_model or studio.models.judge,
        "tiny": {"model": studio.models.model == TINY, "judge": studio.models.judge == TINY},
        "words": words(studio.models),
        "example": example(studio.models, 0),
        "ready": studio.bench.ready.is_set(),
        "fault": studio.loading.error,
        "latest": latest,
        "uploads": [_upload_dict(one) for one in studio.uploads.all],
        "limits": {"bytes": MAX_BYTES, "pixels": MAX_PIXELS, "pictures": MAX_PICTURES, "candidates": MAX_CANDIDATES},
    }


def give_example(studio: Owner, number: int = 0) -> dict[str, Any]:
    return example(studio.models, number)


def job_state(name: str, studio: Owner) -> dict[str, Any]:
    job = _job(studio, name)
    ahead = [one for one in studio.jobs.unfinished if int(one.id) < int(job.id)] if job.status == "queued" else []
    waiting_for = ahead[0].phase or ahead[0].kind if ahead else ""
    return {**job.to_dict(), "ahead": len(ahead), "waiting_for": waiting_for}


def cancel(name: str, studio: Owner) -> dict[str, Any]:
    job = _job(studio, name)
    if job.kind != "load":
        studio.jobs.cancel(job)
    return job.to_dict()


def _job(studio: Studio, name: str) -> Job:
    job = studio.jobs.find(name)
    if job is None:
        raise RefusedError(f"there is no job {name[:20]!r}; old ones are forgotten", status=404)
    return job


def picture(name: str, file: str, studio: Owner) -> Response:
    data = _job(studio, name).pictures.get(file)
    if data is None:
        raise RefusedError("there is no such picture", status=404)
    headers = {"Cache-Control": "private, max-age=86400"}
    return Response(data, media_type="image/png", headers=headers)


# --- making ----------------------------------------------------------------------------------------------------


def make_set(form: SetForm, studio: Owner) -> dict[str, Any]:
    """Queues a set; what the model does not know is refused at once."""
    prompt = prompt_for(studio.models, form.theme, form.panels, _grid(form.layout))
    order = SetOrder(
        prompt=prompt,
        candidates=form.candidates,
        seed=form.seed,
        size=_size(form.size),
        steps=form.steps,
        compare=form.compare and bool(studio.models.adapter),
    )
    return studio.jobs.submit("set", lambda job: studio.bench.paint(job, order)).to_dict()


def _grid(text: str) -> Grid | None:
    return parse_layout(text) if text.strip() else None


def _size(text: str) -> Size | None:
    sides = _grid(text)
    if sides and max(sides.rows, sides.cols) > 4096:
        raise ValueError(f"a sheet of {text} pixels is too large; each side may have 4096")
    return Size(sides.rows, sides.cols) if sides else None


# --- judging ---------------------------------------------------------------------------------------------------


async def upload(request: Request, studio: Owner, name: str = "picture") -> dict[str, Any]:
    """One picture's bytes. What cannot be judged is refused by name."""
    from starlette.concurrency import run_in_threadpool

    return _upload_dict(await run_in_threadpool(studio.uploads.add, await request.body(), name))


def _upload_dict(one: Upload) -> dict[str, Any]:
    return {
        "id": one.id,
        "name": one.name,
        "width": one.size[0],
        "height": one.size[1],
        "picture": f"/uploads/{one.id}",
    }


def _upload(studio: Studio, name: str) -> Upload:
    found = studio.uploads.find(name)
    if found is None:
        raise RefusedError(f"there is no picture {name[:20]!r}; hand it in again", status=404)
    return found


def uploaded(name: str, studio: Owner) -> Response:
    return Response(_upload(studio, name).preview, media_type="image/png")


def take_back(name: str, studio: Owner) -> dict[str, Any]:
    studio.uploads.remove(name)
    return {"uploads": [_upload_dict(one) for one in studio.uploads.all]}


def judge(form: JudgeForm, studio: Owner) -> dict[str, Any]:
    """Queues a judgement of two pictures or more, or of one that is cut apart."""
    grid = _grid(form.layout)
    if grid and len(form.uploads) != 1:
        raise ValueError(f"a sheet is cut alone, and {len(form.uploads)} pictures are given")
    if not grid and len(form.uploads) < 2:
        raise ValueError("one picture has nothing to be compared with; add another, or say how to cut it")
    if grid and not 2 <= grid.count <= MAX_PICTURES:
        raise ValueError(f"a {grid} sheet has {grid.count} panels; 2 to {MAX_PICTURES} can be judged")
    order = JudgeOrder(
        uploads=[_upload(studio, name) for name in form.uploads],
        theme=form.theme.strip(),
        criteria=[text.strip() for text in form.criteria if text.strip()],
        grid=grid,
        symmetric=form.symmetric,
    )
    return studio.jobs.submit("judgement", lambda job: studio.bench.judge(job, order)).to_dict()
