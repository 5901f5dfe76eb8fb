"""The HTTP API and the page (`pacorl dataset annotate FOLDER --annotators ann,ben`).

    GET  /join/TOKEN          opens the page as the owner of the token
    GET  /api/task            the next instance, what comes after it, and one's progress
    POST /api/rankings        {instance, order, request, seconds}   answers with the next task
    POST /api/skips           {instance, reason, request}
    POST /api/undo            {request}
    GET  /images/KEY/SLOT     a candidate's picture, or the reference's (SLOT = reference)
    GET  /api/admin, /api/admin/rankings.jsonl      for the administrator's token

Pictures are named by instance and slot, never by path. Tokens come as a cookie or as `Authorization: Bearer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, RedirectResponse
from pydantic import BaseModel, ConfigDict, Field

from pacorl.annotate.agreement import agreement
from pacorl.annotate.store import Person, RefusedError, Store, Task, public_key, shown_order
from pacorl.dataset.records import Instance
from pacorl.io.files import inside
from pacorl.io.images import IMAGE_TYPES

PAGE = Path(__file__).parent / "page"
PAGE_FILES = {"page.js": "text/javascript", "admin.js": "text/javascript", "style.css": "text/css"}
COOKIE = "pacorl_annotator"
MAX_BODY = 64 * 1024

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # a join link holds a token
}


class Submission(BaseModel):
    """What every change carries: an id of the client's own, the same when it is sent again."""

    model_config = ConfigDict(extra="forbid")

    request: str


class RankingForm(Submission):
    instance: str
    order: Annotated[list[int], Field(max_length=64)]
    """Slots as they were shown, best first."""
    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


class SkipForm(Submission):
    instance: str
    reason: str


class PersonForm(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    days: Annotated[float, Field(gt=0, le=3650)] = 30


@dataclass(slots=True)
class Desk:
    """What the endpoints share."""

    folder: Path
    store: Store
    summary: tuple[int, dict[str, Any]] | None = None
    """The last summary, and the store's version that it was made from."""


def make_app(folder: Path, store: Store) -> FastAPI:
    """The server of one dataset folder."""
    app = FastAPI(title="pacorl annotate", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.desk = Desk(folder, store)
    app.middleware("http")(_guard)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(RequestValidationError, _malformed)
    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/", lambda: FileResponse(PAGE / "index.html")),
        ("GET", "/admin", lambda: FileResponse(PAGE / "admin.html")),
        ("GET", "/page/{name}", page_file),
        ("GET", "/health", lambda: {"status": "ok"}),
        ("GET", "/join/{token}", join),
        ("GET", "/images/{key}/{slot}", image),
        ("GET", "/api/task", task),
        ("POST", "/api/rankings", rank),
        ("POST", "/api/skips", skip),
        ("POST", "/api/undo", undo),
        ("GET", "/api/admin", admin),
        ("POST", "/api/admin/people", add_person),
        ("GET", "/api/admin/rankings.jsonl", rankings),
    ]
    for method, path, endpoint in routes:
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    return app


async def _guard(request: Request, proceed: Callable[[Request], Any]) -> Response:
    """Limits bodies and sets the headers of every answer."""
    length = request.headers.get("content-length", "0")
    if request.method == "POST" and (
        not length.isdigit() or int(length) > MAX_BODY or "transfer-encoding" in request.headers
    ):
        return JSONResponse({"error": f"a request body needs a length of at most {MAX_BODY} bytes"}, status_code=413)
    response: Response = await proceed(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers.setdefault("Cache-Control", "no-store")
    return response


def _refused(request: Request, error: Exception) -> JSONResponse:
    status = error.status if isinstance(error, RefusedError) else 500
    return JSONResponse({"error": str(error)}, status_code=status)


def _malformed(request: Request, error: Exception) -> JSONResponse:
    faults = error.errors() if isinstance(error, RequestValidationError) else []
    told = "; ".join(f"{'.'.join(map(str, fault['loc'][1:]))}: {fault['msg']}" for fault in faults)
    return JSONResponse({"error": told or "malformed request"}, status_code=422)


# --- who is asking ---------------------------------------------------------------------------------------------


def _desk(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def _person(request: Request) -> Person:
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    token = bearer if scheme.lower() == "bearer" else request.cookies.get(COOKIE, "")
    if not token:
        raise RefusedError("open the page by the link that you were sent", status=401)
    return _desk(request).store.who(token)


def _administrator(request: Request) -> Person:
    person = _person(request)
    if not person.is_admin:
        raise RefusedError(f"{person.name} is no administrator", status=403)
    return person


AtDesk = Annotated[Desk, Depends(_desk)]
Someone = Annotated[Person, Depends(_person)]
Administrator = Annotated[Person, Depends(_administrator)]


def join(token: str, desk: AtDesk) -> Response:
    """Trades the link's token for a cookie, so that it leaves the address bar."""
    try:
        person = desk.store.who(token)
    except RefusedError as error:
        return PlainTextResponse(f"{error}.\n", status_code=error.status)
    response = RedirectResponse("/admin" if person.is_admin else "/", status_code=303)
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict", expires=_http_date(person.expires))
    return response


def _http_date(at: float) -> str:
    return formatdate(at, usegmt=True)


# --- pages and pictures ----------------------------------------------------------------------------------------


def page_file(name: str) -> Response:
    if name not in PAGE_FILES:
        raise RefusedError("there is no such file", status=404)
    return FileResponse(PAGE / name, media_type=PAGE_FILES[name])


def image(key: str, slot: str, desk: AtDesk, person: Someone) -> Response:
    """A picture of an instance that this person may see, from inside the dataset folder."""
    one = desk.store.instance_for(person, key)
    path = picture_path(desk.folder, _picture_name(one, slot, person.name))
    headers = {"Cache-Control": "private, max-age=3600"}
    return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()], headers=headers)


def _picture_name(one: Instance, slot: str, person: str) -> str:
    if slot == "reference":
        return one.reference
    if not (slot.isascii() and slot.isdigit() and int(slot) < len(one.candidates)):
        raise RefusedError(f"there is no candidate {slot[:20]!r}", status=404)
    return one.candidates[shown_order(person, one)[int(slot)]]


def picture_path(folder: Path, name: str) -> Path:
    """Where a picture lies. Raises RefusedError where that is outside of the folder, no picture's name, or gone."""
    try:
        path = inside(folder, name)
    except ValueError:
        raise RefusedError("this picture is not in the dataset's folder", status=403) from None
    if path.suffix.lower() not in IMAGE_TYPES:
        raise RefusedError(f"{Path(name).name} is not a picture", status=403)
    if not path.is_file():
        raise RefusedError(f"{Path(name).name} is missing on the disk", status=410)
    return path


# --- ranking ---------------------------------------------------------------------------------------------------


def task(desk: AtDesk, person: Someone) -> dict[str, Any]:
    """What this person does next."""
    tasks = desk.store.next_tasks(person.name, limit=2)
    return {
        "person": person.name,
        "progress": desk.store.progress(person.name),
        "task": _shown(tasks[0]) if tasks else None,
        "ahead": _addresses(tasks[1]) if len(tasks) > 1 else [],
    }


def _shown(one: Task) -> dict[str, Any]:
    reference, *candidates = _addresses(one)
    return {
        "instance": public_key(one.instance.id),
        "theme": one.instance.theme,
        "category": one.instance.category,
        "criteria": one.instance.criteria or {},
        "reference": reference,
        "candidates": candidates,
        "previous": one.previous,
    }


def _addresses(one: Task) -> list[str]:
    key = public_key(one.instance.id)
    return [f"/images/{key}/reference", *(f"/images/{key}/{slot}" for slot in range(len(one.slots)))]


def rank(form: RankingForm, desk: AtDesk, person: Someone) -> dict[str, Any]:
    desk.store.rank(person, form.instance, form.order, request=form.request, seconds=form.seconds)
    return task(desk, person)


def skip(form: SkipForm, desk: AtDesk, person: Someone) -> dict[str, Any]:
    desk.store.skip(person, form.instance, form.reason, request=form.request)
    return task(desk, person)


def undo(form: Submission, desk: AtDesk, person: Someone) -> dict[str, Any]:
    desk.store.undo(person, request=form.request)
    return task(desk, person)


# --- administration --------------------------------------------------------------------------------------------


def admin(desk: AtDesk, person: Administrator) -> dict[str, Any]:
    """Progress, control questions, agreement and skips; computed once per change."""
    version = desk.store.version()
    if desk.summary is None or desk.summary[0] != version:
        desk.summary = (version, _summary(desk.store))
    return {**desk.summary[1], "people": _people(desk.store)}


def _summary(store: Store) -> dict[str, Any]:
    skips = store.skips()
    return {"agreement": agreement(store.answers()), "skips": skips[-100:], "skipped": len(skips)}


def _people(store: Store) -> list[dict[str, Any]]:
    controls = store.controls_passed()
    return [
        {
            "name": name,
            **store.progress(name),
            "controls_passed": controls.get(name, (0, 0))[0],
            "controls_answered": controls.get(name, (0, 0))[1],
            "median_seconds": store.median_seconds(name),
        }
        for name in store.people()
    ]


def add_person(form: PersonForm, desk: AtDesk, person: Administrator) -> dict[str, str]:
    """A fresh link for someone who is known (whose old one then ends)."""
    if form.name not in desk.store.people():
        raise RefusedError(f"{form.name[:60]!r} has no share of the work; start the server with this name", status=404)
    return {"name": form.name, "link": f"/join/{desk.store.add_person(form.name, days=form.days)}"}


def rankings(desk: AtDesk, person: Administrator) -> Response:
    """Every ranking as it stands, control questions aside, in the form of rankings.jsonl."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in desk.store.answers()]
    headers = {"Content-Disposition": 'attachment; filename="rankings.jsonl"'}
    return Response("".join(line + "\n" for line in lines), media_type="application/jsonl", headers=headers)


def missing_pictures(folder: Path, instances: Sequence[Instance]) -> list[str]:
    """The pictures that the instances name and that are not to be had, for the check before a server starts."""
    names = {name for one in instances for name in (one.reference, *one.candidates)}
    absent = []
    for name in sorted(names):
        try:
            picture_path(folder, name)
        except RefusedError:
            absent.append(name)
    return absent
