"""The database behind the page: SQLite in WAL mode, one server at a time.

A ranking is acknowledged only after its transaction is on the disk (synchronous=FULL). Every submission carries a
request id of the client's own: sent again after a lost answer, it is acknowledged again and counted once. The table
`events` keeps every action, undone answers too.
"""

from __future__ import annotations

import json
import logging
import os
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from pacorl.dataset import folder
from pacorl.dataset.folder import (
    ADJUDICATOR,
    ADMINISTRATOR,
    OWN_QUESTION,
    Instance,
    Order,
    order_of,
    stored_answers,
    stored_instance,
    stored_ranking,
    stored_wordings,
    tiers_of,
    wording_at,
)
from pacorl.io.documents import blamed_on, parse_json, read_text, typed
from pacorl.io.files import LockedError, make_folder, open_regular, sole_holder, text_digest
from pacorl.records.rankings import Ranking
from pacorl.studio.annotate.links import Sharing, describe_change, share_out
from pacorl.web.guard import RefusedError

logger = logging.getLogger(__name__)

SETUP = read_text(Path(__file__).with_name("schema.sql"))
MAX_REASON = 500
DECIDED = f"""
SELECT 1 FROM answers b JOIN people p ON p.name = b.person
WHERE b.instance = ? AND b.ranking IS NOT NULL AND p.is_admin = {ADJUDICATOR}
"""
UNDONE = """
SELECT e.instance FROM events e WHERE e.person = ? AND e.kind = 'undo' AND e.number =
    (SELECT MAX(number) FROM events WHERE person = e.person AND instance = e.instance) ORDER BY e.number DESC
"""


class Person(NamedTuple):
    """Owner of a token."""

    name: str
    is_admin: bool
    expires: float
    adjudicates: bool = False


class Task(NamedTuple):
    """A person's next question."""

    instance: Instance
    slots: tuple[int, ...]
    """The candidates in a per-annotator order, so that no position is favoured."""
    previous: Order | None = None
    """The undone ranking, as slots."""


class Store:
    """The database of one dataset folder, for any thread; `read_only` leaves the folder as it is, to the byte."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        if not read_only:
            make_folder(path.parent)
            os.close(open_regular(path, os.O_RDWR))  # SQLite would make it for all to read, and follow a link
        self._db = folder.connect(path, read_only=True) if read_only else folder.connect(path, setup=SETUP)
        # Readers have their own connection: they see only committed data, and do not wait for the disk with writers.
        self._reader = self._db if read_only else folder.connect(path, check=False)
        # One connection serves many threads: no statement may fall into another thread's transaction.
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    def close(self) -> None:
        # Under both locks, so that no thread is left with a closed connection in the middle of a change.
        with self._writing, self._reading:
            self._reader.close()
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Make all changes of the block or none, on the disk at its end; RefusedError (507) if the disk fails."""
        with self._writing:
            try:
                # IMMEDIATE takes the write lock at once: a transaction that reads first could not be upgraded later.
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as fault:
                logger.error("%s cannot be written: %s", self.path, fault)
                reason = (
                    f"{self.path.name} cannot be written ({fault}): nothing was stored; make room if the disk is full"
                )
                raise RefusedError(reason, status=507) from fault
            finally:
                # After any error, an interrupt too; SQLite may have rolled back by itself.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _all(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._reader.execute(sql, values).fetchall()

    def add_person(self, name: str, *, role: int = 0, days: float = 30) -> str:
        """Make a token for a person, new or present; a present person's old token ends. Only its hash is stored.

        Args:
            role: 0 for an annotator, or ADMINISTRATOR or ADJUDICATOR; a present person keeps the old role.
        """
        if not name.strip() or len(name) > 60 or any(ord(letter) < 32 for letter in name):
            raise RefusedError(f"{name[:80]!r} is not a name; use 1 to 60 printable characters")
        # Only the hash is stored, since copies of the folder contain the database: they hold no valid token.
        token = secrets.token_urlsafe(24)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO people VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "token_hash = excluded.token_hash, expires = excluded.expires",
                (name, text_digest(token), time.time() + days * 86_400, role),
            )
        return token

    def people(self, *, role: int = 0) -> list[str]:
        """List the annotators, or the people with another role."""
        return [name for (name,) in self._all("SELECT name FROM people WHERE is_admin = ? ORDER BY name", role)]

    def person_of(self, token: str) -> Person:
        """Return a token's owner. Raises RefusedError with status 401 if it is unknown or has expired."""
        rows = self._all("SELECT name, is_admin, expires FROM people WHERE token_hash = ?", text_digest(token))
        if not rows:
            raise RefusedError("this link is not known here; ask for a new one", status=401)
        name, role, expires = rows[0]
        if expires < time.time():
            raise RefusedError(f"the link of {name} has expired; ask for a new one. Nothing is lost", status=401)
        return Person(name, role == ADMINISTRATOR, expires, role == ADJUDICATOR)

    def sharing(self) -> Sharing:
        """Return the last sharing; the defaults for a new database."""
        rows = self._all("SELECT value FROM meta WHERE key = 'sharing'")
        with blamed_on(self.path):
            return typed(parse_json(rows[0][0]) if rows else {}, Sharing)

    def question(self) -> str:
        """Return the question that the page asks: the user's, or its own; empty without instances."""
        rows = self._all("SELECT 1 FROM instances LIMIT 1")
        return self.sharing().question or OWN_QUESTION if rows else ""

    def instances(self) -> list[Instance]:
        """List all questions, control questions included, in the order of their arrival."""
        return [stored_instance(content) for (content,) in self._all("SELECT content FROM instances ORDER BY rowid")]

    def answered(self) -> dict[str, set[str]]:
        """Map each answered instance's id to its annotators, skips included."""
        people: dict[str, set[str]] = {}
        sql = "SELECT b.person, b.instance FROM answers b JOIN people p ON p.name = b.person WHERE p.is_admin = 0"
        for person, instance in self._all(sql):
            people.setdefault(instance, set()).add(person)
        return people

    def assigned(self) -> dict[str, dict[str, bool]]:
        """Map each person to the assigned instances, in their order, and whether these are unanswered."""
        assigned: dict[str, dict[str, bool]] = {}
        sql = "SELECT person, instance, is_open FROM assignments ORDER BY person, place"
        for person, instance, is_open in self._all(sql):
            assigned.setdefault(person, {})[instance] = bool(is_open)
        return assigned

    def divide(
        self, instances: Sequence[Instance], sharing: Sharing, *, newcomers: Sequence[str] = ()
    ) -> dict[str, list[str]]:
        """Plan who gets which instances, answered ones included.

        The present division holds as long as its people, its instances and the options that divide are the same:
        people's answers alone must not move a question.
        """
        people = sorted({*self.people(), *newcomers})
        present = self.assigned()
        everything = set().union(*present.values())
        unanswered = set[str]()
        for assigned in present.values():
            unanswered |= {instance for instance, is_open in assigned.items() if is_open}

        stored = {name for (name,) in self._all("SELECT id FROM instances")}
        names = {instance.id for instance in instances}
        questions = {instance.id for instance in instances if not instance.is_control}
        same_instances = names <= stored and questions <= everything and unanswered <= names
        if same_instances and present.keys() >= set(people) and self.sharing().divides_as(sharing):
            return {person: list(present[person]) for person in people}
        return share_out(instances, people, sharing, answered=self.answered())

    def share(self, instances: Sequence[Instance], sharing: Sharing) -> str:
        """Divide the instances among the people, and describe what changed; see `divide`."""
        before = self.assigned()
        # An answer that arrives between this plan and the transaction keeps its person: answers are read again there.
        plan = self.divide(instances, sharing)
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO meta VALUES ('sharing', ?)", (json.dumps(asdict(sharing)),))

            # A ranking keeps the wording under which it was made.
            wordings = stored_wordings(db)
            if not wordings or wordings[-1][1] != sharing.question:
                (latest,) = db.execute("SELECT COALESCE(MAX(number), 0) FROM events").fetchone()
                worded = json.dumps([*wordings, (latest, sharing.question)], ensure_ascii=False)
                db.execute("INSERT OR REPLACE INTO meta VALUES ('wordings', ?)", (worded,))

            # Questions, which never change once they are stored.
            stored = dict(db.execute("SELECT id, content FROM instances"))
            for instance in instances:
                content = json.dumps(asdict(instance), ensure_ascii=False)
                old = stored.get(instance.id, content)
                # An older version may have stored fewer fields.
                if old != content and stored_instance(old) != instance:
                    fault = f"instance {instance.id} is in {self.path} with other images"
                    raise ValueError(f"{fault}; export its rankings and begin a new database")
                row = (instance.id, public_key(instance.id), content, instance.is_control)
                db.execute("INSERT OR IGNORE INTO instances VALUES (?, ?, ?, ?)", row)

            # Assignments: first the answered instances in the order of their answers, which are never shown again
            # unless undone; then the undone instances, the latest first; then the rest.
            for person, assigned in plan.items():
                rows = db.execute("SELECT instance FROM answers WHERE person = ? ORDER BY number", (person,)).fetchall()
                undone = []
                for (name,) in db.execute(UNDONE, (person,)):
                    if name in assigned:
                        undone.append(name)

                ordered = dict.fromkeys([*(answered for (answered,) in rows), *undone, *assigned])
                db.execute("DELETE FROM assignments WHERE person = ?", (person,))
                db.executemany(
                    "INSERT INTO assignments VALUES (?, ?, ?, ?)",
                    [(person, number, instance, number >= len(rows)) for number, instance in enumerate(ordered)],
                )
        return describe_change(before, plan)

    def next_tasks(self, person: str, *, limit: int = 1) -> list[Task]:
        """List the first unanswered instances. After an undo, the undone instance is first."""
        sql = (
            # By default SQLite takes the primary key, and reads all answered instances with it.
            "SELECT i.content FROM assignments a INDEXED BY open_assignments JOIN instances i ON i.id = a.instance "
            "WHERE a.person = ? AND a.is_open ORDER BY a.place LIMIT ?"
        )
        return [self.task(person, stored_instance(content)) for (content,) in self._all(sql, person, limit)]

    def open_assignments(self, person: str) -> list[tuple[str, int, bool]]:
        """List (instance, position, is it a control question) of this person's unanswered instances, by position."""
        sql = (
            "SELECT a.instance, a.place, i.is_control FROM assignments a JOIN instances i ON i.id = a.instance "
            "WHERE a.person = ? AND a.is_open ORDER BY a.place"
        )
        return [(instance, position, bool(is_control)) for instance, position, is_control in self._all(sql, person)]

    def task(self, person: str, instance: Instance) -> Task:
        """Order an instance's candidates for this person."""
        slots = shown_order(person, instance)
        last = "SELECT kind, content FROM events WHERE person = ? AND instance = ? ORDER BY number DESC LIMIT 1"
        events = self._all(last, person, instance.id)
        # An undone skip has no ranking to be shown again.
        previous = None
        if events and events[0][0] == "undo" and events[0][1]:
            slot_of = [slots.index(candidate) for candidate in range(len(slots))]
            previous = order_of(stored_ranking(events[0][1], instance), slot_of)
        return Task(instance, slots, previous)

    def undone(self, person: str) -> list[str]:
        """List the instances whose answers this person took back and has not given again, the latest first."""
        return [name for (name,) in self._all(UNDONE, person)]

    def adjudicated(self) -> set[str]:
        """Collect the instances that an adjudicator has decided, or skipped."""
        sql = "SELECT b.instance FROM answers b JOIN people p ON p.name = b.person WHERE p.is_admin = ?"
        return {instance for (instance,) in self._all(sql, ADJUDICATOR)}

    def audit(self) -> list[dict[str, Any]]:
        """List all events in their order; `order` names the candidates, best first, and `question` is the page's."""
        sql = (
            "SELECT e.number, e.at, e.person, e.kind, e.instance, e.content, i.content FROM events e "
            "JOIN instances i ON i.id = e.instance ORDER BY e.number"
        )
        rows = []
        with self._reading:
            wordings = stored_wordings(self._reader)
        for number, at, person, kind, instance, content, stored in self._all(sql):
            moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
            shown = stored_instance(stored)
            row = {"number": number, "at": moment, "person": person, "kind": kind, "instance": instance}
            row["question"] = wording_at(wordings, number)
            if kind != "skip" and content:
                order = []
                for tier in stored_ranking(content, shown):
                    names = [shown.candidates[index] for index in tier]
                    order.append(names if len(names) > 1 else names[0])
                row["order"] = order
            elif content:
                row["reason"] = content
            rows.append(row)
        return rows

    def instance_for(self, person: Person, key: str, *, to_answer: bool = False) -> Instance:
        """Find the instance of a public key. Raises RefusedError with status 404 if this person has no such instance.

        An administrator sees all, and has none to answer; an adjudicator may answer all.
        """
        sql = (
            "SELECT i.content FROM instances i WHERE i.key = ? AND (? OR EXISTS "
            "(SELECT 1 FROM assignments a WHERE a.person = ? AND a.instance = i.id))"
        )
        sees_all = person.adjudicates or (person.is_admin and not to_answer)
        rows = self._all(sql, key, sees_all, person.name)
        if not rows:
            raise RefusedError(f"there is no instance {key[:80]!r} for {person.name}", status=404)
        return stored_instance(rows[0][0])

    def rank(self, person: Person, key: str, slots: Order, *, request: str, seconds: float | None = None) -> None:
        """Store a ranking, and return when it is on the disk.

        Args:
            slots: slots on the page, best first; a list within it is a tie.
            request: the client's own id of this submission; sent again, it counts once.
        """
        instance = self.instance_for(person, key, to_answer=True)
        count = len(instance.candidates)
        tiers = tiers_of(slots)
        # A missing or repeated slot would become a wrong label.
        if not all(tiers) or sorted(chain.from_iterable(tiers)) != list(range(count)):
            raise RefusedError(f"a ranking names each of the {count} candidates once, got {list(slots)}")
        shown = shown_order(person.name, instance)
        ranking = json.dumps(order_of(tiers, shown))
        kind = "decide" if person.adjudicates else "rank"
        self._answer(person.name, kind=kind, instance=instance.id, content=ranking, request=request, seconds=seconds)

    def skip(self, person: Person, key: str, reason: str, *, request: str) -> None:
        """Store that this person cannot rank an instance, with the reason."""
        reason = reason.strip()
        if not reason or len(reason) > MAX_REASON:
            raise RefusedError(f"say why, in 1 to {MAX_REASON} characters")
        instance = self.instance_for(person, key, to_answer=True)
        self._answer(person.name, kind="skip", instance=instance.id, content=reason, request=request)

    def _answer(
        self, person: str, *, kind: str, instance: str, content: str, request: str, seconds: float | None = None
    ) -> None:
        with self._transaction() as db:
            # A browser repeats a request whose answer was lost on the way.
            if _is_repeated(db, request, (person, kind, instance)):
                return
            if db.execute("SELECT 1 FROM answers WHERE person = ? AND instance = ?", (person, instance)).fetchone():
                raise RefusedError("this one is answered already; undo it to change it", status=409)
            if kind == "decide" and db.execute(DECIDED, (instance,)).fetchone():
                raise RefusedError("another adjudicator has decided this one", status=409)
            ranking, skipped = (None, content) if kind == "skip" else (content, None)
            db.execute(
                "INSERT INTO answers SELECT ?, ?, ?, ?, ?, ?, 1 + COALESCE(MAX(number), 0) FROM answers "
                "WHERE person = ?",
                (person, instance, ranking, skipped, time.time(), seconds, person),
            )
            db.execute("UPDATE assignments SET is_open = 0 WHERE person = ? AND instance = ?", (person, instance))
            _log(db, request, person=person, kind=kind, instance=instance, content=content)

    def pause(self, name: str, paused: bool) -> None:
        """Pause the work of a person, or let it go on; questions, answers and link stay."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'paused'").fetchone()
            names = {*parse_json(row[0])} if row else set()
            names = names | {name} if paused else names - {name}
            db.execute("INSERT OR REPLACE INTO meta VALUES ('paused', ?)", (json.dumps(sorted(names)),))

    def paused(self) -> list[str]:
        """List the people whose work is paused."""
        rows = self._all("SELECT value FROM meta WHERE key = 'paused'")
        return list(parse_json(rows[0][0])) if rows else []

    def undo(self, person: Person, *, request: str) -> None:
        """Take this person's last answer back, so that its instance is the next task."""
        with self._transaction() as db:
            if _is_repeated(db, request, (person.name, "undo", None)):
                return
            last = "SELECT instance, ranking FROM answers WHERE person = ? ORDER BY number DESC LIMIT 1"
            row = db.execute(last, (person.name,)).fetchone()
            if row is None:
                raise RefusedError("there is nothing to undo", status=409)
            instance, ranking = row
            db.execute("DELETE FROM answers WHERE person = ? AND instance = ?", (person.name, instance))
            lowest = "SELECT COALESCE(MIN(place), 0) FROM assignments WHERE person = ?"  # an adjudicator has none
            first = db.execute(lowest, (person.name,)).fetchone()[0]
            # The undone instance comes before all unanswered instances. Answered instances are never shown, so any
            # position before all of them will do.
            moved = "UPDATE assignments SET place = ?, is_open = 1 WHERE person = ? AND instance = ?"
            db.execute(moved, (first - 1, person.name, instance))
            _log(db, request, person=person.name, kind="undo", instance=instance, content=ranking)

    def progress(self, person: str) -> dict[str, int]:
        """Count a person's instances: all, ranked and skipped."""
        (total,) = self._all("SELECT COUNT(*) FROM assignments WHERE person = ?", person)[0]
        ranked, skipped = self._all("SELECT COUNT(ranking), COUNT(skipped) FROM answers WHERE person = ?", person)[0]
        return {"total": total, "ranked": ranked, "skipped": skipped}

    def answers(self, *, controls: bool = False) -> list[Ranking]:
        """List every current ranking, best first; with `controls`, the rankings of control questions only."""
        with self._reading:
            return stored_answers(self._reader, controls=controls)

    def skips(self) -> list[dict[str, str]]:
        """List the skips with their reasons."""
        rows = self._all("SELECT person, instance, skipped FROM answers WHERE skipped IS NOT NULL ORDER BY at")
        return [{"annotator": person, "instance": instance, "reason": reason} for person, instance, reason in rows]

    def controls(self) -> list[tuple[str, str, bool]]:
        """List (person, reference, passed) of the answered control questions; passed if every order in `must` holds."""
        sql = (
            "SELECT b.person, b.ranking, i.content FROM answers b JOIN instances i ON i.id = b.instance "
            "WHERE b.ranking IS NOT NULL AND i.is_control ORDER BY b.person, b.number"
        )
        answered = []
        for person, ranking, content in self._all(sql):
            control = stored_instance(content)
            rank_of = {}
            for rank, tier in enumerate(stored_ranking(ranking, control)):
                rank_of.update(dict.fromkeys(tier, rank))
            holds = all(rank_of[better] < rank_of[worse] for better, worse in control.must)
            answered.append((person, control.reference, holds))
        return answered

    def controls_passed(self) -> dict[str, tuple[int, int]]:
        """Count (passed, answered) control questions by person."""
        counts: dict[str, tuple[int, int]] = {}
        for person, _, holds in self.controls():
            passed, answered = counts.get(person, (0, 0))
            counts[person] = (passed + holds, answered + 1)
        return counts

    def median_seconds(self, person: str) -> float | None:
        """Compute the median time of a ranking, as measured by the page."""
        sql = "SELECT seconds FROM answers WHERE person = ? AND seconds IS NOT NULL ORDER BY seconds"
        rows = self._all(sql, person)
        # The median, because a page left open over lunch would move the mean.
        if rows:
            return float(rows[len(rows) // 2][0])
        return None

    def version(self) -> int:
        """Return the number of events: a summary of an older version is stale."""
        return int(self._all("SELECT COALESCE(MAX(number), 0) FROM events")[0][0])


@contextmanager
def only_server(database: Path, *, url: str) -> Iterator[None]:
    """Lock the database for one server. Raises ValueError with the name of another server with the lock."""
    try:
        with sole_holder(database.with_name(database.name + ".server"), note=f"process {os.getpid()} at {url}"):
            yield
    except LockedError as error:
        raise ValueError(f"{database} is already served ({error.holder}); stop that server first") from None


def shown_order(person: str, instance: Instance) -> tuple[int, ...]:
    """Shuffle the candidates in a stable per-annotator order."""
    order = list(range(len(instance.candidates)))
    # From the names, not from the database: a restored copy shows the same order.
    random.Random(f"{person}\n{instance.id}").shuffle(order)
    return tuple(order)


def public_key(instance: str) -> str:
    """Hash an id for browsers: the id itself would reveal control questions."""
    return text_digest(instance)[:20]


def _is_repeated(db: sqlite3.Connection, request: str, change: tuple[str, str, str | None]) -> bool:
    """Whether this request was carried out before; RefusedError if its id has another (person, kind, instance)."""
    if not 8 <= len(request) <= 64:
        raise RefusedError(f"a request id has 8 to 64 characters, this has {len(request)}")
    row = db.execute("SELECT person, kind, instance FROM events WHERE request = ?", (request,)).fetchone()
    if row is None:
        return False
    if row[:2] != change[:2] or change[2] not in (None, row[2]):
        raise RefusedError("this request id was used for something else", status=409)
    return True


def _log(db: sqlite3.Connection, request: str, *, person: str, kind: str, instance: str, content: str | None) -> None:
    db.execute(
        "INSERT INTO events (request, person, kind, instance, content, at) VALUES (?, ?, ?, ?, ?, ?)",
        (request, person, kind, instance, content, time.time()),
    )
