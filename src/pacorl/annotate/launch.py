"""The step `pacorl dataset annotate`: opens the database, shares the work out, serves until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pacorl.annotate.assign import Sharing, foreign_controls, share_out
from pacorl.annotate.store import Store, only_server
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.records import Answer, Instance, read_answers, read_instances, write_answers

ADMIN = "admin"


def questions(folder: Path, *, controls: int, seed: int) -> list[Instance]:
    """Everything there is to rank: instances.jsonl, controls.jsonl where there is one, and controls made from the data.

    Raises ValueError for pictures that are gone, naming the first, and for control questions without a known order or
    under another instance's id.
    """
    from pacorl.annotate.server import missing_pictures

    instances = read_instances(folder / "instances.jsonl")
    own = folder / "controls.jsonl"
    added = read_instances(own) if own.is_file() else foreign_controls(instances, controls, seed=seed)
    taken = {one.id for one in instances}
    for one in added:
        if one.id in taken:
            raise ValueError(f"{own}: id {one.id!r} is already taken by an instance; ids must be unique")
        if not one.is_control:
            raise ValueError(f"{own}: {one.id!r} says no known order; give one under `must`, e.g. [[0, 1]]")
    instances += added
    absent = missing_pictures(folder, instances)
    if absent:
        raise ValueError(f"{len(absent)} pictures are missing, {absent[0]} first; run `pacorl dataset pair` again")
    return instances


def plan(folder: Path, people: Sequence[str], *, sharing: Sharing | None = None) -> dict[str, int]:
    """How many questions each person would have, those answered already included: what `--dry-run` prints.

    People and sharing that the database remembers count as in `open_desk`; nothing is written.
    """
    _refuse_admin(people)
    database = folder / "annotations.db"
    known: list[str] = []
    answered: dict[str, set[str]] = {}
    if database.is_file():
        with Store(database, read_only=True) as store:
            sharing = sharing or Sharing(**(store.remembered("sharing") or {}))
            known, answered = store.people(), store.answered()
    sharing = sharing or Sharing()
    asked = questions(folder, controls=sharing.controls, seed=sharing.seed)
    shares = share_out(asked, sorted({*known, *people}), sharing, answered=answered)
    return {name: len(own) for name, own in shares.items()}


def _refuse_admin(people: Sequence[str]) -> None:
    if ADMIN in people:
        raise ValueError(f"{ADMIN!r} is the administrator, who has a link anyway; give the annotator another name")


def open_desk(
    store: Store,
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | None = None,
    days: float = 30,
    renew: Sequence[str] = (),
) -> dict[str, str]:
    """Adds whoever is new (and an administrator), renews links, and shares the work out.

    sharing: None for what the database remembers (the defaults, for a new one). Returns name → path of a join link,
    of those made now: only their hashes are kept. Raises ValueError for an annotator who is called as the administrator
    is, and where there is nobody.
    """
    sharing = sharing or Sharing(**(store.remembered("sharing") or {}))
    asked = questions(folder, controls=sharing.controls, seed=sharing.seed)
    _refuse_admin(people)
    if not people and not store.people():
        raise ValueError("nobody is there to rank; name people, e.g. --annotators ann,ben")
    store.remember("sharing", asdict(sharing))
    known = {*store.people(), *([ADMIN] if store.has_admin() else [])}
    wanted = dict.fromkeys([ADMIN, *people, *renew])
    links = {
        name: f"/join/{store.add_person(name, is_admin=name == ADMIN, days=days)}"
        for name in wanted
        if name not in known or name in renew
    }
    store.share(asked, sharing)
    _record(folder, store, sharing)
    return links


def _record(folder: Path, store: Store, sharing: Sharing) -> None:
    """The step's manifest: what is ranked, and how it is shared. The rankings are the database's, which grows."""
    inputs = [path for path in (folder / "instances.jsonl", folder / "controls.jsonl") if path.is_file()]
    people = store.people()
    step = DatasetStep(
        folder, "annotate", inputs=inputs, options={**asdict(sharing), "people": people}, seed=sharing.seed
    )
    step.finish(outputs=[], counts={name: store.progress(name)["total"] for name in people})


def serve(
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | None = None,
    host: str = "127.0.0.1",
    port: int = 8765,
    days: float = 30,
    renew: Sequence[str] = (),
    announce: Callable[[str], None] = print,
) -> None:
    """Serves the page until SIGINT or SIGTERM. Raises ValueError where another server has the database."""
    import uvicorn

    from pacorl.annotate.server import make_app

    database, url = folder / "annotations.db", f"http://{host}:{port}"
    with only_server(database, url=url), Store(database) as store:
        links = open_desk(store, folder, people, sharing=sharing, days=days, renew=renew)
        for name, link in links.items():
            announce(f"{name}\t{url}{link}")
        announce(f"serving {folder} at {url}")
        uvicorn.run(make_app(folder, store), host=host, port=port, log_level="warning", access_log=False)


def collect(folder: Path) -> int:
    """annotations.db → rankings.jsonl; returns the number of rankings. Safe while the page is being used."""
    database = folder / "annotations.db"
    if not database.is_file():
        raise ValueError(f"{database} is missing; run `pacorl dataset annotate` first")
    return len(rankings(folder))


def rankings(folder: Path, *, dry_run: bool = False) -> list[Answer]:
    """What people ranked: brought from the page's database, where there is one, into rankings.jsonl.

    A dry run reads either and writes neither.
    """
    database, path = folder / "annotations.db", folder / "rankings.jsonl"
    if not database.is_file():
        return read_answers(path) if path.is_file() else []
    with Store(database, read_only=dry_run) as store:
        answers = store.answers()
    if not dry_run:
        write_answers(path, answers)
    return answers
