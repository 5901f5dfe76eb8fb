"""People rank at once while the server is killed and started again: what was acknowledged is there, once."""

from __future__ import annotations

import random
import secrets
import threading
import time
from collections import Counter

import httpx2
import pytest
from dataset_folder import AnnotationServer
from ports import free_port

from pacorl.annotate.server import public_key, shown_order
from pacorl.dataset.answer_log import AnswerLog, collect_answers
from pacorl.dataset.folder import Instance, write_records
from pacorl.io.documents import parse_json
from pacorl.io.files import write_atomic

PICTURES = 12
GIVE_UP_SECONDS = 60.0
"""Length of an outage after which a person gives up."""


def many_instances(folder, count):
    """Questions over a few images: the log is what is tested."""
    names = [f"images/g/{number}.png" for number in range(PICTURES)]
    for name in names:
        write_atomic(folder / name, b"\x89PNG")
    orders = [tuple(names[(number + step) % PICTURES] for step in range(1, 5)) for number in range(count)]
    write_records(folder / "instances.jsonl", [Instance(f"i{n}", "g", names[0], orders[n]) for n in range(count)])


def slots_of(instance, name):
    """A ranking that everyone can recompute from the question's and the person's names."""
    number = sum(map(ord, instance + name)) % 4
    return [(number + step) % 4 for step in range(4)]


def ask(client, path, body=None):
    """Ask the page's API, again until the server has answered: then a change is on its disk."""
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            answer = client.request("POST" if body else "GET", path, json=body)
            if answer.status_code < 500:
                assert answer.status_code < 400, answer.text
                return parse_json(answer.text)
        except httpx2.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("people", "count", "kills"),
    [pytest.param(4, 40, 2, id="short"), pytest.param(30, 134, 20, id="30 people", marks=pytest.mark.nightly)],
)
def test_every_acknowledged_ranking_is_exported_exactly_once(tmp_path, people, count, kills):
    many_instances(tmp_path, count)
    names = [f"person{number}" for number in range(people)]
    options = ["--annotators", ",".join(names), "--people", str(people), "--no-controls"]
    port, acknowledged = free_port(), Counter()
    server = AnnotationServer(tmp_path, *options, port=port)
    links = server.__enter__()
    chance = random.Random(count)

    def work(name):
        headers = {"Cookie": f"pacorl_annotator_{port}={links[name].rpartition('#')[2]}"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=30) as client:
            state = ask(client, "/api/task")
            while state["task"]:
                instance = state["task"]["instance"]
                # One id per change and not per try: the server counts an id once.
                body = {"instance": instance, "order": slots_of(instance, name), "request": secrets.token_hex(16)}
                state = ask(client, "/api/rankings", body)
                acknowledged[name, instance] += 1

    threads = [threading.Thread(target=work, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    total = count * people
    for kill in range(1, kills + 1):
        while acknowledged.total() < total * kill // (kills + 1):
            time.sleep(0.02)
        time.sleep(chance.random() / 10)
        server.kill()
        assert server.__enter__() == links  # the links are the same
    for thread in threads:
        thread.join()
    server.__exit__()

    answers = collect_answers(tmp_path)
    assert Counter((one.annotator, public_key(one.instance)) for one in answers) == acknowledged
    assert set(acknowledged.values()) == {1}
    assert len(answers) == total
    known = AnswerLog(tmp_path).instances
    for answer in answers:
        shown = shown_order(answer.annotator, known[answer.instance])
        slots = slots_of(public_key(answer.instance), answer.annotator)
        assert answer.candidates == tuple(known[answer.instance].candidates[shown[slot]] for slot in slots)
