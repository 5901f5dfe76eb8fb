"""The step `pacorl dataset annotate FOLDER --annotators ann,ben`: division of the work, and the server of its page.

All that people do is in `answers.jsonl` (`dataset.answer_log`), on the disk before it is acknowledged. Links are signed
by a secret of the folder, so that nothing about them is stored. Images are named by instance and slot, never by path.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import random
import secrets
import shlex
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from pacorl.core.grid import subject_text
from pacorl.dataset.answer_log import LOG, AnswerLog, Event, Role, start_event
from pacorl.dataset.folder import OWN_QUESTION, Instance, order_of, read_instances, tiers_of
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import mean_ranks, pair_agreement
from pacorl.io.documents import blamed_on, read_text
from pacorl.io.files import PRIVATE, LockedError, inside, safe_name, sole_holder, text_digest, write_atomic
from pacorl.io.images import IMAGE_TYPES
from pacorl.records.rankings import Ranking
from pacorl.web import Door, Guard, RefusedError, check_public_url, listening, run

PAGE = Path(__file__).parent / "page"
PAGES = {
    "/": "index.html",
    "/admin": "admin.html",
    "/page/page.js": "page.js",
    "/page/admin.js": "admin.js",
    "/page/style.css": "style.css",
}
"""Address → file."""
ADMIN = "admin"
CONTROL_EVERY = 20
"""Questions per control question."""
LONGEST_QUESTION = 300
LONGEST_REASON = 500


# --- division of the work ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sharing:
    """Rules for the division of questions, and their wording."""

    overlap: float = 0.1
    """Share of the instances that several people rank."""
    judges: int = 3
    """Number of people for each of these; everyone, if there are fewer."""
    controls: int = 40
    """Control questions made from the data, unless the folder has a controls.jsonl."""
    question: str = ""
    """The wording on the page; empty for the page's own."""

    def __post_init__(self) -> None:
        if len(self.question) > LONGEST_QUESTION:
            raise ValueError(f"the question has {len(self.question)} characters; write at most {LONGEST_QUESTION}")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap {self.overlap} must be a share between 0 and 1")
        if self.judges < 2:
            raise ValueError(f"{self.judges} judges make no overlap; at least 2 do (or set the overlap to 0)")


def roles(annotators: Sequence[str], adjudicators: Sequence[str]) -> dict[str, Role]:
    """Give people their roles. Raises ValueError for a name that has both."""
    people: dict[str, Role] = dict.fromkeys(annotators, "annotator")
    for name in adjudicators:
        if name in people:
            raise ValueError(f"{name!r} cannot rank and adjudicate; give the adjudicator another name")
        people[name] = "adjudicator"
    return people


def share_out(
    instances: Sequence[Instance],
    people: Sequence[str],
    sharing: Sharing,
    *,
    answered: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> dict[str, list[str]]:
    """Assign every instance to people; loads differ by one at most, controls aside. Deterministic.

    Args:
        answered: instance id → people who have answered it; they keep it, and count towards its number of judges.

    Returns:
        person → instance ids in the order in which to show them.
    """
    # Shuffled first: the shared part is then a random sample of all prompts.
    rng = random.Random(0)
    questions = [instance.id for instance in instances if not instance.is_control]
    rng.shuffle(questions)
    shared = round(sharing.overlap * len(questions))
    load: dict[str, list[str]] = {person: [] for person in people}
    for position, question in enumerate(questions):
        needed = min(sharing.judges, len(people)) if position < shared else 1
        holders = answered.get(question, ())
        # Equal loads are sorted by chance: in the order of names, the first would get every remainder.
        newcomers = [(len(load[name]), rng.random(), name) for name in people if name not in holders]
        assignees = [name for name in people if name in holders]
        assignees += [name for *_, name in sorted(newcomers)[: max(0, needed - len(holders))]]
        for person in assignees:
            load[person].append(question)

    # Control questions: each at most once to a person, who would recognise it, at a random place of each stretch.
    controls = [instance.id for instance in instances if instance.is_control]
    for person, assigned in load.items():
        rng.shuffle(assigned)
        done = [name for name, holders in answered.items() if person in holders]
        unanswered = [name for name in assigned if name not in done]
        wanted = math.ceil(len(assigned) / CONTROL_EVERY) - len({*done} & {*controls})
        remaining = [name for name in rng.sample(controls, len(controls)) if name not in done]
        for start in range(0, len(unanswered), CONTROL_EVERY)[: max(0, wanted)]:
            if remaining:
                position = start + start // CONTROL_EVERY + rng.randrange(CONTROL_EVERY)
                unanswered.insert(min(position, len(unanswered)), remaining.pop())
        assigned[:] = [*done, *unanswered]
    return load


def foreign_controls(instances: Sequence[Instance], count: int) -> list[Instance]:
    """Make control questions from the data: one candidate becomes an image of another prompt, and is the worst.

    There are fewer than `count` if prompts share images: a prompt's own image is never a foreign one.

    Raises:
        ValueError: all prompts have the same images.
    """
    images: dict[str, set[str]] = {}
    for instance in instances:
        images.setdefault(instance.group, set()).update([instance.reference, *instance.candidates])
    everything = set(chain(*images.values()))
    rng = random.Random(0)
    controls = []
    for instance in rng.sample(list(instances), min(count, len(instances))):
        foreign = sorted(everything - images[instance.group])
        if not foreign:
            continue
        position = rng.randrange(len(instance.candidates))
        candidates = list(instance.candidates)
        candidates[position] = rng.choice(foreign)
        must = tuple((better, position) for better in range(len(candidates)) if better != position)
        # The id follows from the images, so that a later start finds the same control question in the log.
        name = text_digest("\n".join([instance.reference, *candidates]))[:16]
        controls.append(replace(instance, id=f"control:{name}", candidates=tuple(candidates), must=must))
    if count and not controls:
        raise ValueError("control questions need an image of another prompt; set their number to 0")
    return controls


def questions_of(folder: Path, sharing: Sharing) -> list[Instance]:
    """Read the folder's instances and its controls.jsonl, or make control questions from the instances.

    Raises:
        ValueError: ids repeat, a control has no known order, or images are missing.
    """
    instances = read_instances(folder / "instances.jsonl")
    path = folder / "controls.jsonl"
    if path.is_file():
        controls = read_instances(path)
    else:
        with blamed_on(folder / "instances.jsonl"):
            controls = foreign_controls(instances, sharing.controls)
    ids = {instance.id for instance in instances}
    for control in controls:
        if control.id in ids:
            raise ValueError(f"{path}: id {control.id!r} is already taken by an instance; ids must be unique")
        if not control.is_control:
            raise ValueError(f"{path}: {control.id!r} has no known order; give one under `must`, e.g. [[0, 1]]")
    missing = []
    for name in sorted({*chain(*([one.reference, *one.candidates] for one in [*instances, *controls]))}):
        try:
            image_path(folder, name)
        except RefusedError:
            missing.append(name)
    if missing:
        raise ValueError(f"{len(missing)} images are missing, {missing[0]} first; run `pacorl dataset pair` again")
    return [*instances, *controls]


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


def shown_order(person: str, instance: Instance) -> tuple[int, ...]:
    """Shuffle the candidates in a stable per-annotator order."""
    order = list(range(len(instance.candidates)))
    random.Random(f"{person}\n{instance.id}").shuffle(order)
    return tuple(order)


def public_key(instance: str) -> str:
    """Hash an id for browsers: the id itself would reveal control questions."""
    return text_digest(instance)[:20]


def disagree(answers: Sequence[Ranking]) -> bool:
    """Whether two people order a pair of candidates in opposite ways."""
    ranks = [mean_ranks(answer.tiers) for answer in answers]
    for one, other in combinations(ranks, 2):
        for first, second in combinations(one, 2):
            if (one[first] - one[second]) * (other[first] - other[second]) < 0:
                return True
    return False


# --- the work of people ------------------------------------------------------------------------------------------


class Annotation:
    """The annotation of one folder: who may do what, and every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = AnswerLog(folder, writes=True)
        self._lock = threading.RLock()
        key = folder / "annotate.key"
        if not key.is_file():
            write_atomic(key, secrets.token_urlsafe(32), mode=PRIVATE)
        self._secret = read_text(key).strip().encode()

    def start(self, people: Mapping[str, Role], sharing: Sharing, *, renew: Sequence[str] = ()) -> str:
        """Divide the work, end the links of `renew`, and describe what changed for whom; empty if nothing did.

        Raises:
            ValueError: the folder has no instances or lacks images, or the names do not fit.
        """
        log = self.log
        everyone = {**log.people, **people}
        self._check_names(people, renew, everyone)
        annotators = sorted(name for name, role in everyone.items() if role == "annotator")
        if not annotators:
            raise ValueError("there are no annotators; name people, e.g. --annotators ann,ben")
        questions = questions_of(self.folder, sharing)
        answered: dict[str, list[str]] = {}
        for person, instance in log.answers:
            answered.setdefault(instance, []).append(person)
        assigned = share_out(questions, annotators, sharing, answered=answered)
        event = start_event(log, questions, assigned, everyone, question=sharing.question)
        changes = []
        for person, names in assigned.items():
            before = len(log.assigned.get(person, []))
            if {*names} != {*log.assigned.get(person, [])}:
                changes.append(f"{person} {before} → {len(names)} questions")
        if changes or event.instances or everyone != log.people or sharing.question != log.question:
            log.append(event)
        for name in renew:
            log.append(Event(kind="renew", person=name))
        return "; ".join(changes)

    def _check_names(self, people: Mapping[str, Role], renew: Sequence[str], everyone: Mapping[str, Role]) -> None:
        for name in [*people, *renew]:
            safe_name(name)
            if name == ADMIN and name in people:
                raise ValueError(f"{ADMIN!r} is the administrator, who has a link anyway; give another name")
            if self.log.people.get(name, everyone.get(name)) != everyone.get(name):
                raise ValueError(f"{name!r} cannot rank and adjudicate; give the adjudicator another name")
            if name in renew and name not in (ADMIN, *everyone):
                raise ValueError(f"there is nobody called {name!r}, whose link could be renewed")

    # --- links -------------------------------------------------------------------------------------------------

    def token(self, person: str) -> str:
        """Sign a person's name; a renewal ends earlier tokens."""
        signed = f"{person}:{self.log.renewals[person]}".encode()
        return f"{person}.{hmac.new(self._secret, signed, hashlib.sha256).hexdigest()[:32]}"

    def person_of(self, token: str) -> str:
        """Return the name of a token. Raises RefusedError for an unknown or ended one."""
        person = token.rpartition(".")[0]
        known = person in (ADMIN, *self.log.people)
        if not known or not hmac.compare_digest(self.token(person).encode(), token.encode()):
            raise RefusedError("this link is not, or no longer, good; ask for a new one", status=401)
        return person

    # --- reading -----------------------------------------------------------------------------------------------

    def adjudicates(self, person: str) -> bool:
        return self.log.people.get(person) == "adjudicator"

    def disputed(self) -> list[str]:
        """List the shared instances on which people disagree, and which nobody has decided or skipped."""
        by_instance: dict[str, list[Ranking]] = {}
        for answer in self.log.rankings():
            by_instance.setdefault(answer.instance, []).append(answer)
        settled = {instance for person, instance in self.log.answers if self.adjudicates(person)}
        return [name for name, answers in by_instance.items() if name not in settled and disagree(answers)]

    def open_of(self, person: str) -> list[str]:
        """List a person's unanswered instances in order: what was taken back first, the latest first."""
        undone = [event.instance for event in reversed(self.log.undone.get(person, []))]
        rest = self.disputed() if self.adjudicates(person) else self.log.assigned.get(person, [])
        names = dict.fromkeys([*undone, *rest])
        return [name for name in names if (person, name) not in self.log.answers]

    def instance_of(self, person: str, key: str) -> Instance:
        """Find an instance of a public key that this person may see. Raises RefusedError for any other."""
        for name, instance in self.log.instances.items():
            if public_key(name) == key:
                if self.adjudicates(person) or person == ADMIN or name in self.log.assigned.get(person, []):
                    return instance
                break
        raise RefusedError(f"there is no instance {key[:80]!r} for {person}", status=404)

    def state(self, person: str) -> dict[str, Any]:
        """Describe a person's progress and next task, and list the images of the task after it."""
        with self._lock:
            following = self.open_of(person)
            done = self.log.of(person)
            ranked = sum(event.kind == "rank" for event in done)
            progress = {"ranked": ranked, "skipped": len(done) - ranked, "total": len(done) + len(following)}
            tasks = [self._task(person, self.log.instances[name]) for name in following[:2]]
            return {
                "person": person,
                "adjudicates": self.adjudicates(person),
                "administers": person == ADMIN,
                "question": self.log.question or (OWN_QUESTION if tasks else ""),
                "custom": bool(self.log.question),
                "progress": progress,
                "task": tasks[0] if tasks else None,
                # The page loads these images while people look, so that the task after this one appears at once.
                "ahead": [tasks[1]["reference"], *tasks[1]["candidates"]] if len(tasks) > 1 else [],
            }

    def _task(self, person: str, instance: Instance) -> dict[str, Any]:
        shown = shown_order(person, instance)
        slot_of = [shown.index(candidate) for candidate in range(len(shown))]
        address = f"/images/{public_key(instance.id)}"
        undone = [event for event in self.log.undone.get(person, []) if event.instance == instance.id]
        task: dict[str, Any] = {
            "instance": public_key(instance.id),
            # Stored whole: the judge is trained on the words that the reward asks with.
            "theme": subject_text(instance.theme),
            "category": instance.category,
            "criteria": instance.criteria or {},
            "reference": f"{address}/reference",
            "candidates": [f"{address}/{slot}" for slot in range(len(shown))],
            "previous": order_of(undone[-1].order, slot_of) if undone and undone[-1].order else None,
        }
        if self.adjudicates(person):
            orders = [event.order for event, _ in self.log.answers.values() if event.instance == instance.id]
            opinions = [order_of(order, slot_of) for order in orders if order]
            # Without names: a decision must not depend on whose order it is.
            task["opinions"] = [{"name": f"Person {n}", "order": order} for n, order in enumerate(opinions, 1)]
        return task

    def summary(self) -> dict[str, Any]:
        """Describe everybody's progress, agreement and skips, for the administrator."""
        with self._lock:
            log = self.log
            agreement = pair_agreement(log.rankings())
            people = []
            for name, role in log.people.items():
                done = log.of(name)
                controls = [
                    event for event in done if event.kind == "rank" and log.instances[event.instance].is_control
                ]
                seconds = [event.seconds for event in done if event.seconds is not None]
                people.append(
                    {
                        "name": name,
                        "role": role,
                        "done": len(done),
                        "total": len(done) + len(self.open_of(name)),
                        "skipped": sum(event.kind == "skip" for event in done),
                        "controls": len(controls),
                        "passed": sum(map(log.passed, controls)),
                        "seconds": median(seconds) if seconds else None,
                    }
                )
            skips = [event for event, _ in log.answers.values() if event.kind == "skip"]
            return {
                "question": log.question or OWN_QUESTION,
                "people": people,
                "agreement": agreement.document() if agreement else None,
                "disputed": len(self.disputed()),
                "skips": [[event.person, event.instance, event.reason] for event in skips[-100:]],
                "command": f"pacorl dataset export {shlex.quote(str(self.folder))}",
            }

    # --- changes -----------------------------------------------------------------------------------------------

    def rank(self, person: str, key: str, slots: Sequence[Any], *, request: str, seconds: float | None = None) -> None:
        """Store a ranking by slots of the page, best first; a list within it is a tie."""
        instance = self.instance_of(person, key)
        tiers = tiers_of(slots)
        count = len(instance.candidates)
        # A missing or repeated slot would become a wrong label.
        if not all(tiers) or sorted(chain(*tiers)) != list(range(count)):
            raise RefusedError(f"a ranking names each of the {count} candidates once, got {list(slots)}")
        shown = shown_order(person, instance)
        order = [[shown[slot] for slot in tier] for tier in tiers]
        self._change(
            Event(kind="rank", person=person, instance=instance.id, order=order, seconds=seconds, request=request)
        )

    def skip(self, person: str, key: str, reason: str, *, request: str) -> None:
        """Store that this person cannot rank an instance, with the reason."""
        reason = reason.strip()
        if not reason or len(reason) > LONGEST_REASON:
            raise RefusedError(f"say why, in 1 to {LONGEST_REASON} characters")
        instance = self.instance_of(person, key)
        self._change(Event(kind="skip", person=person, instance=instance.id, reason=reason, request=request))

    def undo(self, person: str, *, request: str) -> None:
        """Take this person's last answer back, so that its instance is the next task."""
        self._change(Event(kind="undo", person=person, request=request))

    def _change(self, event: Event) -> None:
        """Append a change once, however often its request is sent. Raises RefusedError if it does not fit."""
        if not 8 <= len(event.request) <= 64:
            raise RefusedError(f"a request id has 8 to 64 characters, this has {len(event.request)}")
        if event.person == ADMIN:
            raise RefusedError("the administrator ranks nothing; people have links of their own", status=403)
        with self._lock:
            before = self.log.requests.get(event.request)
            if before:
                same = (before.kind, before.person) == (event.kind, event.person)
                if not same or event.instance not in ("", before.instance):
                    raise RefusedError("this request id was used for something else", status=409)
                return
            if event.kind == "undo":
                done = self.log.of(event.person)
                if not done:
                    raise RefusedError("there is nothing to undo", status=409)
                event = event.model_copy(update={"instance": done[-1].instance})
            elif (event.person, event.instance) in self.log.answers:
                raise RefusedError("this one is answered already; undo it to change it", status=409)
            elif self.adjudicates(event.person) and event.instance not in self.open_of(event.person):
                raise RefusedError("this one is decided already, or nobody disagrees about it", status=409)
            self.log.append(event)


# --- the server --------------------------------------------------------------------------------------------------


class Submission(BaseModel):
    """Field of every change: an id of the client's own, the same if the change is sent again."""

    request: str


class RankingForm(Submission):
    instance: str = Field(max_length=100)
    order: Annotated[list[int | Annotated[list[int], Field(max_length=64)]], Field(max_length=64)]
    seconds: Annotated[float, Field(ge=0, le=86_400)] | None = None


class SkipForm(Submission):
    instance: str = Field(max_length=100)
    reason: str = Field(max_length=10_000)


def make_app(annotation: Annotation) -> FastAPI:
    """Build the application of one dataset folder."""

    def page_of(token: str) -> str:
        return "/admin" if annotation.person_of(token) == ADMIN else "/"

    door = Door("pacorl annotate", "pacorl_annotator", page_of, is_open=lambda path: path in PAGES)
    app = FastAPI(title=door.title, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(door.router())

    def person_of(request: Request) -> str:
        return annotation.person_of(door.token(request))

    person = Depends(person_of)

    for address, file in PAGES.items():
        app.get(address, response_model=None)(partial(_file, PAGE / file))
    app.include_router(_changes(annotation, person))

    @app.get("/images/{key}/{slot}")
    def image(key: str, slot: str, person: str = person) -> Response:
        instance = annotation.instance_of(person, key)
        names = {str(number): instance.candidates[index] for number, index in enumerate(shown_order(person, instance))}
        name = (names | {"reference": instance.reference}).get(slot)
        if name is None:
            raise RefusedError(f"there is no candidate {slot[:20]!r}", status=404)
        path = image_path(annotation.folder, name)
        # The images of an instance never change, and an undo shows them again.
        headers = {"Cache-Control": "private, max-age=3600"}
        return FileResponse(path, media_type=IMAGE_TYPES[path.suffix.lower()], headers=headers)

    @app.get("/api/task")
    def task(person: str = person) -> dict[str, Any]:
        return annotation.state(person)

    @app.get("/api/admin")
    def summary(person: str = person) -> dict[str, Any]:
        if person != ADMIN:
            raise RefusedError(f"{person} is no administrator", status=403)
        return annotation.summary()

    app.add_middleware(Guard, admit=door.admit)
    return app


def _file(path: Path) -> Response:
    return FileResponse(path)


def _changes(annotation: Annotation, person: Any) -> APIRouter:
    """Serve what people change; each answer is the next task."""
    router = APIRouter()

    @router.post("/api/rankings")
    def rank(form: RankingForm, person: str = person) -> dict[str, Any]:
        annotation.rank(person, form.instance, form.order, request=form.request, seconds=form.seconds)
        return annotation.state(person)

    @router.post("/api/skips")
    def skip(form: SkipForm, person: str = person) -> dict[str, Any]:
        annotation.skip(person, form.instance, form.reason, request=form.request)
        return annotation.state(person)

    @router.post("/api/undo")
    def undo(form: Submission, person: str = person) -> dict[str, Any]:
        annotation.undo(person, request=form.request)
        return annotation.state(person)

    return router


def serve(
    folder: Path,
    people: Mapping[str, Role],
    *,
    sharing: Sharing | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    renew: Sequence[str] = (),
    public_url: str = "",
    announce: Callable[[str], None] = print,
) -> None:
    """Serve the page until SIGINT or SIGTERM, and announce everybody's link.

    `public_url` is the address that people use, if a proxy is in front.

    Raises:
        ValueError: if another server has the folder, or the folder has no instances.
        OSError: if the port is taken.
    """
    if public_url:
        check_public_url(public_url)
    sharing = sharing or Sharing()
    with held(folder, url=f"http://{host}:{port}"), listening(host, port) as (listener, url):
        annotation = Annotation(folder)
        if change := annotation.start(people, sharing, renew=renew):
            announce(f"division changed: {change}")
        assigned = annotation.log.assigned
        inputs = [path for name in ("instances", "controls") if (path := folder / f"{name}.jsonl").is_file()]
        step = DatasetStep(folder, "annotate", inputs=inputs, options={"people": annotation.log.people})
        step.finish(outputs=[], counts={name: len(names) for name, names in assigned.items()})
        for name in (ADMIN, *annotation.log.people):
            announce(f"{name}\t{public_url.rstrip('/') or url}/join#{annotation.token(name)}")
        announce(f"serving {folder} at {url}; when people are done: pacorl dataset export {shlex.quote(str(folder))}")
        run(make_app(annotation), listener)


@contextmanager
def held(folder: Path, *, url: str) -> Iterator[None]:
    """Lock a folder for one server. Raises ValueError with the name of another server with the lock."""
    if not (folder / "instances.jsonl").is_file():
        raise ValueError(f"{folder} has no instances.jsonl; run `pacorl dataset pair {shlex.quote(str(folder))}` first")
    try:
        with sole_holder(folder / f"{LOG}.server", note=f"process {os.getpid()} at {url}"):
            yield
    except LockedError as error:
        raise ValueError(f"{folder} is already served ({error.holder}); stop that server first") from None


def plan(folder: Path, people: Mapping[str, Role], sharing: Sharing) -> dict[str, int]:
    """Count the questions of each person, answered questions included, for `--dry-run`; nothing is written."""
    log = AnswerLog(folder)
    everyone = {**log.people, **people}
    annotators = sorted(name for name, role in everyone.items() if role == "annotator")
    answered: dict[str, list[str]] = {}
    for person, instance in log.answers:
        answered.setdefault(instance, []).append(person)
    shares = share_out(questions_of(folder, sharing), annotators, sharing, answered=answered)
    return {name: len(assigned) for name, assigned in shares.items()}
