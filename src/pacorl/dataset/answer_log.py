"""The log of the annotation page, `answers.jsonl`: one event a line, appended and flushed, never changed.

{"kind": "start", "people": {"ann": "annotator"}, "instances": […], "assigned": {"ann": ["i1"]}}
{"kind": "rank", "person": "ann", "instance": "i1", "order": [[2], [0, 1]], "request": "…", "at": …}
{"kind": "skip", "person": "ann", "instance": "i2", "reason": "…", "request": "…", "at": …}
{"kind": "undo", "person": "ann", "instance": "i1", "request": "…", "at": …}

The lines alone determine the answers: without its line an answer is open again. An incomplete last line of a killed
server was never acknowledged and is cut off.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pacorl.dataset.folder import Instance, read_answers, write_records
from pacorl.io.documents import JsonObject, append_jsonl, read_log, typed
from pacorl.io.files import PRIVATE
from pacorl.records.rankings import Ranking

LOG = "answers.jsonl"
NONE_FITS = "None of them fits"
"""Reason of a skip, as on the page; an adjudicator's takes the question out."""
Role = Literal["annotator", "adjudicator"]


class Event(BaseModel):
    """A line of the log."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["start", "rank", "skip", "undo"]
    at: float = 0.0
    person: str = ""
    instance: str = ""
    order: list[list[int]] = []
    """Candidates of the instance, best first, in tiers of ties."""
    reason: str = ""
    request: str = ""
    """The browser's own id of the change, which counts once however often it is sent."""
    people: dict[str, Role] = {}
    """Everyone from this start on."""
    instances: list[Any] = []
    """Instances that no earlier start had, controls included."""
    assigned: dict[str, list[str]] = {}


class AnswerLog:
    """The events of a folder and the state that they lead to. Only one process may write at a time."""

    def __init__(self, folder: Path, *, writes: bool = False) -> None:
        """Read the log, if there is one; `writes` cuts an unfinished line off.

        Raises:
            ValueError: naming the line that is no event.
        """
        self.path = folder / LOG
        self.people: dict[str, Role] = {}
        self.instances: dict[str, Instance] = {}
        self.assigned: dict[str, list[str]] = {}
        self.answers: dict[tuple[str, str], Event] = {}
        """(person, instance) → the valid ranking or skip; the latest last."""
        self.undone: dict[str, dict[str, Event]] = defaultdict(dict)
        """Person → instance → answer that was taken back and not given again, the latest last."""
        self.requests: dict[str, Event] = {}
        read_log(self.path, self._read, mends=writes)

    def append(self, event: Event) -> None:
        """Write an event, and return when it is on the disk. Raises OSError, and changes nothing, if it cannot be."""
        event = event.model_copy(update={"at": round(time.time(), 3)})
        append_jsonl(self.path, event.model_dump(exclude_defaults=True))
        self._apply(event)

    def _read(self, row: JsonObject) -> None:
        try:
            self._apply(typed(row, Event))
        except KeyError as missing:
            raise ValueError(f"{missing} is in no line above it; remove this line, too") from None

    def _apply(self, event: Event) -> None:
        key = (event.person, event.instance)
        if event.kind == "start":
            # People and assignments are replaced; instances only join.
            self.people = event.people
            self.instances |= {instance.id: instance for instance in typed(event.instances, list[Instance])}
            self.assigned = event.assigned
        elif event.kind == "undo":
            self.undone[event.person][event.instance] = self.answers.pop(key)
        else:
            instance = self.instances[event.instance]
            if event.kind == "rank" and sorted(chain(*event.order)) != list(range(len(instance.candidates))):
                raise ValueError(f"a ranking of {event.instance} is {event.order}")
            self.answers[key] = event
            # A repeated answer replaces the one taken back.
            self.undone[event.person].pop(event.instance, None)
        if event.request:
            self.requests[event.request] = event

    def of(self, person: str) -> list[Event]:
        """List a person's valid answers, the latest last."""
        return [event for event in self.answers.values() if event.person == person]

    def rankings(self) -> list[Ranking]:
        """List the valid rankings of all people, control questions left out."""
        answers = []
        for event in self.answers.values():
            instance = self.instances[event.instance]
            if event.kind == "rank" and not instance.is_control:
                answer = Ranking(
                    instance.id,
                    event.person,
                    instance.group,
                    instance.reference,
                    tuple(tuple(instance.candidates[index] for index in tier) for tier in event.order),
                    instance.theme,
                    instance.category,
                    instance.criteria or {},
                    adjudicated=self.people.get(event.person) == "adjudicator",
                )
                answers.append(answer)
        return sorted(answers, key=attrgetter("annotator"))

    def misfits(self, role: Role) -> set[str]:
        """List the instances of which somebody in a role finds that no candidate fits."""
        misfits = set()
        for event in self.answers.values():
            if event.reason == NONE_FITS and self.people[event.person] == role:
                misfits.add(event.instance)
        return misfits


def start_event(
    log: AnswerLog, instances: Iterable[Instance], assigned: Mapping[str, list[str]], people: Mapping[str, Role]
) -> Event:
    """Build the event of a start, with the instances missing in the log.

    Raises:
        ValueError: an instance of the log has changed, so that its rankings would be of something else.
    """
    new = []
    for instance in instances:
        logged = log.instances.get(instance.id)
        if logged is None:
            new.append(asdict(instance))
        elif logged != instance:
            raise ValueError(f"{instance.id} has changed since people ranked it; give it another id")
    return Event(kind="start", people=dict(people), instances=new, assigned=dict(assigned))


def collect_answers(folder: Path) -> list[Ranking]:
    """Rankings of a folder without control questions: from its log (stored in rankings.jsonl) or that file."""
    path = folder / "rankings.jsonl"
    if not (folder / LOG).is_file():
        if not path.is_file():
            return []
        return read_answers(path)
    log = AnswerLog(folder)
    rejected = log.misfits("adjudicator")
    answers = [answer for answer in log.rankings() if answer.instance not in rejected]
    write_records(path, answers, mode=PRIVATE)
    return answers
