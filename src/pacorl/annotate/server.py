"""The step `pacorl dataset annotate FOLDER --annotators ann,ben`: division of the work, and the server of its page.

All that people do is in `answers.jsonl` (`dataset.answer_log`), on the disk before it is acknowledged. Links are signed
by a secret of the folder, so that nothing about them is stored. Images are named by instance and number, never by path.
"""

import hashlib
import hmac
import math
import random
import shlex
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field, StringConstraints

from pacorl.core.batches import grouped
from pacorl.core.grid import subject_text
from pacorl.dataset.answer_log import LOG, AnswerLog, Event, Role, start_event
from pacorl.dataset.folder import Instance, read_instances
from pacorl.dataset.rules import alike_pairs, best_worst
from pacorl.io.documents import blamed_on
from pacorl.io.files import existing, inside, safe_name, sole_holder, text_digest
from pacorl.io.images import IMAGE_TYPES
from pacorl.web import BODY_BYTES, Door, Guard, RefusedError, listening, run, secret_in

PAGE = Path(__file__).parent / "page"
ADMIN = "admin"
CONTROL_EVERY = 20
"""Questions per control question."""


# --- division of the work --------------------------------------------------------------------------------------------


def share_out(
    instances: Sequence[Instance], people: Sequence[str], count: int, *, answered: Collection[tuple[str, str]]
) -> dict[str, list[str]]:
    """Assign every question to the `count` people who have fewest so far, and control questions to everyone.

    Of equals a digest of the names decides, so that the same people get the same questions in the same order again.

    Args:
        answered: (person, instance id) of every answer; these people keep the question, and count as some of its.

    Returns:
        person → instance ids in the order in which to show them.
    """
    shares: dict[str, list[str]] = {person: [] for person in people}
    for instance in instances:
        if not instance.is_control:
            holders = [name for name in people if (name, instance.id) in answered]
            newcomers = by_chance({*people} - {*holders}, instance.id)
            newcomers.sort(key=lambda name: len(shares[name]))
            for person in [*holders, *newcomers][: max(count, len(holders))]:
                shares[person].append(instance.id)

    controls = [instance.id for instance in instances if instance.is_control]
    for person, questions in shares.items():
        control_ids = by_chance(controls, person)[: math.ceil(len(questions) / CONTROL_EVERY)]
        shares[person] = by_chance([*questions, *control_ids], person)
    return shares


def by_chance(names: Iterable[str], key: str) -> list[str]:
    """Sort names by their digests with a key."""
    return sorted(names, key=lambda name: text_digest(f"{key}\n{name}"))


def foreign_controls(instances: Sequence[Instance]) -> list[Instance]:
    """Make control questions from the data: one candidate becomes an image of another prompt, and is the worst.

    There are none if all prompts have the same images.
    """
    images: dict[str, set[str]] = {}
    for instance in instances:
        images.setdefault(instance.group, set()).update([instance.reference, *instance.candidates])
    everything = set().union(*images.values())
    by_id = {instance.id: instance for instance in instances if everything > images[instance.group]}
    controls = []
    for name in by_chance(by_id, "control")[: math.ceil(len(instances) / CONTROL_EVERY)]:
        rng = random.Random(name)
        instance = by_id[name]
        foreign = rng.randrange(len(instance.candidates))
        candidates = list(instance.candidates)
        candidates[foreign] = rng.choice(sorted(everything - images[instance.group]))
        # The id follows from the images, so that a later start finds the same control question in the log.
        key = text_digest("\n".join([instance.reference, *candidates]))[:16]
        controls.append(replace(instance, id=f"control:{key}", candidates=tuple(candidates), foreign=foreign))
    return controls


def shown_order(person: str, instance: Instance) -> tuple[int, ...]:
    """Shuffle the candidates in a stable per-annotator order."""
    order = list(range(len(instance.candidates)))
    random.Random(f"{person}\n{instance.id}").shuffle(order)
    return tuple(order)


def public_key(instance: str) -> str:
    """Hash an id for browsers: the id itself would reveal control questions."""
    return text_digest(instance)[:20]


# --- the work of people ----------------------------------------------------------------------------------------------


class Annotation:
    """The annotation of one folder: its access rules and every change."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = AnswerLog(folder, writes=True)
        self._secret = secret_in(folder / "annotate.key").encode()

    def start(
        self, annotators: Sequence[str], adjudicators: Sequence[str] = (), *, people: int = 2, controls: bool = True
    ) -> None:
        """Divide the work among these people, and write the division if it is another than the last one.

        Earlier people stay if they have answers, or if nobody is named.

        Args:
            people: Number of people for each question; everyone, if there are fewer.
            controls: Whether each person gets hidden control questions.

        Raises:
            ValueError: names do not fit, a known instance has changed, or an image is missing.
        """
        log = self.log
        of_command = {*annotators, *adjudicators}
        answered = {person for person, _ in log.answers}
        role_of = {name: role for name, role in log.people.items() if not of_command or name in of_command | answered}
        spelling = {ADMIN: repr(ADMIN)} | {name.casefold(): name for name in role_of}
        names_of_role: dict[Role, Sequence[str]] = {"annotator": annotators, "adjudicator": adjudicators}
        for role, names in names_of_role.items():
            for name in names:
                safe_name(name)
                # One role and spelling per person: an adjudicator must not decide on their own rankings.
                taken = spelling.setdefault(name.casefold(), name)
                if taken != name or role_of.setdefault(name, role) != role:
                    part = role_of.get(taken, "administrator")
                    raise ValueError(f"{taken} is an {part}; give the {role} {name!r} another name")
        ranking = sorted(name for name, role in role_of.items() if role == "annotator")
        if not ranking:
            raise ValueError("there are no annotators; name people, e.g. --annotators ann,ben")
        instances = read_instances(self.folder / "instances.jsonl")
        for instance in instances:
            with blamed_on(f"instances.jsonl: {instance.id}"):
                for image in (instance.reference, *instance.candidates):
                    existing(self.folder, image)
                    if Path(image).suffix.lower() not in IMAGE_TYPES:
                        raise ValueError(
                            f"{image} is none of {', '.join(IMAGE_TYPES)}, which browsers show; convert it"
                        )
        questions = [*instances]
        if controls:
            questions += foreign_controls(instances)
        assigned = share_out(questions, ranking, people, answered=log.answers)
        event = start_event(log, questions, assigned, role_of)
        # A restart without changes adds no line.
        if event.instances or (role_of, assigned) != (log.people, log.assigned):
            log.append(event)

    # --- links -------------------------------------------------------------------------------------------------------

    def token(self, person: str) -> str:
        """Sign a person's name."""
        signature = hmac.new(self._secret, person.encode(), hashlib.sha256).hexdigest()[:32]
        return f"{person}.{signature}"

    def person_of(self, token: str) -> str:
        """Return the name of a token. Raises RefusedError for an unknown one."""
        person = token.rpartition(".")[0]
        is_known = person in (ADMIN, *self.log.people)
        if not (hmac.compare_digest(self.token(person).encode(), token.encode()) and is_known):
            raise RefusedError("open the page by the link that you were given, or ask for a new one", status=401)
        return person

    # --- reading -----------------------------------------------------------------------------------------------------

    def adjudicates(self, person: str) -> bool:
        return self.log.people.get(person) == "adjudicator"

    def disputed(self) -> list[str]:
        """List the instances whose answers contradict each other, and which nobody decided or skipped.

        An image is the best of one and the worst of another, so that their votes cancel out, or one ranks and another
        skips since no candidate fits.
        """
        by_instance = grouped((answer.instance, answer) for answer in self.log.rankings())
        settled = {instance for person, instance in self.log.answers if self.adjudicates(person)}
        misfits = self.log.misfits("annotator")
        disputed = []
        for name in by_instance.keys() - settled:
            labels = set()
            for answer in by_instance[name]:
                labels.update(best_worst(answer.tiers))
            has_both = len(labels) > len(dict(labels))
            if has_both or name in misfits:
                disputed.append(name)
        return sorted(disputed)

    def open_of(self, person: str) -> list[str]:
        """List a person's unanswered instances in order: answers taken back first, latest to earliest."""
        undone = reversed(self.log.undone[person])
        assigned = self.disputed() if self.adjudicates(person) else self.log.assigned.get(person, [])
        return [name for name in dict.fromkeys([*undone, *assigned]) if (person, name) not in self.log.answers]

    def instance_of(self, person: str, key: str) -> Instance:
        """Find an instance of a public key that this person may see. Raises RefusedError for any other."""
        for name in self.log.instances if self.adjudicates(person) else self.log.assigned.get(person, ()):
            if public_key(name) == key:
                return self.log.instances[name]
        raise RefusedError(f"there is no instance {key[:80]!r} for {person}", status=404)

    def image_of(self, person: str, key: str, number: int) -> Path:
        """Find an image of a question: the reference (0), or a candidate. Raises RefusedError if there is none."""
        instance = self.instance_of(person, key)
        images = [instance.reference]
        for index in shown_order(person, instance):
            images.append(instance.candidates[index])
        if not 0 <= number < len(images):
            raise RefusedError(f"there is no image {number}", status=404)
        return inside(self.folder, images[number])

    def state(self, person: str) -> dict[str, Any]:
        """Describe a person's progress and next task."""
        following = self.open_of(person)
        return {
            "person": person,
            "adjudicates": self.adjudicates(person),
            "progress": self.progress(person),
            "task": self._task(person, self.log.instances[following[0]]) if following else None,
        }

    def progress(self, person: str) -> dict[str, int]:
        """Count what a person has ranked and skipped, and all that the person is asked."""
        done = self.log.of(person)
        ranked = sum(event.kind == "rank" for event in done)
        return {"ranked": ranked, "skipped": len(done) - ranked, "total": len(done) + len(self.open_of(person))}

    def _task(self, person: str, instance: Instance) -> dict[str, Any]:
        shown = shown_order(person, instance)

        def in_slots(order: Sequence[Sequence[int]]) -> list[list[int]]:
            return [[shown.index(candidate) for candidate in tier] for tier in order]

        address = f"/images/{public_key(instance.id)}"
        undone = self.log.undone[person].get(instance.id)
        task: dict[str, Any] = {
            "instance": public_key(instance.id),
            # Stored whole: the judge is trained on the words that the reward asks with.
            "theme": subject_text(instance.theme),
            "criteria": instance.criteria or {},
            "reference": f"{address}/0",
            "candidates": [f"{address}/{number}" for number in range(1, len(shown) + 1)],
            "previous": in_slots(undone.order) if undone and undone.order else None,
        }
        if self.adjudicates(person):
            task["opinions"] = []
            answers = [event for event in self.log.answers.values() if event.instance == instance.id]
            for number, event in enumerate(answers, 1):
                # Without names: a decision must not depend on whose order it is.
                opinion = {"name": f"Person {number}", "order": in_slots(event.order), "reason": event.reason}
                task["opinions"].append(opinion)
        return task

    def summary(self) -> dict[str, Any]:
        """Describe everybody's progress and agreement, for the administrator."""
        log = self.log
        rankings = log.rankings()
        shares = alike_pairs(rankings)
        upheld = alike_pairs(rankings, decided=True)
        people = []
        for name, role in log.people.items():
            done = log.of(name)
            controls = passed = 0
            for event in done:
                instance = log.instances[event.instance]
                if event.kind == "rank" and instance.is_control:
                    controls += 1
                    # The foreign image is alone in the last place.
                    passed += event.order[-1] == [instance.foreign]
            people.append(
                {
                    "name": name,
                    "role": role,
                    "controls": controls,
                    "passed": passed,
                    "alike": shares.get(name, (0, 0)),
                    "upheld": upheld.get(name, (0, 0)),
                    "times": [event.at for event in done],
                    "reasons": [event.reason for event in done if event.reason],
                    **self.progress(name),
                }
            )
        return {"people": people, "disputed": len(self.disputed())}

    # --- changes -----------------------------------------------------------------------------------------------------

    def rank(self, person: str, key: str, slots: Sequence[Any], *, request: str) -> None:
        """Store the slots of a page, best first, ties as lists. Raises RefusedError unless each is in it once."""
        instance = self.instance_of(person, key)
        tiers = [slot if isinstance(slot, list) else [slot] for slot in slots]
        count = len(instance.candidates)
        # A missing or repeated slot would become a wrong label.
        if not all(tiers) or sorted(chain(*tiers)) != list(range(count)):
            raise RefusedError(f"a ranking names each of the {count} candidates once, got {list(slots)}")
        shown = shown_order(person, instance)
        order = [[shown[slot] for slot in tier] for tier in tiers]
        self._change(Event(kind="rank", person=person, instance=instance.id, order=order, request=request))

    def skip(self, person: str, key: str, reason: str, *, request: str) -> None:
        """Store that this person cannot rank an instance, with the reason."""
        instance = self.instance_of(person, key)
        self._change(Event(kind="skip", person=person, instance=instance.id, reason=reason, request=request))

    def undo(self, person: str, *, request: str) -> None:
        """Take this person's last answer back, so that its instance is the next task."""
        self._change(Event(kind="undo", person=person, request=request))

    def _change(self, event: Event) -> None:
        """Append a change once, however often its request is sent. Raises RefusedError if it does not fit."""
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
        elif event.instance not in self.open_of(event.person):
            raise RefusedError("this one is decided already, or nobody disagrees about it", status=409)
        self.log.append(event)


# --- the server ------------------------------------------------------------------------------------------------------


class Submission(BaseModel):
    """Field of every change: an id of the client's own, the same if the change is sent again."""

    request: str = Field(min_length=8, max_length=64)


class RankingForm(Submission):
    instance: str
    order: list[int | list[int]]


class SkipForm(Submission):
    instance: str
    reason: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]


def make_app(annotation: Annotation) -> FastAPI:
    """Build the application of one dataset folder; each change is answered by the next task.

    Its routes run on the event loop, one after the other, so that no two of them change the log at once.
    """

    def page_of(token: str) -> str:
        return "/page/admin.html" if annotation.person_of(token) == ADMIN else "/page/"

    door = Door("pacorl_annotator", page_of)
    app = FastAPI(title="pacorl annotate", docs_url=None, redoc_url=None, openapi_url=None, max_body_size=BODY_BYTES)
    app.include_router(door.router())
    app.mount("/page", StaticFiles(directory=PAGE, html=True))

    async def person_of(request: Request) -> str:
        return annotation.person_of(door.token(request))

    person = Depends(person_of)

    @app.get("/images/{key}/{number}")
    async def image(key: str, number: int, person: str = person) -> Response:
        # Not cached: the slots are in each person's order, and people may share a browser.
        path = annotation.image_of(person, key, number)
        # Named, since Python's own table lacks WebP, and browsers may not guess.
        return FileResponse(path, media_type=IMAGE_TYPES.get(path.suffix.lower()))

    @app.get("/api/task")
    async def task(person: str = person) -> dict[str, Any]:
        return annotation.state(person)

    @app.get("/api/admin")
    async def summary(person: str = person) -> dict[str, Any]:
        if person != ADMIN:
            raise RefusedError(f"{person} is no administrator", status=403)
        return annotation.summary()

    @app.post("/api/rankings")
    async def rank(form: RankingForm, person: str = person) -> dict[str, Any]:
        annotation.rank(person, form.instance, form.order, request=form.request)
        return annotation.state(person)

    @app.post("/api/skips")
    async def skip(form: SkipForm, person: str = person) -> dict[str, Any]:
        annotation.skip(person, form.instance, form.reason, request=form.request)
        return annotation.state(person)

    @app.post("/api/undo")
    async def undo(form: Submission, person: str = person) -> dict[str, Any]:
        annotation.undo(person, request=form.request)
        return annotation.state(person)

    app.add_middleware(Guard, admit=door.admit)
    return app


def serve(
    folder: Path,
    *people: Sequence[str],
    host: str = "127.0.0.1",
    port: int = 8765,
    public_url: str = "",
    announce: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Serve the page until SIGINT or SIGTERM, and announce everybody's link.

    Args:
        people: Annotators and adjudicators, as in `Annotation.start`, which has the other options.
        public_url: The address that people use, if a proxy is in front.

    Raises:
        ValueError: if another server has the folder, or the folder has no instances.
        OSError: if the port is taken.
    """
    read_instances(folder / "instances.jsonl")  # before anything is written into a folder of another name
    note = f"the server of port {port}"
    with (
        sole_holder(folder / f"{LOG}.server", note=note, fix="stop that server first"),
        listening(host, port) as (listener, url),
    ):
        annotation = Annotation(folder)
        annotation.start(*people, **options)

        for name in (ADMIN, *annotation.log.people):
            announce(f"{name}\t{public_url.rstrip('/') or url}/join#{annotation.token(name)}")
        following = f"pacorl dataset export {shlex.quote(str(folder))}"
        announce(f"serving {folder} at {url}; when people are done: {following}")
        run(make_app(annotation), listener)
