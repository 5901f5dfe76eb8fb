"""The rankings of people: read from the annotation page's database into rankings.jsonl.

The page (`pacorl.annotate`) writes the database; the steps that need rankings read it here, also while it is served.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from pacorl.dataset.records import Answer, Instance, read_answers, write_answers
from pacorl.io.documents import parse_json

DATABASE = "annotations.db"


def collect_answers(folder: Path, *, dry_run: bool = False) -> list[Answer]:
    """The rankings of a dataset folder, control questions aside.

    If the folder has a database, its rankings are written to rankings.jsonl; else that file is read. A dry run reads
    either and writes neither.
    """
    database, path = folder / DATABASE, folder / "rankings.jsonl"
    if not database.is_file():
        return read_answers(path) if path.is_file() else []
    with closing(connect(database, read_only=dry_run)) as db:
        answers = stored_answers(db)
    if not dry_run:
        write_answers(path, answers)
    return answers


def connect(
    database: Path, *, read_only: bool = False, setup: str = "SELECT 1 FROM answers", wait_seconds: float = 10.0
) -> sqlite3.Connection:
    """Opens a database of annotations; the connection may be used from any thread.

    Args:
        read_only: leaves the folder as it is, to the byte; the database must be there.
        setup: SQL that is executed first.
        wait_seconds: how long another writer is waited for.

    Raises:
        ValueError: if the file cannot be used as a database.
    """
    address = f"file:{quote(str(database))}"
    if read_only:
        # Without a log beside it nobody is writing; then `immutable` keeps SQLite from making one, which mode=ro would.
        is_written = database.with_name(f"{database.name}-wal").exists()
        address += "?mode=ro" if is_written else "?immutable=1"
    db = sqlite3.connect(address, uri=True, timeout=wait_seconds, check_same_thread=False, isolation_level=None)
    try:
        db.executescript(setup)
    except sqlite3.DatabaseError as error:
        db.close()
        raise ValueError(f"{database} cannot be used as a database ({error}); move it away or restore a copy") from None
    return db


def stored_answers(db: sqlite3.Connection, *, controls: bool = False) -> list[Answer]:
    """Every ranking as it stands, best first; with `controls`, only those of control questions."""
    rows = db.execute(
        "SELECT b.person, b.ranking, i.content FROM answers b JOIN instances i ON i.id = b.instance "
        "WHERE b.ranking IS NOT NULL AND i.is_control = ? ORDER BY b.person, b.number",
        (controls,),
    ).fetchall()
    return [_answer(person, parse_json(ranking), stored_instance(content)) for person, ranking, content in rows]


def stored_instance(content: str) -> Instance:
    """The instance of a row of the database."""
    row = parse_json(content)
    must = tuple((better, worse) for better, worse in row["must"])
    return Instance(**{**row, "candidates": tuple(row["candidates"]), "must": must})


def _answer(person: str, ranking: Sequence[int], instance: Instance) -> Answer:
    return Answer(
        instance=instance.id,
        annotator=person,
        group=instance.group,
        reference=instance.reference,
        candidates=tuple(instance.candidates[index] for index in ranking),
        theme=instance.theme,
        category=instance.category,
    )
