"""The store, the sharing-out and the HTTP API, the latter through a real server in this process."""

from __future__ import annotations

import http.client
import json
import math
import os
import re
import shutil
import socket
import sqlite3
import threading
from collections import Counter
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from annotators import Client, simulate
from app_server import serving_app
from typer.testing import CliRunner

from pacorl.cli.dataset import app
from pacorl.dataset.export import export
from pacorl.dataset.folder import (
    ADJUDICATOR,
    ADMINISTRATOR,
    Instance,
    collect_answers,
    read_answers,
    read_instances,
    read_pairs,
)
from pacorl.dataset.rules import label_pairs, mean_rankings
from pacorl.io.documents import read_jsonl, write_jsonl
from pacorl.records.rankings import Ranking
from pacorl.studio.annotate import routes
from pacorl.studio.annotate.links import Sharing, agreement, foreign_controls, kendall_w, krippendorff_alpha, share_out
from pacorl.studio.annotate.routes import make_app, plan, prepare, serve
from pacorl.studio.annotate.store import Person, Store, only_server, public_key, shown_order
from pacorl.studio.annotate.uncertainty import LiveScores, disagrees, fit_scores, log_probability
from pacorl.web.guard import RefusedError

NO_OVERLAP = Sharing(overlap=0, controls=0, control_every=0)


def instances(count: int, *, candidates: int = 4) -> list[Instance]:
    folders = [f"images/g{n % 5}" for n in range(count)]
    return [
        Instance(f"i{n}", f"g{n % 5}", f"{at}/{n}.png", tuple(f"{at}/{n}_{c}.png" for c in range(candidates)))
        for n, at in enumerate(folders)
    ]


# --- agreement -------------------------------------------------------------------------------------------------


def test_kendall_w_by_hand():
    assert kendall_w([[1, 2, 3], [1, 2, 3]]) == 1
    assert kendall_w([[1, 2], [2, 1]]) == 0
    # Sums 6, 7, 9, 8 around 7.5: S = 5; 12·5 / (9·60)
    assert kendall_w([[1, 2, 3, 4], [1, 2, 4, 3], [4, 3, 2, 1]]) == pytest.approx(12 * 5 / 540)


def test_kendall_w_of_ties_by_hand():
    """Ranks 1, 2.5, 2.5 and 1, 2, 3: S = 6.5, T = 2³ − 2 = 6, W = 12·6.5 / (4·24 − 2·6)."""
    sums = np.array([2, 4.5, 5.5])
    assert ((sums - 4) ** 2).sum() == 6.5
    assert kendall_w([[1, 2.5, 2.5], [1, 2, 3]]) == pytest.approx(12 * 6.5 / (4 * 24 - 2 * 6))
    assert kendall_w([[1, 2.5, 2.5], [1, 2.5, 2.5]]) == pytest.approx(1)
    assert kendall_w([[2, 2, 2], [2, 2, 2]]) is None


def test_krippendorff_published_example():
    """Krippendorff (2011), example C: four observers, twelve units, missing values; ordinal α = .815."""
    table = [
        "1 2 3 3 2 1 4 1 2 . . .",
        "1 2 3 3 2 2 4 1 2 5 . 3",
        ". 3 3 3 2 3 4 2 2 5 1 .",
        "1 2 3 3 2 4 4 1 2 5 1 .",
    ]
    units = [
        [int(value) for value in column if value != "."] for column in zip(*(row.split() for row in table), strict=True)
    ]
    assert krippendorff_alpha(units) == pytest.approx(0.815, abs=5e-4)


def test_krippendorff_says_nothing_of_nothing():
    assert krippendorff_alpha([[1], [2]]) is None
    assert krippendorff_alpha([[1, 1], [1, 1]]) is None


def test_agreement_of_everyone_on_everything_and_of_chance():
    def answers(order_of):
        return [Ranking(f"i{n}", who, "g", "r", order_of(n, who)) for n in range(24) for who in "ab"]

    perfect = agreement(answers(lambda n, who: tuple("abcd")))
    assert perfect == {"instances": 24, "kendall_w": 1.0, "kendall_chance": 0.5, "krippendorff_alpha": 1.0}
    orders = list(permutations("abcd"))
    chance = agreement(answers(lambda n, who: orders[n] if who == "b" else orders[0]))
    assert chance["krippendorff_alpha"] == pytest.approx(0, abs=0.05)
    assert chance["kendall_w"] == pytest.approx(chance["kendall_chance"], abs=0.01)
    assert agreement([])["kendall_w"] is None


# --- sharing out -----------------------------------------------------------------------------------------------


def test_sharing_meets_the_overlap_and_is_fair():
    shares = share_out(instances(200), ["a", "b", "c", "d"], Sharing(overlap=0.25, judges=3, control_every=0))
    times = Counter(instance for own in shares.values() for instance in own)
    assert Counter(times.values()) == {1: 150, 3: 50}
    assert max(map(len, shares.values())) - min(map(len, shares.values())) <= 1
    assert all(len(set(own)) == len(own) for own in shares.values())


def test_one_person_alone_gets_everything_once():
    assert len(share_out(instances(20), ["a"], Sharing(overlap=1.0, judges=3))["a"]) == 20


def test_what_was_answered_is_not_dealt_to_another():
    answered = {f"i{n}": {"a"} for n in range(10)}
    shares = share_out(instances(30), ["a", "b"], NO_OVERLAP, answered=answered)
    assert set(answered) <= set(shares["a"])
    assert Counter(x for own in shares.values() for x in own).total() == 30


def test_answered_controls_count_towards_one_in_n():
    data = instances(100)
    controls = foreign_controls(data, 40)
    sharing = Sharing(overlap=0, control_every=10)
    first = share_out([*data, *controls], ["a"], sharing)["a"]
    assert sum(name.startswith("control") for name in first) == 10
    numbers = set()
    for done in range(110):
        answered = {name: {"a"} for name in first[:done]}
        # Those of another seed count as well.
        for own in (controls, foreign_controls(data, 40, seed=1)):
            again = share_out([*data, *own], ["a"], sharing, answered=answered)["a"]
            assert set(first[:done]) <= set(again)
            assert len(again) == len(set(again))
            numbers.add(sum(name.startswith("control") for name in again))
    assert numbers == {10}


def test_controls_are_spread_out_and_do_not_show():
    data = instances(100)
    controls = foreign_controls(data, 5)
    shares = share_out([*data, *controls], ["a"], Sharing(overlap=0, control_every=20))
    places = [place for place, name in enumerate(shares["a"]) if name.startswith("control")]
    assert len(places) == 5
    assert all(place // 21 == number for number, place in enumerate(places))
    for one in controls:
        foreign = [name for name in one.candidates if f"/{one.group}/" not in name]
        worse = {one.candidates[pair[1]] for pair in one.must}
        assert set(foreign) == worse
        assert len(one.must) == 3


def test_a_control_of_prompts_that_share_images_shows_none_of_its_own():
    shared = tuple(f"shared/{number}.png" for number in range(4))
    data = [Instance(f"i{n}", f"prompt {n % 2}", f"reference/{n % 2}.png", shared) for n in range(40)]
    data.append(Instance("own", "prompt 1", "reference/1.png", ("shared/0.png", "own/1.png")))
    own = {"prompt 0": {*shared, "reference/0.png"}, "prompt 1": {*shared, "reference/1.png", "own/1.png"}}
    controls = foreign_controls(data, 40)
    assert len(controls) == 40
    for control in controls:
        ((foreign,),) = [{control.candidates[worse] for _, worse in control.must}]
        assert foreign not in own[control.group]
        assert len(set(control.candidates)) == len(control.candidates)


def test_without_a_foreign_image_there_is_no_control():
    shared = ("a.png", "b.png", "c.png")
    data = [Instance(f"i{n}", f"prompt {n}", "reference.png", shared) for n in range(4)]
    with pytest.raises(ValueError, match="an image of a single prompt; set their number to 0"):
        foreign_controls(data, 2)
    assert foreign_controls(data, 0) == []


def test_the_controls_of_prompts_that_share_nothing_stay_what_they_were():
    """Their ids are in databases of people who have ranked already."""
    ids = [control.id for control in foreign_controls(instances(100), 3, seed=7)]
    assert ids == ["control:295165b4f2ba2acb", "control:83fbbe1573f63ccb", "control:5eaa1de2c95c568e"]


@pytest.mark.parametrize(
    "options", [{"overlap": 1.5}, {"judges": 1}, {"control_every": -1}, {"question": "question" * 100}]
)
def test_impossible_sharing(options):
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        Sharing(**options)


# --- the store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path / "annotations.db") as opened:
        opened.add_person("ann")
        opened.share(instances(6), NO_OVERLAP)
        yield opened


ANN = Person("ann", is_admin=False, expires=0)


def key(store, person="ann"):
    return public_key(store.next_tasks(person)[0].instance.id)


def test_a_ranking_is_stored_as_it_was_shown(store):
    task = store.next_tasks("ann")[0]
    store.rank(ANN, public_key(task.instance.id), [2, 0, 3, 1], request="request-1")
    answer = store.answers()[0]
    assert answer.candidates == tuple(task.instance.candidates[task.slots[slot]] for slot in (2, 0, 3, 1))
    assert store.progress("ann") == {"total": 6, "ranked": 1, "skipped": 0}


def test_a_tie_is_stored_undone_and_counted_as_one_rank(store):
    task = store.next_tasks("ann")[0]
    store.rank(ANN, public_key(task.instance.id), [2, [0, 3], 1], request="request-1")
    (answer,) = store.answers()
    shown = [task.instance.candidates[slot] for slot in task.slots]
    assert answer.tiers == ((shown[2],), (shown[0], shown[3]), (shown[1],))
    assert answer.ranks == (1, 2, 2, 4)
    assert store.audit()[0]["order"] == [shown[2], [shown[0], shown[3]], shown[1]]
    store.undo(ANN, request="request-2")
    assert store.next_tasks("ann")[0].previous == (2, (0, 3), 1)


def test_candidates_that_are_all_tied_agree_and_label_nothing(store):
    store.rank(ANN, key(store), [[0, 1, 2, 3]], request="request-1")
    (answer,) = store.answers()
    pairs, counts = label_pairs([answer])
    assert (pairs, counts["votes"]) == ([], 0)
    both = [answer, replace(answer, annotator="ben")]
    assert agreement(both) == {
        "instances": 1, "kendall_w": None, "kendall_chance": None, "krippendorff_alpha": None
    }  # fmt: skip
    assert not disagrees(both)


def test_three_that_are_equal_and_a_bad_one(store):
    store.rank(ANN, key(store), [[3, 1, 0], 2], request="request-1")
    _, counts = label_pairs(store.answers())
    assert (counts["yes"], counts["no"], counts["tied"]) == (3, 1, 0)


def test_a_foreign_image_tied_with_the_others_fails_its_control(tmp_path):
    control = replace(instances(1)[0], id="c", must=((0, 3), (1, 3), (2, 3)))
    with Store(tmp_path / "annotations.db") as store:
        for name in ("ann", "ben"):
            store.add_person(name)
        store.share([*instances(2), control], replace(NO_OVERLAP, control_every=1))
        for name, last in (("ann", False), ("ben", True)):
            slots = shown_order(name, control)
            foreign = slots.index(3)
            own = [slot for slot in range(4) if slot != foreign]
            order = [own, foreign] if last else [own[:2], [own[2], foreign]]
            person = Person(name, is_admin=False, expires=0)
            store.rank(person, public_key("c"), order, request=f"request-{name}")
        assert store.controls_passed() == {"ann": (0, 1), "ben": (1, 1)}


def test_sent_again_it_is_counted_once(store):
    first = key(store)
    for _ in range(3):
        store.rank(ANN, first, [0, 1, 2, 3], request="request-1")
    assert len(store.answers()) == 1
    with pytest.raises(RefusedError, match="answered already"):
        store.rank(ANN, first, [0, 1, 2, 3], request="request-2")
    with pytest.raises(RefusedError, match="used for something else"):
        store.rank(ANN, key(store), [0, 1, 2, 3], request="request-1")


def test_no_ranking_reads_a_table_from_end_to_end(store):
    """At 40,000 rankings a table that is read whole takes longer than all else."""
    asked = []
    for connection in (store._db, store._reader):
        connection.set_trace_callback(asked.append)
    store.rank(ANN, key(store), [0, 1, 2, 3], request="request-1")
    store.undo(ANN, request="request-2")
    store.next_tasks("ann", limit=2)
    store.progress("ann")
    selects = [text for text in asked if "SELECT" in text]
    assert len(selects) > 8
    plans = {text: [row[3] for row in store._reader.execute(f"EXPLAIN QUERY PLAN {text}")] for text in selects}
    assert [text for text, plan in plans.items() if any(step.startswith("SCAN") for step in plan)] == []
    (following,) = {tuple(plan) for text, plan in plans.items() if "a.is_open" in text}
    assert "open_assignments" in following[0]


def test_undo_shows_the_last_again_as_it_was(store):
    order = [store.next_tasks("ann", limit=9)[n].instance.id for n in range(6)]
    store.rank(ANN, key(store), [1, 0, 2, 3], request="request-1")
    store.rank(ANN, key(store), [3, 2, 1, 0], request="request-2")
    store.undo(ANN, request="request-3")
    store.undo(ANN, request="request-3")  # sent again
    task = store.next_tasks("ann")[0]
    assert (task.instance.id, task.previous) == (order[1], (3, 2, 1, 0))
    store.undo(ANN, request="request-4")
    task = store.next_tasks("ann")[0]
    assert (task.instance.id, task.previous) == (order[0], (1, 0, 2, 3))
    assert [one.instance.id for one in store.next_tasks("ann", limit=9)] == order
    with pytest.raises(RefusedError, match="nothing to undo"):
        store.undo(ANN, request="request-5")


@pytest.mark.parametrize("slots", [[0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [0, [1, 1], 2], [0, [], [1, 2, 3]], []])
def test_what_is_no_ranking_is_refused(store, slots):
    with pytest.raises(RefusedError, match="each of the 4 candidates once"):
        store.rank(ANN, key(store), slots, request="request-1")
    assert store.progress("ann")["ranked"] == 0


def test_skips_need_a_reason_and_are_not_rankings(store):
    with pytest.raises(RefusedError, match="say why"):
        store.skip(ANN, key(store), "  ", request="request-1")
    store.skip(ANN, key(store), "all alike", request="request-1")
    assert store.answers() == []
    assert [one["reason"] for one in store.skips()] == ["all alike"]


def test_nobody_answers_for_another(store):
    store.add_person("ben")
    with pytest.raises(RefusedError, match="for ben"):
        store.rank(Person("ben", is_admin=False, expires=0), key(store), [0, 1, 2, 3], request="request-1")


def test_sharing_again_changes_nothing_and_a_newcomer_gets_what_is_left(store):
    before = [one.instance.id for one in store.next_tasks("ann", limit=9)]
    store.share(instances(6), NO_OVERLAP)
    assert [one.instance.id for one in store.next_tasks("ann", limit=9)] == before
    for number in range(2):
        store.rank(ANN, key(store), [0, 1, 2, 3], request=f"request-{number}")
    store.add_person("ben")
    store.share(instances(6), NO_OVERLAP)
    left = {name: {one.instance.id for one in store.next_tasks(name, limit=9)} for name in ("ann", "ben")}
    assert left["ann"] | left["ben"] == set(before[2:])
    assert not left["ann"] & left["ben"]
    assert store.progress("ann")["ranked"] == 2


def test_an_undone_ranking_stays_the_next_when_work_is_shared_again(store):
    order = [one.instance.id for one in store.next_tasks("ann", limit=9)]
    for number in range(4):
        store.rank(ANN, key(store), [1, 0, 2, 3], request=f"request-{number}")
    for number in range(2):
        store.undo(ANN, request=f"request-undo-{number}")
    for _ in range(2):  # two restarts
        store.share(instances(6), NO_OVERLAP)
        assert [one.instance.id for one in store.next_tasks("ann", limit=9)] == order[2:]
    assert store.next_tasks("ann")[0].previous == (1, 0, 2, 3)


def test_the_same_id_with_other_images_is_refused(store):
    with pytest.raises(ValueError, match=r"i0 is in .* with other images"):
        store.share(instances(6, candidates=3), NO_OVERLAP)


def at_once(store, changes):
    """Make several changes in threads of their own, which begin together."""
    threads = [threading.Thread(target=change) for change in changes]
    with store._writing:
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join()


def test_rankings_that_come_at_once_are_all_stored(store):
    outcomes = []
    keys = [public_key(task.instance.id) for task in store.next_tasks("ann", limit=6)]

    def rank(number):
        try:
            store.rank(ANN, keys[number], [0, 1, 2, 3], request=f"request-{min(number, 4)}")
        except RefusedError as refusal:
            outcomes.append(str(refusal))
        else:
            outcomes.append("stored")

    at_once(store, [partial(rank, number) for number in range(6)])
    # The last two have one request id, and the second of them to come is refused without harm to the others.
    assert Counter(outcomes) == {"stored": 5, "this request id was used for something else": 1}
    assert store.progress("ann")["ranked"] == 5


def test_readers_see_nothing_that_is_not_on_the_disk(store):
    with store._transaction() as db:
        db.execute("DELETE FROM assignments")
        assert store.progress("ann")["total"] == 6
    assert store.progress("ann")["total"] == 0


def test_a_change_that_fails_takes_back_its_own_part_alone(store):
    def fail():
        with suppress(KeyError), store._transaction() as db:
            db.execute("DELETE FROM meta")
            raise KeyError

    at_once(store, [fail, partial(store.rank, ANN, key(store), [0, 1, 2, 3], request="request-1")])
    assert len(store.answered()) == 1
    assert store.sharing() == NO_OVERLAP


def test_on_a_full_disk_nothing_is_acknowledged_and_with_room_all_goes_on(store):
    (pages,) = store._all("PRAGMA page_count")[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    keys, faults = [public_key(task.instance.id) for task in store.next_tasks("ann", limit=2)], []

    def rank(name, request):
        try:
            store.rank(ANN, name, [0, 1, 2, 3], request=request * 30)
        except RefusedError as error:
            faults.append(error.status)

    def fill():
        with store._transaction() as db:
            db.execute("INSERT INTO meta VALUES ('much', ?)", ("x" * 10**6,))

    def refused():
        with pytest.raises(RefusedError, match=r"^annotations\.db cannot be written \(database or disk is full\)"):
            fill()

    at_once(store, [partial(rank, keys[0], "a"), partial(rank, keys[1], "b"), refused])
    assert len(faults) + len(store.answered()) == 2
    assert set(faults) <= {507}  # a page keeps what is refused by such a status, and sends it again
    store._db.execute("PRAGMA max_page_count = 1000000")
    for name, request in zip(keys, "ab", strict=True):  # the clients send them again
        rank(name, request)
    assert len(store.answered()) == 2
    fill()


@pytest.mark.parametrize("question", ["criteria", "theme"])
def test_criteria_go_from_the_question_into_the_rankings_and_the_export(dataset, question):
    folder = dataset(prompts=2, grids=2)
    shown = {one.id: one for one in read_instances(folder / "instances.jsonl")}
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann"], sharing=Sharing(controls=0))
        while tasks := store.next_tasks("ann"):
            answer_as(store, "ann", tasks[0].instance.id, [0, 1])
    export(folder, question=question, shares={"train": 1.0})

    ranked = read_answers(folder / "rankings.jsonl")
    assert len(ranked) == len(shown)
    assert all(one.criteria == shown[one.instance].criteria != {} for one in ranked)
    text = next(iter(next(iter(ranked[0].criteria.values())).values()))
    asked = {pair.question for pair in read_pairs(folder / "pairs.jsonl")}
    assert all((text in wording) == (question == "criteria") for wording in asked)


def test_control_questions_are_scored_and_stay_out_of_the_export(tmp_path):
    data = instances(8)
    with Store(tmp_path / "a.db") as store:
        store.add_person("ann")
        store.share([*data, *foreign_controls(data, 2)], Sharing(overlap=0, control_every=4))
        right = True
        for number in range(10):
            task = store.next_tasks("ann")[0]
            worst = {task.slots.index(worse) for _, worse in task.instance.must}
            order = sorted(range(4), key=lambda slot: (slot in worst) == right)
            if worst:
                right = False
            store.rank(ANN, public_key(task.instance.id), order, request=f"request-{number}")
        assert store.controls_passed() == {"ann": (1, 2)}
        references = [reference for who, reference, passed in store.controls() if who == "ann" and not passed]
        assert len(references) == 1
        assert references[0] in {one.reference for one in data}
        assert len(store.answers()) == 8
        assert len(store.answers(controls=True)) == 2


def test_candidates_are_shown_in_each_persons_own_order():
    from pacorl.studio.annotate.store import shown_order

    orders = Counter(shown_order(f"p{n}", instances(1)[0]) for n in range(480))
    assert len(orders) == 24
    assert min(orders.values()) > 5


def test_tokens_expire_and_are_renewed(tmp_path):
    with Store(tmp_path / "a.db") as store:
        old = store.add_person("ann", days=-1)
        with pytest.raises(RefusedError, match="has expired") as refused:
            store.person_of(old)
        assert refused.value.status == 401
        new = store.add_person("ann")
        assert store.person_of(new).name == "ann"
        with pytest.raises(RefusedError, match="not known"):
            store.person_of(old)
    assert new.encode() not in (tmp_path / "a.db").read_bytes()


def test_a_second_server_is_refused_and_the_lock_ends_with_its_process(tmp_path):
    database = tmp_path / "a.db"
    refused = pytest.raises(ValueError, match=r"already served \(process \d+ at http://one\)")
    with only_server(database, url="http://one"), refused, only_server(database, url="http://two"):
        pass
    with only_server(database, url="http://three"):
        pass


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("UPDATE instances SET content = '{}'", "id: Field required"),
        ("UPDATE answers SET ranking = '[0, 0, 1, 2]'", r"a ranking of .* is \[0, 0, 1, 2\]"),
        ("UPDATE answers SET ranking = CAST(x'ff' AS TEXT)", "Could not decode to UTF-8"),
        ("UPDATE events SET content = '7', kind = 'undo'", "not iterable"),
        ("", "Page 3"),
    ],
)
def test_a_damaged_database_is_named_before_anybody_ranks(dataset, change, fault):
    folder = dataset(prompts=2, grids=2)
    path = folder / "annotations.db"
    with Store(path) as store:
        token = prepare(store, folder, ["ann"], sharing=NO_OVERLAP)["ann"].rpartition("#")[2]
        first = store.next_tasks("ann")[0]
        store.rank(store.person_of(token), public_key(first.instance.id), first.slots, request="request-1")
    if change:
        with closing(sqlite3.connect(path)) as db, db:
            db.execute(change)
    else:  # a page that is not what it was
        content = path.read_bytes()
        path.write_bytes(content[:8192] + bytes(4096) + content[12288:])
    for open_database in (lambda: Store(path), lambda: collect_answers(folder)):
        with pytest.raises(ValueError, match=rf"annotations\.db cannot be used as a database \(.*({fault})") as caught:
            open_database()
        assert "\n" not in str(caught.value)


def test_a_broken_database_is_named(tmp_path):
    (tmp_path / "a.db").write_bytes(b"not a database, but long enough to be one" * 100)
    with pytest.raises(ValueError, match="cannot be used as a database"):
        Store(tmp_path / "a.db")


# --- the HTTP API ----------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A real server in a thread."""

    folder: Path
    store: Store
    url: str
    tokens: dict[str, str]

    def ask(self, method, path, body=None, *, token=None, **headers):
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        if isinstance(body, dict):
            body, headers["Content-Type"] = json.dumps(body), "application/json"
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content, dict(answer.getheaders())


@contextmanager
def running_in(folder):
    sharing = Sharing(overlap=0.5, judges=2, controls=4, control_every=5, question="Which fit?")
    with Store(folder / "annotations.db") as store:
        links = prepare(store, folder, ["ann", "ben"], sharing=sharing)
        tokens = {name: link.rpartition("#")[2] for name, link in links.items()}
        with serving_app(make_app(folder, store)) as url:
            yield Running(folder, store, url, tokens)


@pytest.fixture
def running(dataset):
    with running_in(dataset(prompts=2, grids=3)) as server:
        yield server


@pytest.fixture(scope="module")
def only_read(made_datasets, tmp_path_factory):
    """One server for all tests that change nothing in it."""
    folder = tmp_path_factory.mktemp("read") / "dataset"
    shutil.copytree(made_datasets(2, 3, paired=True), folder)
    with running_in(folder) as server:
        yield server


@pytest.mark.slow
def test_people_rank_to_the_end_and_the_export_has_it_all(running):
    done = simulate(running.url, {name: running.tokens[name] for name in ("ann", "ben")}, noise=0.3)
    total = len(read_instances(running.folder / "instances.jsonl"))
    controls = sum(answered for _, answered in running.store.controls_passed().values())
    assert sum(done.values()) == total + round(0.5 * total) + controls
    assert len(collect_answers(running.folder)) == total + round(0.5 * total)
    answers = read_answers(running.folder / "rankings.jsonl")
    assert {answer.instance for answer in answers} == {
        one.id for one in read_instances(running.folder / "instances.jsonl")
    }
    status, content, _ = running.ask("GET", "/api/admin", token=running.tokens["admin"])
    seen = json.loads(content)
    assert status == 200
    assert seen["agreement"]["instances"] == round(0.5 * total)
    assert seen["agreement"]["krippendorff_alpha"] > 0.4
    assert all(one["ranked"] == one["total"] for one in seen["people"])
    status, content, _ = running.ask("GET", "/api/admin/rankings.jsonl", token=running.tokens["admin"])
    assert content.decode() == (running.folder / "rankings.jsonl").read_text()


def test_a_second_start_says_that_links_are_unchanged(dataset, monkeypatch):
    folder = dataset(prompts=2, grids=2)
    monkeypatch.setattr(routes, "run", lambda app, sockets: None)
    said = []
    for _ in range(2):
        serve(folder, ["ann"], sharing=NO_OVERLAP, port=0, announce=said.append)
    assert [line.partition(chr(9))[0] for line in said if chr(9) in line] == ["admin", "ann"]
    own = "question: Which of these belong to the same set as the reference?"
    assert [line for line in said if line.startswith("question")] == [own, own]
    assert [line for line in said if "unchanged" in line] == ["links are unchanged; --renew NAME makes a new one"]


@pytest.mark.slow
def test_nothing_tells_control_questions_apart(running):
    client, names = Client(running.url, running.tokens["ann"]), set()
    state = client.task()
    while state["task"]:
        names.add(re.sub("[0-9a-f]", "x", state["task"]["instance"]))
        assert set(state["task"]) == {
            "instance",
            "theme",
            "category",
            "criteria",
            "reference",
            "candidates",
            "previous",
        }
        assert "control" not in json.dumps(state)
        state = client.rank(state["task"]["instance"], [0, 1, 2])
    assert names == {"x" * 20}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/api/task", 401),
        ("GET", "/images/abc/0", 401),
        ("POST", "/api/undo", 401),
        ("GET", "/api/admin", 401),
        ("POST", "/join", 401),
        ("GET", "/page/..%2fserver.py", 404),
        ("GET", "/page/../../server.py", 404),
    ],
)
def test_strangers_see_nothing(only_read, method, path, status):
    body = {"token": "wrong"} if path == "/join" else {"request": "12345678"}
    assert only_read.ask(method, path, body if method == "POST" else None)[0] == status


def test_annotators_are_no_administrators(only_read):
    status, content, _ = only_read.ask("GET", "/api/admin", token=only_read.tokens["ann"])
    assert (status, json.loads(content)["error"]) == (403, "ann is no administrator")


def test_join_trades_the_link_for_a_cookie(only_read):
    for name, path in {"admin": "/admin", "ann": "/"}.items():
        status, content, headers = only_read.ask("POST", "/join", {"token": only_read.tokens[name]})
        assert (status, json.loads(content)) == (200, {"path": path})
    assert "HttpOnly" in headers["set-cookie"]
    assert "samesite=strict" in headers["set-cookie"].lower()
    # Both cookies are set, and a dict holds one header of a name.
    cookie = f"pacorl_annotator_{only_read.url.rpartition(':')[2]}={only_read.tokens['ann']}"
    status, content, _ = only_read.ask("GET", "/api/task", Cookie=cookie)
    assert json.loads(content)["person"] == "ann"


def test_an_expired_link_says_so(running):
    old = running.store.add_person("ann", days=-1)
    status, content, _ = running.ask("GET", "/api/task", token=old)
    assert status == 401
    assert json.loads(content)["error"] == "the link of ann has expired; ask for a new one. Nothing is lost"
    status, content, _ = running.ask("POST", "/api/admin/links", {"name": "ann"}, token=running.tokens["admin"])
    path, _, renewed = json.loads(content)["link"].partition("#")
    assert running.ask("POST", path, {"token": renewed})[0] == 200


def test_an_administrator_adds_somebody_who_takes_over_what_nobody_answered(running):
    admin, total = running.tokens["admin"], running.store.progress("ann")["total"]
    status, content, _ = running.ask("POST", "/api/admin/people", {"name": " cat "}, token=admin)
    added = json.loads(content)
    assert (status, added["name"]) == (200, "cat")
    task = json.loads(running.ask("GET", "/api/task", token=added["link"].rpartition("#")[2])[1])
    assert task["person"] == "cat"
    assert running.store.progress("ann")["total"] < total
    manifest = json.loads((running.folder / "manifests/annotate.json").read_text())
    assert manifest["plan"]["options"]["people"] == ["ann", "ben", "cat"]
    # Another start of the same folder shares nothing out anew: instances came from the database in their order.
    before = {name: [one.instance for one in running.store.next_tasks(name, limit=99)] for name in ("ann", "cat")}
    prepare(running.store, running.folder, [])
    assert before == {name: [one.instance for one in running.store.next_tasks(name, limit=99)] for name in before}


def test_a_paused_person_loses_nothing_and_goes_on_by_the_same_link(running):
    admin, ann = running.tokens["admin"], running.tokens["ann"]
    assigned = running.store.assigned()["ann"]
    shown = json.loads(running.ask("GET", "/api/task", token=ann)[1])
    form = {"instance": shown["task"]["instance"], "order": [0, 1, 2], "request": "request-1"}

    def pause(paused, name="ann"):
        return running.ask("POST", "/api/admin/pauses", {"name": name, "paused": paused}, token=admin)[0]

    assert pause(True) == 200
    for answer in (
        running.ask("GET", "/api/task", token=ann),
        running.ask("POST", "/api/rankings", form, token=ann),
        running.ask("GET", shown["task"]["reference"], token=ann),
    ):
        assert (answer[0], "nothing is lost" in json.loads(answer[1])["error"]) == (423, True)
    assert running.ask("GET", "/api/task", token=running.tokens["ben"])[0] == 200
    people = json.loads(running.ask("GET", "/api/admin", token=admin)[1])["people"]
    assert {one["name"]: one["paused"] for one in people} == {"ann": True, "ben": False}
    prepare(running.store, running.folder, [])  # a restart
    assert running.store.paused() == ["ann"]
    assert running.ask("POST", "/join", {"token": ann})[0] == 200

    assert pause(False) == 200
    after = json.loads(running.ask("POST", "/api/rankings", form, token=ann)[1])
    assert after["progress"] == {"total": len(assigned), "ranked": 1, "skipped": 0}
    assert running.store.assigned()["ann"].keys() == assigned.keys()
    assert (pause(True, "nobody"), pause(True, "admin")) == (404, 404)
    assert running.ask("POST", "/api/admin/pauses", {"name": "ann", "paused": True}, token=ann)[0] == 403


def test_the_pages_get_the_question_and_who_administers(only_read):
    seen = json.loads(only_read.ask("GET", "/api/admin", token=only_read.tokens["admin"])[1])
    assert (seen["question"], seen["pairs"]) == ("Which fit?", None)
    for name, administers in (("ann", False), ("admin", True)):
        state = json.loads(only_read.ask("GET", "/api/task", token=only_read.tokens[name])[1])
        assert (state["administers"], state["custom"], state["question"]) == (administers, True, "Which fit?")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [("ann", 409, "'ann' is there already"), ("admin", 409, "is there already"), ("\n", 400, "is not a name")],
)
def test_names_that_nobody_can_be_added_by(only_read, name, status, message):
    answer = only_read.ask("POST", "/api/admin/people", {"name": name}, token=only_read.tokens["admin"])
    assert (answer[0], only_read.store.people()) == (status, ["ann", "ben"])
    assert message in json.loads(answer[1])["error"]


# --- adjudication ----------------------------------------------------------------------------------------------


@pytest.fixture
def disputed(tmp_path):
    """Two people agree on i0, name different bests in i1, differ in the middle of i2; a third sides with ann on i3."""
    with Store(tmp_path / "annotations.db") as store:
        for name in ("ann", "ben", "cat"):
            store.add_person(name)
        store.add_person("eve", role=ADJUDICATOR)
        # Everybody ranks everything; 20 further instances on which ann and cat agree and ben is far off.
        store.share(instances(24), Sharing(overlap=1, judges=3, controls=0))
        given = {"i0": ("0123", "0123"), "i1": ("0123", "1023"), "i2": ("0123", "0213"), "i3": ("0123", "3210", "0123")}
        given |= {f"i{n}": ("0123", "3120", "0123") for n in range(4, 24)}
        for instance, orders in given.items():
            for name, order in zip(("ann", "ben", "cat"), orders, strict=False):
                answer_as(store, name, instance, order)
        yield store


def answer_as(store, name, instance, order, *, request="", **role):
    (question,) = (one for one in store.instances() if one.id == instance)
    slots = [shown_order(name, question).index(int(index)) for index in order]
    person = Person(name, is_admin=False, expires=0, **role)
    store.rank(person, public_key(instance), slots, request=request or f"{name}-rank-{instance}")


def test_the_queue_has_the_questions_without_a_majority(disputed):
    live = LiveScores(disputed)
    assert [one.id for one in live.open_disagreements()] == ["i1"]


def test_a_decision_wins_in_the_labels_and_the_trail_is_kept(disputed):
    answer_as(disputed, "eve", "i1", "1023", adjudicates=True)
    assert LiveScores(disputed).open_disagreements() == []
    answers = disputed.answers()
    assert sum(answer.adjudicated for answer in answers) == 1
    pairs, balance = label_pairs(answers)
    votes = {pair.images: pair.votes for pair in pairs if "images/g1/1.png" in pair.images}
    assert sorted(votes.values()) == [(0, 1), (1, 0)]
    assert {pair.consistent for pair in pairs if {"images/g1/1.png", "images/g1/1_1.png"} == set(pair.images)} == {True}
    assert (balance["rankings"], balance["annotators"], balance["adjudicated"]) == (69, 3, 1)
    (mean,) = (one for one in mean_rankings(answers)[0] if one.instance == "i1")
    assert mean.candidates[0] == "images/g1/1_1.png"
    # A decision is no second opinion, and nobody's share of the work.
    assert agreement(answers) == agreement([one for one in answers if not one.adjudicated])
    before = disputed.progress("cat")
    disputed.share(disputed.instances(), disputed.sharing())
    assert (disputed.progress("cat"), disputed.progress("eve")["total"]) == (before, 0)
    last = disputed.audit()[-1]
    order = [f"images/g1/1_{index}.png" for index in (1, 0, 2, 3)]
    assert (last["person"], last["kind"], last["instance"], last["order"]) == ("eve", "decide", "i1", order)


def test_a_decision_is_undone_and_shown_again_and_nobody_decides_twice(disputed):
    eve = Person("eve", is_admin=False, expires=0, adjudicates=True)
    answer_as(disputed, "eve", "i1", "1023", adjudicates=True)
    disputed.add_person("fay", role=ADJUDICATOR)
    with pytest.raises(RefusedError, match="another adjudicator has decided this one"):
        answer_as(disputed, "fay", "i1", "0123", adjudicates=True)
    disputed.undo(eve, request="request-undo")
    assert disputed.undone("eve") == ["i1"]
    (question,) = (one for one in disputed.instances() if one.id == "i1")
    previous = disputed.task("eve", question).previous
    assert [shown_order("eve", question)[slot] for slot in previous] == [1, 0, 2, 3]
    answer_as(disputed, "fay", "i1", "0123", adjudicates=True)
    assert [row["kind"] for row in disputed.audit()[-3:]] == ["decide", "undo", "decide"]


def test_a_decision_outvotes_the_ranking_from_the_pairs_other_side():
    """a says that b fits and c does not; b says the same of a and c; the adjudicator of a says it is the other way."""
    one = Ranking("1", "ann", "g", "a", ("b", "c"))
    other = Ranking("2", "ann", "g", "b", ("a", "d"))
    decision = Ranking("1", "eve", "g", "a", ("c", "b"), adjudicated=True)
    labels = {frozenset(pair.images): pair.consistent for pair in label_pairs([one, other, decision])[0]}
    assert labels == {frozenset("ab"): False, frozenset("ac"): True, frozenset("bd"): False}


def test_an_adjudicator_has_the_page_and_the_opinions_without_names(running):
    admin = running.tokens["admin"]
    question = running.store.instances()[0]
    for name in ("ann", "ben"):
        running.store._db.execute("INSERT OR REPLACE INTO assignments VALUES (?, -9, ?, 1)", (name, question.id))
        answer_as(running.store, name, question.id, "012" if name == "ann" else "210")
    status, content, _ = running.ask("POST", "/api/admin/people", {"name": "eve", "adjudicates": True}, token=admin)
    token = json.loads(content)["link"].rpartition("#")[2]
    assert (status, running.store.people(), running.store.people(role=ADJUDICATOR)) == (200, ["ann", "ben"], ["eve"])
    state = json.loads(running.ask("GET", "/api/task", token=token)[1])
    assert state["progress"] == {"total": 1, "ranked": 0, "skipped": 0}
    shown = shown_order("eve", question)
    orders = {one["name"]: [shown[slot] for slot in one["order"]] for one in state["task"]["opinions"]}
    assert (orders["Person 1"], orders["Person 2"]) == ([0, 1, 2], [2, 1, 0])
    assert set(orders) == {"Person 1", "Person 2", "All rankings together"}
    assert b"ann" not in json.dumps(state).encode()
    body = {
        "instance": state["task"]["instance"],
        "order": state["task"]["opinions"][1]["order"],
        "request": "decide-1",
    }
    done = json.loads(running.ask("POST", "/api/rankings", body, token=token)[1])
    assert (done["task"], done["progress"]) == (None, {"total": 1, "ranked": 1, "skipped": 0})
    again = json.loads(running.ask("POST", "/api/undo", {"request": "undo-this"}, token=token)[1])
    assert [shown[slot] for slot in again["task"]["previous"]] == [2, 1, 0]
    skip = {"instance": body["instance"], "reason": "both are fine", "request": "skip-this"}
    assert json.loads(running.ask("POST", "/api/skips", skip, token=token)[1])["task"] is None
    rows = [json.loads(line) for line in running.ask("GET", "/api/admin/audit.jsonl", token=admin)[1].splitlines()]
    assert [(row["person"], row["kind"]) for row in rows[-3:]] == [("eve", "decide"), ("eve", "undo"), ("eve", "skip")]
    assert running.ask("GET", "/api/admin/audit.jsonl", token=token)[0] == 403
    # A new link leaves the role as it is.
    assert running.ask("POST", "/api/admin/links", {"name": "eve"}, token=admin)[0] == 200
    assert running.store.people(role=ADJUDICATOR) == ["eve"]


def test_nobody_ranks_and_adjudicates(dataset):
    folder = dataset(prompts=2, grids=2)
    with Store(folder / "annotations.db") as store:
        with pytest.raises(ValueError, match="'ann' cannot rank and adjudicate"):
            prepare(store, folder, ["ann"], adjudicators=["ann"])
        links = prepare(store, folder, ["ann"], sharing=NO_OVERLAP, adjudicators=["eve"])
        assert (sorted(links), store.progress("ann")["total"]) == (["admin", "ann", "eve"], 48)
        assert prepare(store, folder, [], adjudicators=["eve"]) == {}
        with pytest.raises(ValueError, match="'eve' cannot rank and adjudicate"):
            prepare(store, folder, ["eve"])


# --- which question is next ------------------------------------------------------------------------------------


def following(store, name="ann"):
    return [one.id for one in LiveScores(store).following(Person(name, is_admin=False, expires=0))]


def test_the_most_uncertain_question_comes_first(tmp_path):
    """Among a, b, c and d, of which a is above all others: b against c is open, a against d as good as known."""
    pairs = {f"{one}{other}": (one, other) for one, other in ("ab", "ac", "ad", "bc", "bd", "cd")}
    rows = [Instance(name, "g", "reference", pair) for name, pair in pairs.items()]
    with Store(tmp_path / "annotations.db") as store:
        for name in ("ann", "ben"):
            store.add_person(name)
        store.share(rows, Sharing(overlap=1, judges=2, controls=0, order="uncertain"))
        shares = [one.instance.id for one in store.next_tasks("ann", limit=9)]
        assert following(store) == shares  # while nothing is known, the order of the shares
        for name in ("ab", "ac", "bd", "cd"):
            answer_as(store, "ben", name, "01")
        assert set(following(store)[:1]) == {"bc"}
        assert following(store)[-1] == "ad"
        answer_as(store, "ann", "bc", "01")
        assert "bc" not in following(store)
        store.undo(ANN, request="request-undo")
        answer_as(store, "ben", "bc", "01")
        assert following(store)[0] == "bc"  # what was taken back, whatever it tells
        assert sorted(following(store)) == sorted(pairs)


def test_scores_are_the_peak_of_the_posterior():
    """One ranking of two candidates: σ(−d) = d/8, with d the difference of their scores of prior N(0, 2²)."""
    score = fit_scores([Ranking("i", "ann", "g", "r", ("a", "b"))])
    gap = score[frozenset("ra")] - score[frozenset("rb")]
    assert 1 / (1 + math.exp(gap)) == pytest.approx(gap / 8, rel=1e-3)


def test_tied_candidates_have_equal_scores():
    tied = Ranking("i", "ann", "g", "r", ("a", "b", "c"), ranks=(1, 1, 3))
    plain = Ranking("i", "ben", "g", "r", ("a", "b", "c"))
    scores = fit_scores([tied])
    first, second, last = (scores[frozenset(("r", name))] for name in "abc")
    assert first == pytest.approx(second, abs=1e-5)
    assert first > last + 0.5
    # A tie beside a ranking leaves that ranking's weight: only the order that it speaks for gets nearer.
    scores = fit_scores([tied, plain])
    first, second, last = (scores[frozenset(("r", name))] for name in "abc")
    assert first > second > last


def test_the_probability_of_the_most_likely_ranking():
    assert log_probability(np.zeros(4)) == pytest.approx(-math.log(24))
    assert log_probability(np.array([0.0, 1.0])) == pytest.approx(math.log(math.e / (1 + math.e)))
    assert log_probability(np.array([9.0, 0.0, -9.0])) > log_probability(np.array([1.0, 0.0, -1.0]))


def test_a_majority_settles_a_question():
    orders = {"a": ("x", "y", "z"), "b": ("x", "y", "z"), "c": ("y", "x", "z")}
    rankings = [Ranking("i", name, "g", "r", order) for name, order in orders.items()]
    assert not disagrees(rankings)
    assert disagrees(rankings[1:])
    assert not disagrees(rankings[:1])


@pytest.mark.slow
def test_control_questions_keep_their_turns(tmp_path):
    rows = instances(20)
    controls = [replace(one, id=f"c-{one.id}", must=((0, 1),)) for one in rows[:5]]
    with Store(tmp_path / "annotations.db") as store:
        store.add_person("ann")
        store.share([*rows, *controls], Sharing(overlap=0, control_every=5, order="uncertain"))
        shuffled, seen = [one.instance.id for one in store.next_tasks("ann", limit=99)], []
        while following(store):
            seen.append(following(store)[0])
            answer_as(store, "ann", seen[-1], "0123")
    turns = [[name if name.startswith("c-") else "" for name in names] for names in (shuffled, seen)]
    assert turns[0] == turns[1]
    assert sorted(shuffled) == sorted(seen)
    assert sum(map(bool, turns[0])) == 4


@pytest.mark.nightly
def test_the_page_asks_in_the_uncertain_order_and_to_the_end(dataset):
    folder = dataset(prompts=2, grids=2)
    sharing = Sharing(overlap=1, judges=2, controls=2, control_every=10, order="uncertain")
    with Store(folder / "annotations.db") as store:
        links = prepare(store, folder, ["ann", "ben"], sharing=sharing)
        assert store.sharing() == sharing
        with serving_app(make_app(folder, store)) as url:
            done = simulate(url, {name: links[name].rpartition("#")[2] for name in ("ann", "ben")}, noise=0.1)
        assert done == {"ann": 50, "ben": 50}
        assert {len(set(store.progress(name).values()) - {0}) for name in done} == {1}


def test_an_unknown_order():
    with pytest.raises(ValueError, match="order 'best' must be one of shuffled, uncertain"):
        Sharing(order="best")


# --- the HTTP API, continued -----------------------------------------------------------------------------------


def test_images_come_from_the_folder_only(only_read):
    token = only_read.tokens["ann"]
    state = json.loads(only_read.ask("GET", "/api/task", token=token)[1])
    assert state["question"] == "Which fit?"
    for address in (state["task"]["reference"], *state["task"]["candidates"]):
        status, content, headers = only_read.ask("GET", address, token=token)
        assert (status, content[:4], headers["content-type"]) == (200, b"\x89PNG", "image/png")
    key = state["task"]["instance"]
    for slot in ("3", "-1", "x", "9" * 5000, "01", "..%2f..%2fannotations.db", "%00", "²"):
        assert only_read.ask("GET", f"/images/{key}/{slot}".encode("ascii", "ignore").decode(), token=token)[0] == 404


def test_instances_that_point_outside_are_refused_before_serving(dataset, tmp_path):
    folder = dataset(prompts=2, grids=2)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "images/0000/link.png").symlink_to(tmp_path / "secret.png")
    for name in ("../secret.png", str(tmp_path / "secret.png"), "images/0000/link.png", "annotations.db"):
        one = {"id": "x", "group": "g", "reference": name, "candidates": ["images/0000/0_0.png", "images/0000/0_1.png"]}
        (folder / "instances.jsonl").write_text(json.dumps(one) + "\n")
        with pytest.raises(ValueError, match="1 images are missing"):
            plan(folder, ["ann"], sharing=NO_OVERLAP)


def test_an_administrator_ranks_nothing(only_read):
    key = json.loads(only_read.ask("GET", "/api/task", token=only_read.tokens["ann"])[1])["task"]["instance"]
    for path, body in (("/api/rankings", {"order": [0, 1]}), ("/api/skips", {"reason": "none"})):
        form = {"instance": key, "request": "request-of-admin", **body}
        status, content, _ = only_read.ask("POST", path, form, token=only_read.tokens["admin"])
        assert (status, "for admin" in json.loads(content)["error"]) == (404, True)
    assert only_read.ask("GET", f"/images/{key}/0", token=only_read.tokens["admin"])[0] == 200
    assert only_read.store.answers() == []


def test_an_image_deleted_under_the_page(running):
    token = running.tokens["ann"]
    state = json.loads(running.ask("GET", "/api/task", token=token)[1])
    for path in (running.folder / "images").rglob("*.png"):
        path.unlink()
    status, content, _ = running.ask("GET", state["task"]["reference"], token=token)
    assert status == 410
    assert "is missing on the disk" in json.loads(content)["error"]
    client = Client(running.url, token)
    after = client.skip(state["task"]["instance"], "An image is broken or missing")
    assert after["progress"]["skipped"] == 1


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"instance": "x", "order": [0], "request": "12345678"}, 404, "no instance"),
        ({"instance": "x", "order": "abc", "request": "12345678"}, 422, "order"),
        ({"instance": "\ud800", "order": [0], "request": "12345678"}, 422, "not valid JSON"),
        ({"instance": "x", "order": [0], "request": "1234567\ud800"}, 422, "not valid JSON"),
        ({"instance": "x", "order": [0], "request": "12345678", "\ud800": 1}, 422, "not valid JSON"),
        ({"instance": "x", "order": [0], "request": "12345678", "evil": 1}, 422, "evil"),
        ({"instance": "x", "order": list(range(65)), "request": "12345678"}, 422, "order"),
    ],
)
def test_malformed_rankings(only_read, body, status, message):
    found, content, _ = only_read.ask("POST", "/api/rankings", body, token=only_read.tokens["ann"])
    assert found == status
    assert message in json.loads(content)["error"]


def test_large_bodies_are_refused_unread(only_read):
    assert only_read.ask("POST", "/api/rankings", "x" * (2**22 + 1), token=only_read.tokens["ann"])[0] == 413


def test_pages_ask_nothing_of_other_machines(only_read):
    for path in ("/", "/admin", "/page/page.js", "/page/admin.js", "/page/style.css", "/page/base.css"):
        status, content, headers = only_read.ask("GET", path)
        assert status == 200
        assert not re.search(rb"https?://|//[a-z]+\.", content)
        assert "default-src 'self'" in headers["content-security-policy"]


def test_dry_run_says_what_each_would_get(dataset):
    folder = dataset(prompts=2, grids=3)
    shares = plan(folder, ["ann", "ben"], sharing=NO_OVERLAP)
    assert sum(shares.values()) == 72
    assert not (folder / "annotations.db").exists()


def test_a_dry_run_counts_those_who_are_known(dataset):
    folder = dataset(prompts=2, grids=3)
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann", "ben"], sharing=NO_OVERLAP)
        totals = {name: store.progress(name)["total"] for name in ("ann", "ben")}
    assert plan(folder, []) == plan(folder, ["ben"]) == totals
    later = plan(folder, ["cat"])
    assert sorted(later) == ["ann", "ben", "cat"]
    assert sum(later.values()) == sum(totals.values())
    with Store(folder / "annotations.db") as store:
        assert store.people() == ["ann", "ben"]


def test_the_manifest_says_who_ranks_what(dataset):
    folder = dataset(prompts=2, grids=2)
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann", "ben"], sharing=NO_OVERLAP)
    manifest = json.loads((folder / "manifests/annotate.json").read_text())
    assert list(manifest["plan"]["inputs"]) == ["instances.jsonl"]
    assert manifest["plan"]["options"] == {**asdict(NO_OVERLAP), "people": ["ann", "ben"]}
    assert manifest["counts"] == {"ann": 24, "ben": 24}
    assert "pacorl" in manifest["versions"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"must": [[0, 1]]}, r"controls\.jsonl: id '0000:0_0:1' is already taken by an instance"),
        ({"id": "own", "must": []}, r"controls\.jsonl: 'own' has no known order; give one under `must`"),
        ({"id": "own", "must": [[0, 0]]}, "puts a candidate above itself, which nobody can"),
        ({"id": "own", "must": [[0, 1], [1, 0]]}, "puts a candidate above itself"),
        ({"id": "own", "must": [[0.9, 1.2]]}, "must.0.0: Input should be a valid integer"),
        ({"id": "own", "must": [[True, False]]}, "must.0.0: Input should be a valid integer"),
        ({"id": "own", "must": [[0, 1]], "candidates": "bc"}, "candidates: a list of images, not 'bc'"),
    ],
)
def test_bad_control_questions_are_named(dataset, change, message):
    folder = dataset(prompts=2, grids=2)
    row = read_jsonl(folder / "instances.jsonl")[0]
    write_jsonl(folder / "controls.jsonl", [row | {"id": "fine", "must": [[1, 0]]}])
    assert plan(folder, ["ann"], sharing=Sharing(overlap=0)) == {"ann": 48 + 1}
    write_jsonl(folder / "controls.jsonl", [row | change])
    with pytest.raises(ValueError, match=message):
        plan(folder, ["ann"], sharing=NO_OVERLAP)


def test_serving_twice_is_refused(dataset):
    folder = dataset(prompts=2, grids=2)
    with only_server(folder / "annotations.db", url="http://here"), pytest.raises(ValueError, match="already served"):
        serve(folder, ["ann"], sharing=NO_OVERLAP, port=0)


def test_a_start_whose_port_is_taken_makes_no_links(dataset):
    folder, announced = dataset(prompts=2, grids=2), []
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="cannot be listened on"):
        serve(folder, ["ann"], sharing=NO_OVERLAP, port=taken.getsockname()[1], announce=announced.append)
    with Store(folder / "annotations.db") as store:
        assert prepare(store, folder, ["ann"]).keys() == {"admin", "ann"}
    assert announced == []


def test_links_have_the_public_address(dataset, monkeypatch):
    folder, announced = dataset(prompts=2, grids=2), []
    monkeypatch.setattr(routes, "run", lambda app, sockets: None)
    for address, fault in (
        ("https://rank.example", "the server refuses this name; start it with PACORL_HOSTS=rank.example"),
        ("rank.example", "is no address; write https://NAME"),
    ):
        with pytest.raises(ValueError, match=fault):
            serve(folder, ["ann"], port=0, public_url=address, announce=announced.append)
    assert not (folder / "annotations.db").exists()
    monkeypatch.setenv("PACORL_HOSTS", "rank.example")
    serve(folder, ["ann"], port=0, public_url="https://rank.example/", announce=announced.append)
    assert announced[0].startswith("admin\thttps://rank.example/join#")


def test_how_work_is_shared_is_remembered(dataset):
    folder = dataset(prompts=2, grids=2)
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann"], sharing=NO_OVERLAP)
        before = store.progress("ann")
        prepare(store, folder, ["ann"])
        assert store.progress("ann") == before == {"total": 48, "ranked": 0, "skipped": 0}
        assert prepare(store, folder, ["ann"], renew=["ann"]).keys() == {"ann"}


def rank_some(store, name, count):
    for task in store.next_tasks(name, limit=count):
        answer_as(store, name, task.instance.id, range(len(task.slots)))


def test_a_restart_keeps_the_options_that_it_does_not_name_and_the_division(dataset):
    """People had 25 questions each, and 21 after a restart with another wording: the overlap was the default again."""
    folder = dataset(prompts=2, grids=3)
    options = {"overlap": 0.5, "judges": 2, "controls": 30, "control_every": 5, "seed": 3, "order": "uncertain"}
    said = []
    start = partial(prepare, folder=folder, announce=said.append)
    with Store(folder / "annotations.db") as store:
        start(store, people=["ann", "ben"], sharing=options)
        before = store.assigned()
        controls = Counter(name for own in before.values() for name in own if name.startswith("control:"))
        for _ in range(3):  # restarts between answers: with one option, with all, and without any
            for options_named in ({"question": "Which fit?"}, options, {}):
                for name in ("ann", "ben"):
                    rank_some(store, name, 3)
                assert plan(folder, ["ann"], sharing=options_named, announce=said.append) == {
                    name: len(own) for name, own in before.items()
                }
                start(store, people=["ann"], sharing=options_named)
                assert {name: own.keys() for name, own in store.assigned().items()} == {
                    name: own.keys() for name, own in before.items()
                }
        assert controls.total() == sum(name.startswith("control:") for own in store.assigned().values() for name in own)
        assert store.sharing() == Sharing(**options, question="Which fit?")
    assert said == []


def test_the_command_changes_only_what_it_names(dataset, monkeypatch):
    folder = dataset(prompts=2, grids=3)
    monkeypatch.setattr(routes, "run", lambda app, sockets: None)

    def annotate(*options):
        done = CliRunner().invoke(app, ["annotate", str(folder), "--port", "0", *options])
        assert done.exit_code == 0, done.output
        return done

    annotate("--annotators", "ann,ben", "--overlap", "0.5", "--judges", "2", "--control-every", "5")
    with Store(folder / "annotations.db", read_only=True) as store:
        before = store.assigned()
    for option in (["--question", "Which fit?"], [], ["--order", "uncertain"]):
        planned = annotate(*option, "--dry-run")
        assert [line.split() for line in planned.stdout.splitlines()] == [
            [name, str(len(own))] for name, own in before.items()
        ]
        assert "division" not in annotate(*option).output + planned.output
    changed = annotate("--overlap", "0.1", "--dry-run")
    assert f"division would change: ann {len(before['ann'])} → " in changed.stderr
    assert annotate().stdout.splitlines()[1] == "question: Which fit?"
    with Store(folder / "annotations.db", read_only=True) as store:
        assert store.assigned() == before
        options = {"overlap": 0.5, "judges": 2, "control_every": 5, "question": "Which fit?", "order": "uncertain"}
        assert store.sharing() == Sharing(**options)


def test_an_option_that_divides_anew_is_announced_with_what_it_changes(dataset):
    folder = dataset(prompts=2, grids=3)
    planned, said = [], []
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann", "ben"], sharing={"overlap": 0.5, "judges": 2, "control_every": 5})
        rank_some(store, "ann", 20)
        rank_some(store, "ben", 20)
        before = store.assigned()
        counts = plan(folder, [], sharing={"overlap": 0}, announce=planned.append)
        assert store.assigned() == before
        prepare(store, folder, [], sharing={"overlap": 0}, announce=said.append)
        after = store.assigned()
        # Answers stay with their people, and one question in five is a control, answered ones included.
        for name, own in after.items():
            assert {question for question, is_open in before[name].items() if not is_open} <= own.keys()
            held = sum(question.startswith("control:") for question in own)
            assert held == math.ceil((len(own) - held) / 5)
    assert counts == {name: len(own) for name, own in after.items()}
    assert sum(counts.values()) < sum(map(len, before.values()))
    changes = "; ".join(
        f"{name} {len(before[name])} → {len(own)} questions, {len(own.keys() - before[name])} of them new"
        for name, own in after.items()
    )
    assert (planned, said) == ([f"division would change: {changes}"], [f"division changed: {changes}"])


def test_new_questions_and_new_controls_are_divided_without_an_option(dataset):
    folder = dataset(prompts=2, grids=2)
    rows, said = read_jsonl(folder / "instances.jsonl"), []
    write_jsonl(folder / "instances.jsonl", rows[:20])
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann"], sharing=NO_OVERLAP)
        write_jsonl(folder / "instances.jsonl", rows[:30])
        prepare(store, folder, [], announce=said.append)
        write_jsonl(folder / "instances.jsonl", rows[5:30])
        prepare(store, folder, [], announce=said.append)
        write_jsonl(folder / "controls.jsonl", [rows[0] | {"id": "own", "must": [[1, 0]]}])
        prepare(store, folder, [], sharing={"control_every": 25}, announce=said.append)
        prepare(store, folder, [], announce=said.append)
    assert [line.partition("division changed: ann ")[2] for line in said] == [
        "20 → 30 questions, 10 of them new",
        "30 → 25 questions, 0 of them new",
        "25 → 26 questions, 1 of them new",
    ]


def test_each_ranking_keeps_the_wording_that_it_was_made_under(dataset):
    folder = dataset(prompts=2, grids=2)
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann"], sharing=NO_OVERLAP)
        for question in (None, "Which fit?", "Welche passen?", ""):
            named = {} if question is None else {"question": question}
            prepare(store, folder, [], sharing=named)
            prepare(store, folder, [])  # a restart without it
            rank_some(store, "ann", 1)
        store.undo(ANN, request="request-undo")
        prepare(store, folder, [], sharing={"question": "And now?"})
        undone = store.next_tasks("ann")[0].instance.id
        answer_as(store, "ann", undone, [0, 1], request="request-again")
        own = "Which of these belong to the same set as the reference?"
        expected = [own, "Which fit?", "Welche passen?", own, own, "And now?"]
        assert [row["question"] for row in store.audit()] == expected
        assert [answer.question for answer in store.answers()] == [*expected[:3], "And now?"]
    collect_answers(folder)
    assert [answer.question for answer in read_answers(folder / "rankings.jsonl")] == [*expected[:3], "And now?"]
    assert all(row["ranks"] == [1, 2] for row in read_jsonl(folder / "rankings.jsonl"))


def test_the_export_counts_what_stands_in_the_audit_trail_and_warns_of_another_question(dataset):
    folder = dataset(prompts=4, grids=3)
    sharing = Sharing(overlap=0.2, judges=2, controls=40, control_every=10, question="Which is prettier?")
    with Store(folder / "annotations.db") as store:
        prepare(store, folder, ["ann", "ben"], sharing=sharing, adjudicators=["eve"])
        for name in ("ann", "ben"):
            person = Person(name, is_admin=False, expires=0)
            store.skip(person, key(store, name), "all alike", request=f"request-{name}")
            rank_some(store, name, 60)
            for number in range(2):
                store.undo(person, request=f"request-{name}-{number}")
        answer_as(store, "eve", store.answers()[0].instance, [0, 1, 2], adjudicates=True)
        trail = store.audit()
        decisions = sum(answer.adjudicated for answer in store.answers())
        rankings, controls = len(store.answers()) - decisions, len(store.answers(controls=True))
    undone = sum(row["kind"] == "undo" for row in trail)
    assert sum(row["kind"] == "rank" for row in trail) - undone == rankings + controls > 0
    assert (undone, decisions, controls > 5) == (4, 1, True)

    done = CliRunner().invoke(app, ["export", str(folder), "--test-share", "0.5"])
    assert done.exit_code == 0, done.output
    first = done.stdout.splitlines()[0]
    assert first == f"{rankings} of {rankings} rankings, {controls} controls, 1 decision, 2 skips"
    assert re.search(
        r"^people agree on \d+ % \(\d+ to \d+ %\) of the pairs of images in \d+ shared ques", done.stdout, re.M
    )
    warned = f"warning: {rankings + 1} rankings answer 'Which is prettier?', but the judge is asked another question"
    assert warned in " ".join(done.stderr.split())
    assert warned not in done.stdout


def test_the_wording_before_it_was_recorded_is_unknown(store):
    store._db.execute("DELETE FROM meta WHERE key = 'wordings'")
    store.rank(ANN, key(store), [0, 1, 2, 3], request="request-1")
    store.share(instances(6), replace(NO_OVERLAP, question="Which fit?"))
    store.rank(ANN, key(store), [0, 1, 2, 3], request="request-2")
    assert [answer.question for answer in store.answers()] == ["", "Which fit?"]


@pytest.mark.parametrize(
    ("people", "adjudicators", "fault"),
    [
        ([], [], "there are no annotators"),
        (["admin"], [], "'admin' is the administrator"),
        (["ann"], ["ann"], "'ann' cannot rank and adjudicate"),
        (["ann"], [], "images are missing"),
    ],
)
def test_a_start_that_fails_makes_no_database(dataset, people, adjudicators, fault):
    folder = dataset(prompts=2, grids=2)
    if "images" in fault:
        shutil.rmtree(folder / "images")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(ValueError, match=fault):
        serve(folder, people, adjudicators=adjudicators, sharing=NO_OVERLAP, port=0)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_database_and_its_rankings_are_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        with Store(tmp_path / "set" / "annotations.db") as store:
            store.add_person("ann")
            modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "set").iterdir()}
        collect_answers(tmp_path / "set")
    finally:
        os.umask(before)
    assert modes.keys() > {"annotations.db"}, "SQLite's log lies beside it"
    assert set(modes.values()) == {0o600}
    assert (tmp_path / "set" / "rankings.jsonl").stat().st_mode & 0o777 == 0o600


def test_no_database_is_made_at_the_end_of_a_link(tmp_path):
    (tmp_path / "annotations.db").symlink_to(tmp_path / "elsewhere.db")
    with pytest.raises(OSError, match="a link, and nothing is written through links here"):
        Store(tmp_path / "annotations.db")
    assert not (tmp_path / "elsewhere.db").exists()


def test_a_start_that_fails_hands_out_no_links(dataset):
    folder = dataset(prompts=2, grids=2)
    with Store(folder / "annotations.db") as store:
        with pytest.raises(ValueError, match="name people"):
            prepare(store, folder, [])
        for ask in (plan, partial(prepare, store)):
            with pytest.raises(ValueError, match="'admin' is the administrator"):
                ask(folder, ["ann", "admin"])
        assert not store.people(role=ADMINISTRATOR)
        assert set(prepare(store, folder, ["ann"], sharing=NO_OVERLAP)) == {"ann", "admin"}
