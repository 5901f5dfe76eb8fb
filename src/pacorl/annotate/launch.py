"""The step `pacorl dataset annotate`: opens the database, shares the work out, serves until it is stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from pacorl.annotate.assign import Sharing, foreign_controls, share_out
from pacorl.annotate.store import Store, only_server
from pacorl.dataset.answers import DATABASE
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.records import Instance, read_instances

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
    announce: Callable[[str], None] = print,
) -> None:
    """Serves the page until SIGINT or SIGTERM; the links are announced when it can be reached.

    Args:
        people, sharing, days, renew: see `prepare`.

    Raises:
        ValueError: if another server has the database.
        OSError: if the port is taken.
    """
    from pacorl.annotate.server import make_app
    from pacorl.web.site import listening, run

    database = folder / DATABASE
    with only_server(database, url=f"http://{host}:{port}"), Store(database) as store:
        links = prepare(store, folder, people, sharing=sharing, days=days, renew=renew)
        with listening(host, port) as (listener, url):
            for name, link in links.items():
                announce(f"{name}\t{url}{link}")
            announce(f"serving {folder} at {url}")
            run(make_app(folder, store), listener)


def prepare(
    store: Store,
    folder: Path,
    people: Sequence[str],
    *,
    sharing: Sharing | None = None,
    days: float = 30,
    renew: Sequence[str] = (),
) -> dict[str, str]:
    """Adds new people and an administrator, renews links, and shares the work out.

    Args:
        sharing: None for what the database remembers (the defaults, for a new one).
        days: how long a new link is good for.
        renew: names that get a new link.

    Returns:
        Name → path of a join link, for the links made now: only their hashes are stored.

    Raises:
        ValueError: if an annotator has the administrator's name, nobody is there, or an image is missing.
    """
    sharing = sharing or Sharing(**(store.remembered("sharing") or {}))
    instances = instances_to_rank(folder, controls=sharing.controls, seed=sharing.seed)
    _check_names(people)
    if not people and not store.people():
        raise ValueError("nobody is there to rank; name people, e.g. --annotators ann,ben")
    store.remember("sharing", asdict(sharing))
    # Links come after every check: a start that fails must not hand out some, or end old ones.
    present = {*store.people(), *([ADMIN] if store.has_admin() else [])}
    links = {
        name: f"/join/{store.add_person(name, is_admin=name == ADMIN, days=days)}"
        for name in dict.fromkeys([ADMIN, *people, *renew])
        if name not in present or name in renew
    }
    store.share(instances, sharing)
    _record(folder, store, sharing)
    return links


def plan(folder: Path, people: Sequence[str], *, sharing: Sharing | None = None) -> dict[str, int]:
    """How many questions each person would have, answered ones included: what `--dry-run` prints.

    People and sharing that the database remembers count as in `prepare`; nothing is written.
    """
    _check_names(people)
    database = folder / DATABASE
    present: list[str] = []
    answered: dict[str, set[str]] = {}
    if database.is_file():
        with Store(database, read_only=True) as store:
            sharing = sharing or Sharing(**(store.remembered("sharing") or {}))
            present, answered = store.people(), store.answered()
    sharing = sharing or Sharing()
    instances = instances_to_rank(folder, controls=sharing.controls, seed=sharing.seed)
    shares = share_out(instances, sorted({*present, *people}), sharing, answered=answered)
    return {name: len(assigned) for name, assigned in shares.items()}


def instances_to_rank(folder: Path, *, controls: int, seed: int) -> list[Instance]:
    """The folder's instances and control questions: its controls.jsonl, or `controls` that are made from the data.

    Raises:
        ValueError: for images that are missing, and control questions without a known order or under an instance's id.
    """
    from pacorl.annotate.server import missing_images

    instances = read_instances(folder / "instances.jsonl")
    path = folder / "controls.jsonl"
    added = read_instances(path) if path.is_file() else foreign_controls(instances, controls, seed=seed)
    ids = {instance.id for instance in instances}
    for control in added:
        if control.id in ids:
            raise ValueError(f"{path}: id {control.id!r} is already taken by an instance; ids must be unique")
        if not control.is_control:
            raise ValueError(f"{path}: {control.id!r} says no known order; give one under `must`, e.g. [[0, 1]]")
    instances += added
    missing = missing_images(folder, instances)
    if missing:
        raise ValueError(f"{len(missing)} images are missing, {missing[0]} first; run `pacorl dataset pair` again")
    return instances


def _check_names(people: Sequence[str]) -> None:
    if ADMIN in people:
        raise ValueError(f"{ADMIN!r} is the administrator, who has a link anyway; give the annotator another name")


def _record(folder: Path, store: Store, sharing: Sharing) -> None:
    """The step's manifest: what is ranked, and how it is shared. The rankings are the database's, which grows."""
    inputs = [path for path in (folder / "instances.jsonl", folder / "controls.jsonl") if path.is_file()]
    people = store.people()
    step = DatasetStep(
        folder, "annotate", inputs=inputs, options={**asdict(sharing), "people": people}, seed=sharing.seed
    )
    step.finish(outputs=[], counts={name: store.progress(name)["total"] for name in people})
