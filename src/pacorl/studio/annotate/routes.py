"""The step `pacorl dataset annotate FOLDER --annotators ann,ben`: division of the work, and the server of its page.

Adjudicators and annotators have one page and one API. An adjudicator's tasks are the instances on which
people disagree, and the rankings are decisions. Images are named by instance and slot, never by path. Tokens come as a
cookie or as `Authorization: Bearer`; the addresses below /api/admin require the administrator's.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import Field

from pacorl.core.grid import subject_text
from pacorl.dataset.folder import (
    ADJUDICATOR,
    ADMINISTRATOR,
    DATABASE,
    OWN_QUESTION,
    Instance,
    read_instances,
)
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import pair_agreement
from pacorl.io.documents import blamed_on
from pacorl.io.files import inside
from pacorl.io.images import IMAGE_TYPES
from pacorl.studio.annotate.links import Sharing, agreement, describe_change, foreign_controls, share_out
from pacorl.studio.annotate.store import Person, Store, Task, only_server, public_key, shown_order
from pacorl.studio.annotate.uncertainty import LiveScores
from pacorl.web.forms import Form, JsonRoute, Text
from pacorl.web.guard import RefusedError, check_public_url
from pacorl.web.site import Session, Site, listening, run

PAGE = Path(__file__).parent / "page"
ADMIN = "admin"


def serve(
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | Mapping[str, Any] | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    days: float = 30,
    renew: Sequence[str] = (),
    adjudicators: Sequence[str] = (),
    public_url: str = "",
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until SIGINT or SIGTERM, and announce the links (see `prepare`) when it can be reached.

    `public_url` is the address that people use, if a proxy is in front.

    Raises:
        ValueError: if another server has the database, or the folder has no instances.
        OSError: if the port is taken.
    """
    # Checks before the port and the database are opened.
    if public_url:
        check_public_url(public_url)
    database = folder / DATABASE
    if not database.is_file():  # a failed start must not leave a database
        check_start(folder, people, adjudicators, sharing=Sharing().with_options(sharing), present={})

    # Bound first: links are shown once, and a port in use would lose them.
    with (
        only_server(database, url=f"http://{host}:{port}"),
        Store(database) as store,
        listening(host, port) as (listener, url),
    ):
        names = {"renew": renew, "adjudicators": adjudicators}
        links = prepare(store, folder, people, sharing=sharing, days=days, **names, announce=announce)
        for name, link in links.items():
            announce(f"{name}\t{public_url.rstrip('/') or url}{link}")
        if not links:
            announce("links are unchanged; --renew NAME makes a new one")
        announce(f"question: {store.question()}")
        announce(f"serving {folder} at {url}")
        run(make_app(folder, store), sockets=[listener])


def prepare(
    store: Store,
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | Mapping[str, Any] | None = None,
    days: float = 30,
    renew: Sequence[str] = (),
    adjudicators: Sequence[str] = (),
    announce: Callable[[str], None] = print,
) -> dict[str, str]:
    """Add new people, adjudicators and an administrator, renew links, and divide the work.

    Args:
        sharing: options by name, or all of them; the others stay as the database has them, or are the defaults.
        announce: is told of a changed division.
        days: how long a new link is good for.
        renew: names that get a new link.

    Returns:
        Name → path of a join link, for the links made now: only their hashes are stored.
    """
    # The people of earlier starts.
    chosen = store.sharing().with_options(sharing)
    present: dict[str, int] = {}
    for role in (0, ADMINISTRATOR, ADJUDICATOR):
        present |= dict.fromkeys(store.people(role=role), role)

    # Links come after every check: a failed start must not make or end links.
    instances = check_start(folder, people, adjudicators, sharing=chosen, present=present)
    roles = {**dict.fromkeys(people, 0), **dict.fromkeys(adjudicators, ADJUDICATOR), ADMIN: ADMINISTRATOR}
    links = {}
    for name in dict.fromkeys([ADMIN, *roles, *renew]):
        if name not in present or name in renew:
            links[name] = f"/join#{store.add_person(name, role=roles.get(name, 0), days=days)}"
    # Divide last: new people get a share too.
    if change := share_work(store, folder, instances, chosen):
        announce(f"division changed: {change}")
    return links


def check_start(
    folder: Path, people: Sequence[str], adjudicators: Sequence[str], *, sharing: Sharing, present: Mapping[str, int]
) -> list[Instance]:
    """Check a folder and the names of a start, before anything is written.

    Args:
        present: name → role of the people in the database.

    Returns:
        The instances to be ranked, controls included.

    Raises:
        ValueError: the folder has no instances or lacks images, or the names do not fit.
    """
    instances = instances_to_rank(folder, [*people, *adjudicators], sharing)
    if not people and 0 not in present.values():
        raise ValueError("there are no annotators; name people, e.g. --annotators ann,ben")
    for names, other, role in ((people, adjudicators, 0), (adjudicators, people, ADJUDICATOR)):
        for name in names:
            if name in other or present.get(name, role) != role:
                raise ValueError(f"{name!r} cannot rank and adjudicate; give the adjudicator another name")
    return instances


def share_work(store: Store, folder: Path, instances: Sequence[Instance], sharing: Sharing) -> str:
    """Divide the instances among the store's people, write the step's manifest, and describe what changed."""
    change = store.share(instances, sharing)

    # The manifest has the instances and how they are divided. The rankings are in the database, which grows.
    inputs = []
    for path in (folder / "instances.jsonl", folder / "controls.jsonl"):
        if path.is_file():
            inputs.append(path)

    options = {**asdict(sharing), "people": store.people()}
    step = DatasetStep(folder, "annotate", inputs=inputs, options=options, seed=sharing.seed)
    step.finish(outputs=[], counts={name: store.progress(name)["total"] for name in store.people()})
    return change


def plan(
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | Mapping[str, Any] | None = None,
    announce: Callable[[str], None] = print,
) -> dict[str, int]:
    """Count the questions of each person, answered questions included, for `--dry-run`, and announce a change.

    The database's people and sharing count as in `prepare`. The database is not written.
    """
    database = folder / DATABASE
    if database.is_file():
        with Store(database, read_only=True) as store:
            chosen = store.sharing().with_options(sharing)
            shares = store.divide(instances_to_rank(folder, people, chosen), chosen, newcomers=people)
            if change := describe_change(store.assigned(), shares):
                announce(f"division would change: {change}")
    else:
        chosen = Sharing().with_options(sharing)
        shares = share_out(instances_to_rank(folder, people, chosen), sorted({*people}), chosen)
    return {name: len(assigned) for name, assigned in shares.items()}


def instances_to_rank(folder: Path, people: Sequence[str], sharing: Sharing) -> list[Instance]:
    """Read the folder's instances and its controls.jsonl, or make control questions from the instances."""
    if ADMIN in people:
        raise ValueError(f"{ADMIN!r} is the administrator, who has a link anyway; give the annotator another name")

    # Control questions: the user's, or made from pairs of instances.
    instances = read_instances(folder / "instances.jsonl")
    path = folder / "controls.jsonl"
    if path.is_file():
        controls = read_instances(path)
    else:
        with blamed_on(folder / "instances.jsonl"):
            controls = foreign_controls(instances, sharing.controls, seed=sharing.seed)
    ids = {instance.id for instance in instances}
    for control in controls:
        if control.id in ids:
            raise ValueError(f"{path}: id {control.id!r} is already taken by an instance; ids must be unique")
        if not control.is_control:
            raise ValueError(f"{path}: {control.id!r} has no known order; give one under `must`, e.g. [[0, 1]]")
    # Controls are ranked among the instances, without a mark.
    instances += controls

    # Images: every file must be there before the first person ranks.
    names: set[str] = set()
    for instance in instances:
        names.update([instance.reference, *instance.candidates])
    missing = []
    for name in sorted(names):
        try:
            image_path(folder, name)
        except RefusedError:
            missing.append(name)
    if missing:
        raise ValueError(f"{len(missing)} images are missing, {missing[0]} first; run `pacorl dataset pair` again")
    return instances


@dataclass(slots=True)
class AppState:
    """Objects that the endpoints share."""

    folder: Path
    store: Store
    site: Site
    scores: LiveScores
    summary: tuple[int, dict[str, Any]] | None = None
    """The last summary, and the version of the store that it was made from."""


router = APIRouter(route_class=JsonRoute)


def make_app(folder: Path, store: Store) -> FastAPI:
    """Build the application of one dataset folder."""

    def sign_in(token: str) -> Session:
        person = store.person_of(token)
        return Session("/admin" if person.is_admin else "/", person.expires)

    site = Site("pacorl annotate", PAGE, "pacorl_annotator", sign_in)
    return site.app(router, state=AppState(folder, store, site, LiveScores(store)))


async def _state(request: Request) -> AppState:  # async, or FastAPI would call it on a thread
    state: AppState = request.app.state.shared
    return state


def _person(request: Request) -> Person:
    state: AppState = request.app.state.shared
    token = state.site.token(request)
    if not token:
        raise RefusedError("open the page by the link that you were sent", status=401)
    person = state.store.person_of(token)
    if person.name in state.store.paused():
        fault = "the administrator has paused your work; nothing is lost, and your link works again after the pause"
        raise RefusedError(fault, status=423)
    return person


def _administrator(request: Request) -> Person:
    person = _person(request)
    if not person.is_admin:
        raise RefusedError(f"{person.name} is no administrator", status=403)
    return person


State = Annotated[AppState, Depends(_state)]
Someone = Annotated[Person, Depends(_person)]
Administrator = Annotated[Person, Depends(_administrator)]


@router.get("/images/{key}/{slot}")
def image(key: str, slot: str, state: State, person: Someone) -> Response:
    """Return a candidate's image, or the reference's, of an instance assigned to this person."""
    instance = state.store.instance_for(person, key)
    name = instance.reference
    if slot != "reference":
        order = {}
        for number, index in enumerate(shown_order(person.name, instance)):
            order[str(number)] = index

        if slot not in order:
            raise RefusedError(f"there is no candidate {slot[:20]!r}", status=404)
        name = instance.candidates[order[slot]]
    path = image_path(state.folder, name)
    # The images of an instance never change (the store refuses changed instances), and an undo shows them again.
    headers = {"Cache-Control": "private, max-age=3600"}
    return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()], headers=headers)


def image_path(folder: Path, name: str) -> Path:
    """Return the file of an image. Raises RefusedError if it is outside of the folder, of another type, or gone."""
    try:
        path = inside(folder, name)
    except ValueError:
        raise RefusedError("this image is not in the dataset's folder", status=403) from None
    if path.suffix.lower() not in IMAGE_TYPES:
        raise RefusedError(f"{Path(name).name} is not an image", status=403)
    if not path.is_file():
        raise RefusedError(f"{Path(name).name} is missing on the disk", status=410)
    return path


@router.get("/api/task")
def task(state: State, person: Someone) -> dict[str, Any]:
    """Describe this person's next task, and list the images of the task after it."""
    progress = state.store.progress(person.name)
    sharing = state.store.sharing()
    if person.adjudicates or sharing.order == "uncertain":
        following = state.scores.following(person)
        tasks = []
        for instance in following[:2]:
            tasks.append(state.store.task(person.name, instance))
        progress["total"] = progress["ranked"] + progress["skipped"] + len(following)
    else:
        tasks = state.store.next_tasks(person.name, limit=2)
    form = _form(tasks[0]) if tasks else None
    if form and person.adjudicates:
        form["opinions"] = state.scores.opinions(tasks[0])
    return {
        "person": person.name,
        "adjudicates": person.adjudicates,
        "administers": person.is_admin,
        "question": sharing.question or (OWN_QUESTION if tasks else ""),
        "custom": bool(sharing.question),
        "progress": progress,
        "task": form,
        # The page loads these images while people look, so that the task after this one appears at once.
        "ahead": _addresses(tasks[1]) if len(tasks) > 1 else [],
    }


def _form(shown: Task) -> dict[str, Any]:
    instance = shown.instance
    addresses = _addresses(shown)
    candidates = addresses[-len(shown.slots) :]
    return {
        "instance": public_key(instance.id),
        # Stored whole: the judge is trained on the words that the reward asks with.
        "theme": subject_text(instance.theme),
        "category": instance.category,
        "criteria": instance.criteria or {},
        "reference": addresses[0],
        "candidates": candidates,
        "previous": shown.previous,
    }


def _addresses(shown: Task) -> list[str]:
    key = public_key(shown.instance.id)
    return [f"/images/{key}/{slot}" for slot in ("reference", *range(len(shown.slots)))]


class Submission(Form):
    """Field of every change: an id of the client's own, the same if the change is sent again."""

    request: Text


class RankingForm(Submission):
    instance: Text
    order: Annotated[list[int | Annotated[list[int], Field(max_length=64)]], Field(max_length=64)]
    """Slots on the page, best first; a list within it is a tie."""
    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


@router.post("/api/rankings")
def rank(form: RankingForm, state: State, person: Someone) -> dict[str, Any]:
    """Keep a ranking, and return the next task."""
    state.store.rank(person, form.instance, form.order, request=form.request, seconds=form.seconds)
    return task(state, person)


class SkipForm(Submission):
    instance: Text
    reason: Text


@router.post("/api/skips")
def skip(form: SkipForm, state: State, person: Someone) -> dict[str, Any]:
    """Keep a skip, and return the next task."""
    state.store.skip(person, form.instance, form.reason, request=form.request)
    return task(state, person)


@router.post("/api/undo")
def undo(form: Submission, state: State, person: Someone) -> dict[str, Any]:
    """Undo this person's last ranking or skip, and return its task."""
    state.store.undo(person, request=form.request)
    return task(state, person)


@router.get("/api/admin")
def admin(state: State, person: Administrator) -> dict[str, Any]:
    """Summarise progress, control questions, agreement and skips."""
    store = state.store

    # The admin page asks every three seconds, and agreement reads every answer: it is computed once per change.
    version = store.version()
    if state.summary is None or state.summary[0] != version:
        skips = store.skips()
        answers = store.answers()
        pairs = pair_agreement(answers)
        summary = {"agreement": agreement(answers), "skips": skips[-100:], "skipped": len(skips)}
        summary["pairs"] = pairs.document() if pairs else None
        state.summary = (version, summary)

    controls = store.controls_passed()
    paused = store.paused()
    people = []
    for name in store.people():
        passed, answered = controls.get(name, (0, 0))
        scores = {"controls_passed": passed, "controls_answered": answered, "paused": name in paused}
        people.append({"name": name, **store.progress(name), **scores, "median_seconds": store.median_seconds(name)})
    adjudicators = []
    for name in store.people(role=ADJUDICATOR):
        done = store.progress(name)
        total = done["ranked"] + done["skipped"] + len(state.scores.open_disagreements())
        adjudicators.append({"name": name, **done, "total": total, "paused": name in paused})
    command = f"pacorl dataset export {shlex.quote(str(state.folder))}"
    failed = [(name, reference) for name, reference, passed in store.controls() if not passed]
    shown = {
        "question": store.question(),
        "people": people,
        "adjudicators": adjudicators,
        "failed": failed,
        "command": command,
    }
    return {**state.summary[1], **shown}


class PauseForm(Form):
    name: Text
    paused: bool


@router.post("/api/admin/pauses")
def pause(form: PauseForm, state: State, person: Administrator) -> dict[str, Any]:
    """Pause the work of a person, or let it go on."""
    _check_present(state.store, form.name)
    state.store.pause(form.name, form.paused)
    return {"name": form.name, "paused": form.paused}


def _check_present(store: Store, name: str) -> None:
    if name not in (*store.people(), *store.people(role=ADJUDICATOR)):
        raise RefusedError(f"{name[:60]!r} has no share of the work; add them first", status=404)


class PersonForm(Form):
    name: Text
    days: Annotated[float, Field(gt=0, le=3650)] = 30
    adjudicates: bool = False
    """Whether a new person decides disputed instances only."""


@router.post("/api/admin/people")
def add_person(form: PersonForm, state: State, person: Administrator) -> dict[str, str]:
    """Make a link for a new person, who takes over unanswered instances or adjudicates."""
    name = form.name.strip()
    if name in (ADMIN, *state.store.people(), *state.store.people(role=ADJUDICATOR)):
        raise RefusedError(f"{name!r} is there already; give another name, or make them a new link", status=409)
    token = state.store.add_person(name, role=ADJUDICATOR if form.adjudicates else 0, days=form.days)
    # An adjudicator has no share: disputed instances come from everybody's rankings.
    if not form.adjudicates:
        share_work(state.store, state.folder, state.store.instances(), state.store.sharing())
    return {"name": name, "link": f"/join#{token}"}


@router.post("/api/admin/links")
def renew_link(form: PersonForm, state: State, person: Administrator) -> dict[str, str]:
    """Make a new link for a person who has a share of the work; the old link ends."""
    _check_present(state.store, form.name)
    return {"name": form.name, "link": f"/join#{state.store.add_person(form.name, days=form.days)}"}


@router.get("/api/admin/rankings.jsonl")
def rankings(state: State, person: Administrator) -> Response:
    """Return the current rankings without control questions, in the format of rankings.jsonl."""
    return _jsonl([asdict(answer) for answer in state.store.answers()], name="rankings.jsonl")


@router.get("/api/admin/audit.jsonl")
def audit(state: State, person: Administrator) -> Response:
    """Return all actions: rankings, skips, decisions and undone answers."""
    return _jsonl(state.store.audit(), name="audit.jsonl")


def _jsonl(rows: Iterable[dict[str, Any]], *, name: str) -> Response:
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response("".join(lines), media_type="application/jsonl", headers=headers)
