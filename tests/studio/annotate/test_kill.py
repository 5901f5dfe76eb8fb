"""Eight people rank at once while the server is killed and started again: what was acknowledged is there, once."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from annotators import Client
from dataset_folder import AnnotationServer, free_port

from pacorl.dataset.folder import Instance, collect_answers, read_answers, read_instances, write_records
from pacorl.io.files import write_atomic
from pacorl.studio.annotate.store import Store, public_key, shown_order

PEOPLE = [f"person{number}" for number in range(8)]
PICTURES = 12
OPTIONS = ["--annotators", ",".join(PEOPLE), "--overlap", "1", "--judges", "8", "--controls", "0"]


def many_instances(folder, count):
    """Questions over a few images: the database is what is tested."""
    names = [f"images/g/{number}.png" for number in range(PICTURES)]
    for name in names:
        write_atomic(folder / name, b"\x89PNG")
    orders = [tuple(names[(number + step) % PICTURES] for step in range(1, 5)) for number in range(count)]
    write_records(folder / "instances.jsonl", [Instance(f"i{n}", "g", names[0], orders[n]) for n in range(count)])


def slots_of(instance, name):
    """A ranking that everyone can recompute from the question's and the person's names."""
    number = sum(map(ord, instance + name)) % 4
    return [(number + step) % 4 for step in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "kills"),
    [
        pytest.param(30, 1, id="short"),
        pytest.param(100, 2, id="800 rankings", marks=pytest.mark.nightly),
        pytest.param(5000, 30, id="5000 rankings each", marks=pytest.mark.nightly),
    ],
)
def test_every_acknowledged_ranking_is_exported_exactly_once(tmp_path, count, kills, measured):
    many_instances(tmp_path, count)
    port, acknowledged = free_port(), Counter()
    server = AnnotationServer(tmp_path, *OPTIONS, port=port)
    tokens = {name: link.rpartition("#")[2] for name, link in server.__enter__().items()}

    def work(name):
        client = Client(f"http://127.0.0.1:{port}", tokens[name])
        client.work(
            lambda _, task: slots_of(task["instance"], name),
            acknowledged=lambda instance, order: acknowledged.update([(name, instance)]),
        )

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in PEOPLE]
    for thread in threads:
        thread.start()
    total = count * len(PEOPLE)
    for kill in range(1, kills + 1):
        while acknowledged.total() < total * kill // (kills + 1):
            time.sleep(0.02)
        server.kill()
        assert not server.__enter__()  # known people keep their links
    for thread in threads:
        thread.join()
    server.__exit__()

    assert len(collect_answers(tmp_path)) == total
    exported = Counter((one.annotator, public_key(one.instance)) for one in read_answers(tmp_path / "rankings.jsonl"))
    assert exported == acknowledged
    assert set(exported.values()) == {1}
    known = {one.id: one for one in read_instances(tmp_path / "instances.jsonl")}
    for answer in read_answers(tmp_path / "rankings.jsonl"):
        shown = shown_order(answer.annotator, known[answer.instance])
        slots = slots_of(public_key(answer.instance), answer.annotator)
        assert answer.candidates == tuple(known[answer.instance].candidates[shown[slot]] for slot in slots)
    with Store(tmp_path / "annotations.db") as store:
        assert all(store.progress(name)["ranked"] == count for name in PEOPLE)
    measured(f"{total:,} rankings by {len(PEOPLE)} people, {kills} kills of the server: none lost, none twice")
