"""Records of a dataset folder: prompts in the T2IS form, instances to rank, rankings and labelled pairs.

Rankings come from the database of the annotation page (`pacorl.studio.annotate`), which may be read while it serves.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import quote

from pydantic import BeforeValidator, StrictInt, ValidationError
from pydantic.dataclasses import dataclass

from pacorl.io.documents import JsonObject, blamed_on, faults_of, parse_json, read_jsonl, typed, write_jsonl
from pacorl.io.files import PRIVATE, SHARED, safe_name
from pacorl.io.net import MALFORMED
from pacorl.records.prompts import load_prompts
from pacorl.records.rankings import RECORD, Criteria, Ranking, ranks_of
from pacorl.types import Prompt

Record = TypeVar("Record")
DATABASE = "annotations.db"
ADMINISTRATOR = 1
ADJUDICATOR = 2
"""Values of the database's `people.is_admin`. Annotators have 0: the column was a truth value before there were
adjudicators, and databases of that time are still read."""


def _no_text(names: Any) -> Any:
    if isinstance(names, str):  # a text is a sequence too, of letters
        raise ValueError(f"a list of images, not {names!r}")
    return tuple(names) if isinstance(names, list) else names  # strict validation makes no tuple behind a validator


class PromptRecord(NamedTuple):
    """One line of prompts.jsonl: the prompt, and the whole T2IS record with its unused keys."""

    idx: str
    """Folder name of the prompt's images, and its group in every split."""
    prompt: Prompt
    row: JsonObject


OWN_QUESTION = "Which of these belong to the same set as the reference?"
"""The page's own question."""

Order = Sequence[int | Sequence[int]]
"""Candidates or slots, best first; a nested sequence is a tie."""


@dataclass(frozen=True, slots=True, config=RECORD)
class Instance:
    """One question to a person: rank `candidates` by their consistency with `reference`.

    Paths are relative to the dataset's folder, in POSIX form.
    """

    id: str
    group: str
    """Prompt of the instance; all instances of a group belong to one split."""
    reference: str
    candidates: Annotated[tuple[str, ...], BeforeValidator(_no_text)]
    theme: str = ""
    category: str = ""
    task: str = ""
    criteria: Criteria | None = None
    must: tuple[tuple[StrictInt, StrictInt], ...] = ()
    """(better, worse) indices of candidates with a known order; only for control questions."""

    def __post_init__(self) -> None:
        count = len(self.candidates)
        if count < 2 or len(set(self.candidates)) < count:
            raise ValueError(f"an instance needs at least two different candidates, got {list(self.candidates)}")
        if any(not 0 <= min(pair) <= max(pair) < count for pair in self.must):
            raise ValueError(f"`must` names candidates beyond the {count} that there are: {list(self.must)}")
        # An order with all of these pairs exists unless they form a circle.
        order = TopologicalSorter[int]()
        for better, worse in self.must:
            order.add(worse, better)
        try:
            order.prepare()
        except CycleError:
            raise ValueError(f"`must` puts a candidate above itself, which nobody can: {list(self.must)}") from None

    @property
    def is_control(self) -> bool:
        return bool(self.must)


def ranking_of(
    shown: Instance, tiers: Sequence[Sequence[str]], *, annotator: str, adjudicated: bool = False, question: str = ""
) -> Ranking:
    """Ranking of an instance by one person; the candidates of one tier are tied."""
    return Ranking(
        shown.id,
        annotator,
        shown.group,
        shown.reference,
        tuple(chain.from_iterable(tiers)),
        shown.theme,
        shown.category,
        ranks_of(tiers),
        criteria=shown.criteria or {},
        adjudicated=adjudicated,
        question=question,
    )


@dataclass(frozen=True, slots=True, config=RECORD)
class LabelledPair:
    """Two sub-figures (or an edit's source and result) and whether people found them consistent."""

    key: str
    """Name of the pair, the same in both orders."""
    group: str
    images: tuple[str, ...]
    consistent: bool
    question: str
    category: str = ""
    votes: tuple[int, int] = (0, 0)
    """(Yes, No)"""
    reasons: str = ""


def read_prompts(path: Path) -> list[PromptRecord]:
    """Read prompts. Raises ValueError as `load_prompts`, and if an idx is missing, repeated or no file name."""
    prompts = iter(load_prompts(path))

    def parse(**row: Any) -> PromptRecord:
        if row.get("idx") is None:
            raise ValueError("'idx' is missing; it names the prompt's folder of images")
        with blamed_on("idx"):
            return PromptRecord(safe_name(str(row["idx"])), next(prompts), row)

    repeated = "idx {0.idx!r} is already taken by an earlier record; ids must be unique"
    return _read(path, parse, "a prompt", repeated)


def read_instances(path: Path) -> list[Instance]:
    """Read instances. Raises ValueError with file and record if one is malformed or repeats an id."""
    return _read(path, Instance, "a ranking instance", "id {0.id!r} is already taken by an earlier record")


def read_answers(path: Path) -> list[Ranking]:
    """Read rankings. Raises ValueError with file and record if one is malformed or a person's second of an instance."""
    return _read(path, Ranking, "a ranking", "{0.annotator} has already ranked {0.instance}")


def read_pairs(path: Path) -> list[LabelledPair]:
    """Read labelled pairs. Raises ValueError with file and record if one is malformed or repeats a key."""
    return _read(path, LabelledPair, "a labelled pair", "key {0.key!r} is already taken by an earlier record")


def write_records(path: Path, records: Iterable[Instance | Ranking | LabelledPair], *, mode: int = SHARED) -> None:
    write_jsonl(path, map(asdict, records), mode=mode)


def _read(path: Path, kind: Callable[..., Record], name: str, repeated: str) -> list[Record]:
    """Read the records of a JSONL file; `repeated` is the message of the fault that two records share an id."""
    records: dict[str, Record] = {}
    for number, row in enumerate(read_jsonl(path), 1):
        with blamed_on(f"{path}, record {number}"):
            try:
                record = kind(**row)
            except ValidationError as error:
                raise ValueError(f"not {name} ({faults_of(error)})") from None
            # The fault names the identifying fields, so it serves as their key.
            fault = repeated.format(record)
            if records.setdefault(fault, record) is not record:
                raise ValueError(fault)
    return list(records.values())


# --- the rankings of people --------------------------------------------------------------------------------------


def collect_answers(folder: Path, *, dry_run: bool = False) -> list[Ranking]:
    """Rankings of a folder without control questions: from its database (stored in rankings.jsonl) or that file."""
    database = folder / DATABASE
    path = folder / "rankings.jsonl"
    if not database.is_file():
        return read_answers(path) if path.is_file() else []
    with closing(connect(database, read_only=dry_run)) as db:
        answers = stored_answers(db)
    if not dry_run:
        write_records(path, answers, mode=PRIVATE)
    return answers


def count_trail(folder: Path) -> dict[str, int]:
    """Count what stands in the audit trail, undone actions aside: rankings, controls, decisions and skips.

    Empty if the folder has no database.
    """
    if not (folder / DATABASE).is_file():
        return {}
    latest = (
        "SELECT e.kind, i.is_control FROM events e JOIN instances i ON i.id = e.instance "
        "WHERE e.number IN (SELECT MAX(number) FROM events GROUP BY person, instance)"
    )
    names = {("rank", 0): "rankings", ("rank", 1): "controls", ("decide", 0): "decisions"}
    counts = {"rankings": 0, "controls": 0, "decisions": 0, "skips": 0}
    with closing(connect(folder / DATABASE, read_only=True, check=False)) as db:
        for kind, is_control in db.execute(latest):
            if kind != "undo":
                counts[names.get((kind, is_control), "skips")] += 1
    return counts


def connect(
    database: Path, *, read_only: bool = False, setup: str = "SELECT 1 FROM answers", check: bool = True
) -> sqlite3.Connection:
    """Open a database of annotations for any thread; `read_only` leaves the folder unchanged, to the byte.

    Raises:
        ValueError: it is no such database or damaged (`check`); the message names it.
    """
    # A URI, which alone can open a database read-only.
    address = f"file:{quote(str(database))}"
    if read_only:
        # Without a log there is no writer. Then `immutable` keeps SQLite from creating one, as mode=ro would.
        is_written = database.with_name(f"{database.name}-wal").exists()
        address += "?mode=ro" if is_written else "?immutable=1"
    # isolation_level=None: the store begins transactions itself.
    db = sqlite3.connect(address, uri=True, timeout=10, check_same_thread=False, isolation_level=None)
    try:
        db.executescript(setup)
        if check:
            _check(db)
    except (sqlite3.Error, *MALFORMED) as error:
        db.close()
        raise ValueError(f"{database} cannot be used as a database ({error}); move it away or restore a copy") from None
    return db


def _check(db: sqlite3.Connection) -> None:
    """Raise any fault of a damaged database at the start rather than during a ranking."""
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise ValueError(" ".join(verdict.split()))
    for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        db.execute(f'SELECT * FROM "{table}"').fetchall()  # texts may be no UTF-8
    for (content,) in db.execute("SELECT content FROM instances"):
        stored_instance(content)
    for controls in (False, True):
        stored_answers(db, controls=controls)
    undone = "SELECT e.content, i.content FROM events e JOIN instances i ON i.id = e.instance WHERE e.kind = 'undo'"
    for ranking, content in db.execute(f"{undone} AND e.content IS NOT NULL"):
        stored_ranking(ranking, stored_instance(content))


def stored_answers(db: sqlite3.Connection, *, controls: bool = False) -> list[Ranking]:
    """All rankings in their latest form, best first; with `controls`, only control questions."""
    # Ordered by answer, so that rankings.jsonl is the same file each time.
    rows = db.execute(
        "SELECT b.person, b.ranking, i.content, p.is_admin FROM answers b JOIN instances i ON i.id = b.instance "
        "JOIN people p ON p.name = b.person "
        "WHERE b.ranking IS NOT NULL AND i.is_control = ? ORDER BY b.person, b.number",
        (controls,),
    )
    # The wording of each ranking follows from its event.
    wordings = stored_wordings(db)
    latest = {}
    for person, instance, number in db.execute("SELECT person, instance, MAX(number) FROM events GROUP BY 1, 2"):
        latest[person, instance] = number

    # Many people rank one instance, and orders repeat: parsing 40,000 answers anew took 1.6 s of a start.
    instance_of = cache(stored_instance)
    parse_cached = cache(parse_json)

    answers = []
    for person, ranking, content, role in rows:
        shown = instance_of(content)
        tiers = []
        for tier in stored_ranking(ranking, shown, read=parse_cached):
            tiers.append([shown.candidates[index] for index in tier])
        question = wording_at(wordings, latest.get((person, shown.id), 0))
        answers.append(ranking_of(shown, tiers, annotator=person, adjudicated=role == ADJUDICATOR, question=question))
    return answers


def stored_wordings(db: sqlite3.Connection) -> list[tuple[int, str]]:
    """The wordings of the page's question, each with the number of the last event before it."""
    row = db.execute("SELECT value FROM meta WHERE key = 'wordings'").fetchone()
    return typed(parse_json(row[0]) if row else [], list[tuple[int, str]])


def wording_at(wordings: Sequence[tuple[int, str]], number: int) -> str:
    """The question that the page asked at an event; empty if it was not recorded."""
    asked = [question for before, question in wordings if before < number]
    return (asked[-1] or OWN_QUESTION) if asked else ""


def final_answers(answers: Sequence[Ranking]) -> list[Ranking]:
    """Rankings that count: only the decision for an adjudicated instance, otherwise every ranking."""
    decided = {answer.instance for answer in answers if answer.adjudicated}
    return [answer for answer in answers if answer.adjudicated or answer.instance not in decided]


def stored_instance(content: str) -> Instance:
    """Instance of a row of the database."""
    return typed(parse_json(content), Instance)


def stored_ranking(text: str, instance: Instance, *, read: Callable[[str], Any] = parse_json) -> list[list[int]]:
    """Tiers of the candidates' indices in a stored ranking, best first."""
    tiers = tiers_of(read(text))
    if not all(tiers) or sorted(chain.from_iterable(tiers)) != list(range(len(instance.candidates))):
        raise ValueError(f"a ranking of {instance.id} is {text[:60]}")
    return tiers


def tiers_of(order: Order) -> list[list[int]]:
    """Turn an order into tiers: [2, [0, 3], 1] has three, the second with a tie."""
    return [list(entry) if isinstance(entry, Sequence) else [entry] for entry in order]


def order_of(tiers: Sequence[Sequence[int]], new: Sequence[int]) -> tuple[int | tuple[int, ...], ...]:
    """Turn tiers into an order, with `new[index]` in the place of each index."""
    order: list[int | tuple[int, ...]] = []
    for tier in tiers:
        renamed = tuple(new[index] for index in tier)
        order.append(renamed if len(tier) > 1 else renamed[0])
    return tuple(order)
