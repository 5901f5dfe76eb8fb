"""The HTTP API and the page (`pacorl dataset annotate FOLDER --annotators ann,ben`).

    GET  /join/TOKEN          opens the page as the owner of the token
    GET  /api/task            the next instance, its successor's images, and one's progress
    POST /api/rankings        {instance, order, request, seconds}   answers with the next task
    POST /api/skips           {instance, reason, request}
    POST /api/undo            {request}
    GET  /images/KEY/SLOT     a candidate's image, or the reference's (SLOT = reference)
    GET  /api/admin, /api/admin/rankings.jsonl      for the administrator's token

Images are named by instance and slot, never by path. Tokens come as a cookie or as `Authorization: Bearer`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field

from pacorl.annotate.agreement import agreement
from pacorl.annotate.store import Person, Store, Task, public_key, shown_order
from pacorl.dataset.records import Instance
from pacorl.io.files import inside
from pacorl.io.images import IMAGE_TYPES
from pacorl.web.guards import RefusedError
from pacorl.web.site import Route, Session, Site

PAGE = Path(__file__).parent / "page"
MAX_BODY = 64 * 1024


class Submission(BaseModel):
    """What every change carries: an id of the client's own, the same if it is sent again."""

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
class AppState:
    """What the endpoints share."""

    folder: Path
    store: Store
    summary: tuple[int, dict[str, Any]] | None = None
    """The last summary, and the store's version that it was made from."""
    site: Site = field(init=False)

    def __post_init__(self) -> None:
        self.site = Site("pacorl annotate", PAGE, "pacorl_annotator", self._sign_in, MAX_BODY)

    def _sign_in(self, token: str) -> Session:
        person = self.store.person_of(token)
        return Session("/admin" if person.is_admin else "/", person.expires)


def make_app(folder: Path, store: Store) -> FastAPI:
    """The server of one dataset folder."""
    state = AppState(folder, store)
    routes: list[Route] = [
        ("GET", "/images/{key}/{slot}", image),
        ("GET", "/api/task", task),
        ("POST", "/api/rankings", rank),
        ("POST", "/api/skips", skip),
        ("POST", "/api/undo", undo),
        ("GET", "/api/admin", admin),
        ("POST", "/api/admin/people", renew_link),
        ("GET", "/api/admin/rankings.jsonl", rankings),
    ]
    return state.site.app(routes, state=state)


# --- who is asking ---------------------------------------------------------------------------------------------


def _state(request: Request) -> AppState:
    state: AppState = request.app.state.shared
    return state


def _person(request: Request) -> Person:
    state = _state(request)
    token = state.site.token(request)
    if not token:
        raise RefusedError("open the page by the link that you were sent", status=401)
    return state.store.person_of(token)


def _administrator(request: Request) -> Person:
    person = _person(request)
    if not person.is_admin:
        raise RefusedError(f"{person.name} is no administrator", status=403)
    return person


State = Annotated[AppState, Depends(_state)]
Someone = Annotated[Person, Depends(_person)]
Administrator = Annotated[Person, Depends(_administrator)]


# --- images ----------------------------------------------------------------------------------------------------


def image(key: str, slot: str, state: State, person: Someone) -> Response:
    """An image of an instance that this person may see, from inside the dataset folder."""
    instance = state.store.instance_for(person, key)
    path = image_path(state.folder, _image_name(instance, slot, person.name))
    headers = {"Cache-Control": "private, max-age=3600"}
    return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()], headers=headers)


def _image_name(instance: Instance, slot: str, person: str) -> str:
    if slot == "reference":
        return instance.reference
    if not (slot.isascii() and slot.isdigit() and int(slot) < len(instance.candidates)):
        raise RefusedError(f"there is no candidate {slot[:20]!r}", status=404)
    return instance.candidates[shown_order(person, instance)[int(slot)]]


def image_path(folder: Path, name: str) -> Path:
    """The file of an image.

    Raises:
        RefusedError: if it is outside of the folder, of another type, or gone.
    """
    try:
        path = inside(folder, name)
    except ValueError:
        raise RefusedError("this image is not in the dataset's folder", status=403) from None
    if path.suffix.lower() not in IMAGE_TYPES:
        raise RefusedError(f"{Path(name).name} is not an image", status=403)
    if not path.is_file():
        raise RefusedError(f"{Path(name).name} is missing on the disk", status=410)
    return path


def missing_images(folder: Path, instances: Sequence[Instance]) -> list[str]:
    """The images that the instances name and that cannot be served: checked before a server starts."""
    missing = []
    for name in sorted({name for instance in instances for name in (instance.reference, *instance.candidates)}):
        try:
            image_path(folder, name)
        except RefusedError:
            missing.append(name)
    return missing


# --- ranking ---------------------------------------------------------------------------------------------------


def task(state: State, person: Someone) -> dict[str, Any]:
    """What this person does next."""
    tasks = state.store.next_tasks(person.name, limit=2)
    return {
        "person": person.name,
        "progress": state.store.progress(person.name),
        "task": _shown(tasks[0]) if tasks else None,
        "ahead": _addresses(tasks[1]) if len(tasks) > 1 else [],
    }


def _shown(shown: Task) -> dict[str, Any]:
    reference, *candidates = _addresses(shown)
    return {
        "instance": public_key(shown.instance.id),
        "theme": shown.instance.theme,
        "category": shown.instance.category,
        "criteria": shown.instance.criteria or {},
        "reference": reference,
        "candidates": candidates,
        "previous": shown.previous,
    }


def _addresses(shown: Task) -> list[str]:
    key = public_key(shown.instance.id)
    return [f"/images/{key}/reference", *(f"/images/{key}/{slot}" for slot in range(len(shown.slots)))]


def rank(form: RankingForm, state: State, person: Someone) -> dict[str, Any]:
    state.store.rank(person, form.instance, form.order, request=form.request, seconds=form.seconds)
    return task(state, person)


def skip(form: SkipForm, state: State, person: Someone) -> dict[str, Any]:
    state.store.skip(person, form.instance, form.reason, request=form.request)
    return task(state, person)


def undo(form: Submission, state: State, person: Someone) -> dict[str, Any]:
    state.store.undo(person, request=form.request)
    return task(state, person)


# --- administration --------------------------------------------------------------------------------------------


def admin(state: State, person: Administrator) -> dict[str, Any]:
    """Progress, control questions, agreement and skips."""
    # The admin page asks every three seconds, and agreement reads every answer: it is computed once per change.
    version = state.store.version()
    if state.summary is None or state.summary[0] != version:
        state.summary = (version, _summary(state.store))
    return {**state.summary[1], "people": _people(state.store)}


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


def renew_link(form: PersonForm, state: State, person: Administrator) -> dict[str, str]:
    """A fresh link for someone who has a share of the work; the old one ends."""
    if form.name not in state.store.people():
        raise RefusedError(f"{form.name[:60]!r} has no share of the work; start the server with this name", status=404)
    return {"name": form.name, "link": f"/join/{state.store.add_person(form.name, days=form.days)}"}


def rankings(state: State, person: Administrator) -> Response:
    """Every ranking as it stands, control questions aside, in the form of rankings.jsonl."""
    lines = [json.dumps(asdict(answer), ensure_ascii=False) for answer in state.store.answers()]
    headers = {"Content-Disposition": 'attachment; filename="rankings.jsonl"'}
    return Response("".join(line + "\n" for line in lines), media_type="application/jsonl", headers=headers)
