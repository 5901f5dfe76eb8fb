"""The step `pacorl dataset annotate FOLDER --annotators ann,ben`: shares the work out and serves the page.

    GET  /join/TOKEN          opens the page as the owner of the token
    GET  /api/task            the next instance, its successor's images, and one's progress
    POST /api/rankings        {instance, order, request, seconds}   answers with the next task
    POST /api/skips           {instance, reason, request}
    POST /api/undo            {request}
    GET  /images/KEY/SLOT     a candidate's image, or the reference's (SLOT = reference)
    GET  /api/admin, /api/admin/rankings.jsonl, /api/admin/audit.jsonl
                              for the administrator's token, as are these two:
    POST /api/admin/people    {name, days, adjudicates} adds somebody; answers with a link
    POST /api/admin/links     {name, days}              a new link for somebody; the old one ends

An adjudicator has the same page and API. Their tasks are what people disagree on, and their rankings decisions.

Images are named by instance and slot, never by path. Tokens come as a cookie or as `Authorization: Bearer`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from pacorl.dataset.folder import ADJUDICATOR, ADMINISTRATOR, DATABASE, Instance, read_instances
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import blamed_on
from pacorl.io.files import inside
from pacorl.io.images import IMAGE_TYPES
from pacorl.studio.annotate.links import Sharing, agreement, foreign_controls, share_out
from pacorl.studio.annotate.store import Person, Store, Task, only_server, public_key, shown_order
from pacorl.studio.annotate.uncertainty import LiveScores
from pacorl.web.connections import run
from pacorl.web.forms import Form, Text
from pacorl.web.guard import OTHERS, BodyLimit, RefusedError
from pacorl.web.site import Route, Session, Site, listening

PAGE = Path(__file__).parent / "page"
# A ranking of 64 slots takes under a kilobyte, and nobody uploads images here.
LIMITS = {OTHERS: BodyLimit(64 * 2**10)}
ADMIN = "admin"


def serve(
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    days: float = 30,
    renew: Sequence[str] = (),
    adjudicators: Sequence[str] = (),
    announce: Callable[[str], None] = print,
) -> None:
    """Serves the page until SIGINT or SIGTERM; the links (see `prepare`) are announced when it can be reached.

    Raises:
        ValueError: if another server has the database, or the folder has nothing to rank.
        OSError: if the port is taken.
    """
    database = folder / DATABASE
    if not database.is_file():  # a fault must not leave one behind
        check_start(folder, people, adjudicators, sharing=sharing or Sharing(), present={})
    # Bound first: links are told once, and a port that is taken would lose them.
    with (
        only_server(database, url=f"http://{host}:{port}"),
        Store(database) as store,
        listening(host, port) as (listener, url),
    ):
        links = prepare(store, folder, people, sharing=sharing, days=days, renew=renew, adjudicators=adjudicators)
        for name, link in links.items():
            announce(f"{name}\t{url}{link}")
        announce(f"serving {folder} at {url}")
        run(make_app(folder, store), sockets=[listener])


def prepare(
    store: Store,
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | None = None,
    days: float = 30,
    renew: Sequence[str] = (),
    adjudicators: Sequence[str] = (),
) -> dict[str, str]:
    """Adds new people, adjudicators and an administrator, renews links, and shares the work out.

    Args:
        sharing: None for what the database remembers (the defaults, for a new one).
        days: how long a new link is good for.
        renew: names that get a new link.

    Returns:
        Name → path of a join link, for the links made now: only their hashes are stored.
    """
    sharing = sharing or store.sharing()
    present = {name: role for role in (0, ADMINISTRATOR, ADJUDICATOR) for name in store.people(role=role)}
    # Links come after every check: a start that fails must not hand out some, or end old ones.
    instances = check_start(folder, people, adjudicators, sharing=sharing, present=present)
    roles = {**dict.fromkeys(people, 0), **dict.fromkeys(adjudicators, ADJUDICATOR), ADMIN: ADMINISTRATOR}
    links = {
        name: f"/join/{store.add_person(name, role=roles.get(name, 0), days=days)}"
        for name in dict.fromkeys([ADMIN, *roles, *renew])
        if name not in present or name in renew
    }
    share_work(store, folder, instances, sharing)
    return links


def check_start(
    folder: Path, people: Sequence[str], adjudicators: Sequence[str], *, sharing: Sharing, present: Mapping[str, int]
) -> list[Instance]:
    """Check a folder and the names of a start, before anything is written.

    Args:
        present: name → role of those whom the database has.

    Returns:
        What is to be ranked.

    Raises:
        ValueError: the folder has nothing to rank or lacks images, or the names do not fit.
    """
    instances = instances_to_rank(folder, [*people, *adjudicators], sharing)
    if not people and 0 not in present.values():
        raise ValueError("nobody is there to rank; name people, e.g. --annotators ann,ben")
    for names, other, role in ((people, adjudicators, 0), (adjudicators, people, ADJUDICATOR)):
        for name in names:
            if name in other or present.get(name, role) != role:
                raise ValueError(f"{name!r} cannot rank and adjudicate; give the adjudicator another name")
    return instances


def share_work(store: Store, folder: Path, instances: Sequence[Instance], sharing: Sharing) -> None:
    """Shares the instances out among the people that the store has, and writes the step's manifest."""
    store.share(instances, sharing)
    # What is ranked, and how it is shared. The rankings are the database's, which grows.
    inputs = [path for path in (folder / "instances.jsonl", folder / "controls.jsonl") if path.is_file()]
    options = {**asdict(sharing), "people": store.people()}
    step = DatasetStep(folder, "annotate", inputs=inputs, options=options, seed=sharing.seed)
    step.finish(outputs=[], counts={name: store.progress(name)["total"] for name in store.people()})


def plan(folder: Path, people: Sequence[str], *, sharing: Sharing | None = None) -> dict[str, int]:
    """How many questions each person would have, answered ones included: what `--dry-run` prints.

    People and sharing that the database remembers count as in `prepare`; nothing is written.
    """
    database, present, answered = folder / DATABASE, list[str](), dict[str, set[str]]()
    if database.is_file():
        with Store(database, read_only=True) as store:
            sharing = sharing or store.sharing()
            present, answered = store.people(), store.answered()
    sharing = sharing or Sharing()
    instances = instances_to_rank(folder, people, sharing)
    shares = share_out(instances, sorted({*present, *people}), sharing, answered=answered)
    return {name: len(assigned) for name, assigned in shares.items()}


def instances_to_rank(folder: Path, people: Sequence[str], sharing: Sharing) -> list[Instance]:
    """The folder's instances and control questions: its controls.jsonl, or some that are made from the data."""
    if ADMIN in people:
        raise ValueError(f"{ADMIN!r} is the administrator, who has a link anyway; give the annotator another name")
    instances, path = read_instances(folder / "instances.jsonl"), folder / "controls.jsonl"
    with blamed_on(folder / "instances.jsonl"):
        made = [] if path.is_file() else foreign_controls(instances, sharing.controls, seed=sharing.seed)
    controls = read_instances(path) if path.is_file() else made
    ids = {instance.id for instance in instances}
    for control in controls:
        if control.id in ids:
            raise ValueError(f"{path}: id {control.id!r} is already taken by an instance; ids must be unique")
        if not control.is_control:
            raise ValueError(f"{path}: {control.id!r} says no known order; give one under `must`, e.g. [[0, 1]]")
    instances += controls
    missing = []
    for name in sorted({name for instance in instances for name in (instance.reference, *instance.candidates)}):
        try:
            image_path(folder, name)
        except RefusedError:
            missing.append(name)
    if missing:
        raise ValueError(f"{len(missing)} images are missing, {missing[0]} first; run `pacorl dataset pair` again")
    return instances


class Submission(Form):
    """What every change carries: an id of the client's own, the same if it is sent again."""

    request: Text


class RankingForm(Submission):
    instance: Text
    order: Annotated[list[int], Field(max_length=64)]
    """Slots as they were shown, best first."""
    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


class SkipForm(Submission):
    instance: Text
    reason: Text


class PersonForm(Form):
    name: Text
    days: Annotated[float, Field(gt=0, le=3650)] = 30
    adjudicates: bool = False
    """Whether somebody new decides what the others disagree on, and ranks nothing else."""


@dataclass(slots=True)
class AppState:
    """What the endpoints share."""

    folder: Path
    store: Store
    site: Site
    scores: LiveScores
    summary: tuple[int, dict[str, Any]] | None = None
    """The last summary, and the store's version that it was made from."""


def make_app(folder: Path, store: Store) -> FastAPI:
    """The server of one dataset folder."""

    def sign_in(token: str) -> Session:
        person = store.person_of(token)
        return Session("/admin" if person.is_admin else "/", person.expires, person.name)

    site = Site("pacorl annotate", PAGE, "pacorl_annotator", sign_in, LIMITS)
    routes: list[Route] = [
        ("GET", "/images/{key}/{slot}", image),
        ("GET", "/api/task", task),
        ("POST", "/api/rankings", rank),
        ("POST", "/api/skips", skip),
        ("POST", "/api/undo", undo),
        ("GET", "/api/admin", admin),
        ("POST", "/api/admin/people", add_person),
        ("POST", "/api/admin/links", renew_link),
        ("GET", "/api/admin/rankings.jsonl", rankings),
        ("GET", "/api/admin/audit.jsonl", audit),
    ]
    return site.app(routes, state=AppState(folder, store, site, LiveScores(store)))


async def _state(request: Request) -> AppState:  # waits for nothing: otherwise a thread would do it
    state: AppState = request.app.state.shared
    return state


def _person(request: Request) -> Person:
    state: AppState = request.app.state.shared
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


def image(key: str, slot: str, state: State, person: Someone) -> Response:
    """An image of an instance that this person may see, from inside the dataset folder."""
    instance = state.store.instance_for(person, key)
    name = instance.reference
    if slot != "reference":
        if slot not in map(str, range(len(instance.candidates))):
            raise RefusedError(f"there is no candidate {slot[:20]!r}", status=404)
        name = instance.candidates[shown_order(person.name, instance)[int(slot)]]
    path = image_path(state.folder, name)
    # The images of an instance never change (the store refuses others), and an undo shows them again.
    headers = {"Cache-Control": "private, max-age=3600"}
    return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()], headers=headers)


def image_path(folder: Path, name: str) -> Path:
    """The file of an image. Raises RefusedError if it is outside of the folder, of another type, or gone."""
    try:
        path = inside(folder, name)
    except ValueError:
        raise RefusedError("this image is not in the dataset's folder", status=403) from None
    if path.suffix.lower() not in IMAGE_TYPES:
        raise RefusedError(f"{Path(name).name} is not an image", status=403)
    if not path.is_file():
        raise RefusedError(f"{Path(name).name} is missing on the disk", status=410)
    return path


def task(state: State, person: Someone) -> dict[str, Any]:
    """What this person does next."""
    progress = state.store.progress(person.name)
    if person.adjudicates or state.store.sharing().order == "uncertain":
        following = state.scores.following(person)
        tasks = [state.store.task(person.name, instance) for instance in following[:2]]
        progress["total"] = progress["ranked"] + progress["skipped"] + len(following)
    else:
        tasks = state.store.next_tasks(person.name, limit=2)
    form = _form(tasks[0]) if tasks else None
    if form and person.adjudicates:
        form["opinions"] = state.scores.opinions(tasks[0])
    # The page loads the images of the next but one while people look, so that nobody waits.
    ahead = _addresses(tasks[1]) if len(tasks) > 1 else []
    state_of = {"person": person.name, "adjudicates": person.adjudicates, "progress": progress}
    return {**state_of, "task": form, "ahead": ahead}


def _form(shown: Task) -> dict[str, Any]:
    instance = shown.instance
    reference, *candidates = _addresses(shown)
    return {
        "instance": public_key(instance.id),
        "theme": instance.theme,
        "category": instance.category,
        "criteria": instance.criteria or {},
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


def admin(state: State, person: Administrator) -> dict[str, Any]:
    """Progress, control questions, agreement and skips."""
    # The admin page asks every three seconds, and agreement reads every answer: it is computed once per change.
    store, version = state.store, state.store.version()
    if state.summary is None or state.summary[0] != version:
        skips = store.skips()
        summary = {"agreement": agreement(store.answers()), "skips": skips[-100:], "skipped": len(skips)}
        state.summary = (version, summary)
    controls = store.controls_passed()
    people = []
    for name in store.people():
        passed, answered = controls.get(name, (0, 0))
        scores = {"controls_passed": passed, "controls_answered": answered}
        people.append({"name": name, **store.progress(name), **scores, "median_seconds": store.median_seconds(name)})
    adjudicators = [{"name": name, **store.progress(name)} for name in store.people(role=ADJUDICATOR)]
    return {**state.summary[1], "people": people, "adjudicators": adjudicators}


def add_person(form: PersonForm, state: State, person: Administrator) -> dict[str, str]:
    """A link for somebody new, who takes over what nobody has answered, or adjudicates."""
    name = form.name.strip()
    if name in (ADMIN, *state.store.people(), *state.store.people(role=ADJUDICATOR)):
        raise RefusedError(f"{name!r} is there already; give another name, or make them a new link", status=409)
    token = state.store.add_person(name, role=ADJUDICATOR if form.adjudicates else 0, days=form.days)
    if not form.adjudicates:
        share_work(state.store, state.folder, state.store.instances(), state.store.sharing())
    return {"name": name, "link": f"/join/{token}"}


def renew_link(form: PersonForm, state: State, person: Administrator) -> dict[str, str]:
    """A fresh link for someone who has a share of the work; the old one ends."""
    if form.name not in (*state.store.people(), *state.store.people(role=ADJUDICATOR)):
        raise RefusedError(f"{form.name[:60]!r} has no share of the work; add them first", status=404)
    return {"name": form.name, "link": f"/join/{state.store.add_person(form.name, days=form.days)}"}


def rankings(state: State, person: Administrator) -> Response:
    """Every ranking as it stands, control questions aside, in the form of rankings.jsonl."""
    return _jsonl(map(asdict, state.store.answers()), name="rankings.jsonl")


def audit(state: State, person: Administrator) -> Response:
    """Everything that anybody did: rankings, skips, decisions, and what was undone."""
    return _jsonl(state.store.audit(), name="audit.jsonl")


def _jsonl(rows: Iterable[dict[str, Any]], *, name: str) -> Response:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response("".join(lines), media_type="application/jsonl", headers=headers)
