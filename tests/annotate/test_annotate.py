"""The annotation page without a browser: division of the work, changes and their log, links, and the page's API."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from unittest.mock import Mock

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from pacorl.annotate.server import (
    ADMIN,
    PAGE,
    Annotation,
    foreign_controls,
    make_app,
    public_key,
    share_out,
    shown_order,
)
from pacorl.dataset.answer_log import LOG, NONE_FITS, AnswerLog, collect_answers
from pacorl.dataset.folder import Instance, final_answers, read_instances, write_records
from pacorl.web import BODY_BYTES, RefusedError

NUMBERS = iter(range(10**6))


def request() -> str:
    return f"request-{next(NUMBERS)}"


def instances(count: int, groups: int = 3) -> list[Instance]:
    made = []
    for number in range(count):
        group = f"g{number % groups}"
        made.append(Instance(f"i{number}", group, f"{group}/r.png", tuple(f"{group}/{n}.png" for n in range(4))))
    return made


@pytest.fixture
def annotation(dataset) -> Annotation:
    """Two people and one who settles, on a folder whose every question both rank."""
    annotation = Annotation(dataset(2, 2))
    annotation.start(["ann", "ben"], ["cy"])
    return annotation


def rank_next(annotation: Annotation, person: str, *, backwards: bool = False) -> str:
    """Rank a person's next question by the candidates' names, and return its key."""
    task = annotation.state(person)["task"]
    instance = annotation.instance_of(person, task["instance"])
    shown = shown_order(person, instance)
    slots = sorted(range(len(shown)), key=lambda slot: shown[slot], reverse=backwards)
    annotation.rank(person, task["instance"], slots, request=request())
    return str(task["instance"])


# --- division ----------------------------------------------------------------------------------------------------


@given(
    count=st.integers(3, 60),
    people=st.integers(1, 5),
    each=st.integers(1, 4),
    answered=st.sets(st.tuples(st.sampled_from(["p0", "p1", "p4"]), st.sampled_from(["i0", "i1", "i2"]))),
)
def test_every_question_has_its_people_who_keep_what_they_answered(count, people, each, answered):
    questions = instances(count)
    names = [f"p{number}" for number in range(people)]
    controls = foreign_controls(questions)
    shares = share_out([*questions, *controls], names, each, answered=answered)
    for one in questions:
        holders = {person for person in names if (person, one.id) in answered}
        of_question = [person for person, share in shares.items() if one.id in share]
        assert {*of_question} >= holders
        assert len(of_question) == max(len(holders), min(each, people))
    if not answered:
        loads = [sum(not name.startswith("control") for name in share) for share in shares.values()]
        assert max(loads) - min(loads) <= 1
    for share in shares.values():
        assert len(share) == len({*share})
        assert sum(control.id in share for control in controls) <= -(-len(share) // 20)
    # Answers of its own people change nothing, and another start gives the same.
    own = answered | {(person, name) for person, share in shares.items() for name in share[:2]}
    assert share_out([*questions, *controls], names, each, answered=own) == shares


def test_a_control_has_one_image_of_another_prompt_that_is_worst():
    questions = instances(12)
    # Prompts 0 and 1 share all of their images, so only prompt 2 has foreign ones.
    shared = [Instance(f"x{n}", f"s{n}", "g0/r.png", questions[0].candidates) for n in range(2)]
    for control in foreign_controls([*questions, *shared] * 10):
        own = {name for one in [*questions, *shared] if one.group == control.group for name in one.candidates}
        foreign = [index for index, name in enumerate(control.candidates) if name not in own]
        assert len(foreign) == 1
        assert control.foreign == foreign[0]
    assert foreign_controls(instances(4, groups=1)) == []


# --- changes -----------------------------------------------------------------------------------------------------


def test_a_ranking_is_stored_as_it_was_shown_with_its_ties_and_nothing_else_is(annotation):
    task = annotation.state("ann")["task"]
    instance = annotation.instance_of("ann", task["instance"])
    shown = shown_order("ann", instance)
    slots = list(range(len(shown)))
    before = (annotation.folder / LOG).read_bytes()
    for wrong in ([0], [0, 0, 1], [0, 1, 9], [], [[]], [[0, 1], []], [0, 1, 2, 3, 4, 5, 6]):
        with pytest.raises(RefusedError, match="each of the"):
            annotation.rank("ann", task["instance"], wrong, request=request())
    assert (annotation.folder / LOG).read_bytes() == before
    annotation.rank("ann", task["instance"], [slots[1], [slots[0], *slots[2:]]], request=request())
    (event,) = annotation.log.of("ann")
    assert [set(tier) for tier in event.order] == [{shown[1]}, {shown[slot] for slot in [0, *slots[2:]]}]


def test_sent_again_it_counts_once(annotation):
    task = annotation.state("ann")["task"]
    slots = list(range(len(task["candidates"])))
    for _ in range(3):
        annotation.rank("ann", task["instance"], slots, request="the-same-request")
    assert len(annotation.log.of("ann")) == 1
    with pytest.raises(RefusedError, match="something else"):
        annotation.undo("ann", request="the-same-request")
    with pytest.raises(RefusedError, match="something else"):
        annotation.skip("ben", annotation.state("ben")["task"]["instance"], "why", request="the-same-request")
    with pytest.raises(RefusedError, match="answered already"):
        annotation.rank("ann", task["instance"], slots, request=request())
    for _ in range(2):
        annotation.undo("ann", request="another-request")
    assert annotation.log.of("ann") == []


def test_undo_shows_the_last_again_as_it_was(dataset):
    """In whichever order three candidates are shown."""
    annotation = Annotation(dataset(2, 3))
    annotation.start(["ann"], [])
    keys = []
    for _ in range(12):
        keys.append(rank_next(annotation, "ann", backwards=True))
        annotation.undo("ann", request=request())
        state = annotation.state("ann")
        assert (state["task"]["instance"], state["progress"]["ranked"]) == (keys[-1], len(keys) - 1)
        shown = shown_order("ann", annotation.instance_of("ann", keys[-1]))
        assert [shown[slot] for (slot,) in state["task"]["previous"]] == sorted(shown, reverse=True)
        assert rank_next(annotation, "ann") == keys[-1]
    for _ in keys:
        annotation.undo("ann", request=request())
    with pytest.raises(RefusedError, match="nothing to undo"):
        annotation.undo("ann", request=request())
    assert [rank_next(annotation, "ann") for _ in keys] == keys


def test_an_answer_whose_line_is_removed_is_open_again(annotation):
    keys = [rank_next(annotation, "ann") for _ in range(3)]
    annotation.undo("ann", request=request())
    path = annotation.folder / "answers.jsonl"
    start, first, second, third, undo = path.read_text().splitlines(keepends=True)
    path.write_text(start + second + third + undo)
    reopened = Annotation(annotation.folder)
    assert [event.instance for event in reopened.log.of("ann")] == [reopened.instance_of("ann", keys[1]).id]
    path.write_text(start + first + second + undo)
    with pytest.raises(ValueError, match=r"answers\.jsonl:4: "):
        Annotation(annotation.folder)


def test_a_foreign_image_tied_with_the_others_fails_its_control(dataset):
    annotation = Annotation(dataset(2, 2))
    annotation.start(["ann"])
    (key, *_) = [
        public_key(name) for name in annotation.log.assigned["ann"] if annotation.log.instances[name].is_control
    ]
    instance = annotation.instance_of("ann", key)
    shown = shown_order("ann", instance)
    worst = shown.index(instance.foreign)
    others = [slot for slot in range(len(shown)) if slot != worst]
    for order, passed in (([[*others, worst]], 0), ([*others, worst], 1)):
        annotation.rank("ann", key, order, request=request())
        (person,) = annotation.summary()["people"]
        assert (person["controls"], person["passed"]) == (1, passed)
        assert collect_answers(annotation.folder) == []  # controls stay out of the export
        annotation.undo("ann", request=request())


def test_contradictions_and_misfits_are_settled_by_one_more(dataset):
    annotation = Annotation(dataset(1, 3))
    annotation.start(["ann", "ben"], ["fay"], controls=False)
    contrary, misfit, opposite, alike = sorted(annotation.log.instances)[2:6]
    # Of an order that is opposite between the best and the worst, no label depends.
    by_ben = {opposite: [0, 2, 1], contrary: [1, 2, 0], alike: [0, 1, 2]}
    by_ann = {name: [0, 1, 2] for name in (*by_ben, misfit)}
    for person, orders in (("ann", by_ann), ("ben", by_ben)):
        for name, order in orders.items():
            shown = shown_order(person, annotation.log.instances[name])
            annotation.rank(person, public_key(name), [shown.index(each) for each in order], request=request())
    annotation.skip("ben", public_key(misfit), NONE_FITS, request=request())
    assert annotation.disputed() == [contrary, misfit]
    assert annotation.summary()["disputed"] == 2
    ann, ben, _ = annotation.summary()["people"]
    assert (len(ann["times"]), ann["reasons"], ben["reasons"]) == (4, [], [NONE_FITS])
    state = annotation.state("fay")
    assert state["adjudicates"]
    assert [opinion["name"] for opinion in state["task"]["opinions"]] == ["Person 1", "Person 2"]
    shown = shown_order("fay", annotation.log.instances[contrary])
    assert shown in ((1, 2, 0), (2, 0, 1)), "an order that is its own inverse hides an exchange"
    assert [[shown[slot] for (slot,) in one["order"]] for one in state["task"]["opinions"]] == [[0, 1, 2], [1, 2, 0]]
    rank_next(annotation, "fay")
    decisions = [answer for answer in final_answers(collect_answers(annotation.folder)) if answer.adjudicated]
    assert [answer.instance for answer in decisions] == [contrary]
    # Each of the two is compared with the decision, and not with the other.
    upheld = {one["name"]: one["upheld"] for one in annotation.summary()["people"]}
    tiers = [chosen for (chosen,) in decisions[0].tiers]
    candidates = annotation.log.instances[contrary].candidates
    for person, order in (("ann", by_ann[contrary]), ("ben", by_ben[contrary])):
        ranked = [candidates[each] for each in order]
        pairs = list(combinations(ranked, 2))
        assert upheld[person] == (sum(tiers.index(one) < tiers.index(other) for one, other in pairs), 3)
    annotation.undo("fay", request=request())
    assert annotation.disputed() == [contrary, misfit]
    assert f'value="{NONE_FITS}"' in (PAGE / "index.html").read_text()
    annotation.skip("fay", public_key(misfit), NONE_FITS, request=request())
    assert {answer.instance for answer in collect_answers(annotation.folder)} == {opposite, contrary, alike}


# --- the log -----------------------------------------------------------------------------------------------------


def test_a_restart_is_the_same_and_newcomers_take_what_nobody_answered(annotation):
    for _ in range(3):
        rank_next(annotation, "ann")
    annotation.undo("ann", request=request())
    again = Annotation(annotation.folder)
    before = (annotation.folder / LOG).read_bytes()
    again.start([], [])
    assert (annotation.folder / LOG).read_bytes() == before
    for name in ("ann", "ben", "cy"):
        assert again.state(name) == annotation.state(name)
    assert again.token("ann") == annotation.token("ann")
    again.start(["dan"], [])
    assert again.log.assigned["dan"]
    assert len(again.log.of("ann")) == 2
    assert {*again.log.people} == {"ann", "dan"}, "ben and cy have no answers and are not named"
    with pytest.raises(RefusedError):
        again.person_of(again.token("ben"))
    assert (annotation.folder / LOG).stat().st_mode & 0o077 == 0


def test_any_cut_of_the_log_is_a_start_of_it(annotation):
    """Whatever a kill left of the last line, all lines before it stand, and the next one is whole."""
    for _ in range(2):
        rank_next(annotation, "ann")
    path = annotation.folder / LOG
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    for cut in {start, start + 1, len(content) - 1, len(content) - 40, len(content)}:
        path.write_bytes(content[:cut])
        again = Annotation(annotation.folder)
        assert len(again.log.of("ann")) == content[:cut].count(b"\n") - 1
        while len(again.log.of("ann")) < 3:
            rank_next(again, "ann")
        assert len(AnswerLog(annotation.folder).of("ann")) == 3


def test_on_a_full_disk_nothing_is_acknowledged_and_with_room_all_goes_on(annotation, monkeypatch):
    before = (annotation.folder / LOG).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            rank_next(annotation, "ann")
    assert (annotation.folder / LOG).read_bytes() == before
    assert annotation.log.of("ann") == []
    rank_next(annotation, "ann")
    assert len(AnswerLog(annotation.folder).of("ann")) == 1


def test_changed_questions_and_missing_images_are_refused(annotation):
    path = annotation.folder / "instances.jsonl"
    (first, *rest) = read_instances(path)
    changed = Instance(first.id, first.group, first.reference, tuple(reversed(first.candidates)))
    write_records(path, [changed, *rest])
    with pytest.raises(ValueError, match="has changed"):
        annotation.start([])
    (annotation.folder / first.reference).unlink()
    with pytest.raises(ValueError, match=first.reference):
        annotation.start([])
    write_records(path, [replace(first, candidates=("Thumbs.db", *first.candidates))])
    (annotation.folder / first.reference).write_bytes(b"")
    (annotation.folder / "Thumbs.db").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Thumbs\.db is none of \.png"):
        annotation.start([])


@pytest.mark.parametrize("names", [([], []), (["admin"], []), (["a/b"], []), (["ann"], ["ann"]), (["ann", "Ann"], [])])
def test_a_start_that_fails_writes_nothing(dataset, names):
    annotation = Annotation(dataset(2, 2))
    with pytest.raises(ValueError):  # noqa: PT011 - each its own
        annotation.start(*names)
    assert not (annotation.folder / LOG).exists()


# --- the page's API ----------------------------------------------------------------------------------------------


@pytest.fixture
def client(annotation) -> Iterator[TestClient]:
    with TestClient(make_app(annotation), base_url="http://localhost:8765") as client:
        yield client


def key_of(annotation: Annotation, person: str) -> dict[str, str]:
    return {"cookie": f"pacorl_annotator_8765={annotation.token(person)}"}


def test_people_rank_to_the_end_by_the_api(annotation, client):
    keys = key_of(annotation, "ann")
    state = client.get("/api/task", headers=keys).json()
    total = state["progress"]["total"]
    while state["task"]:
        for address in (state["task"]["reference"], *state["task"]["candidates"]):
            assert client.get(address, headers=keys).headers["content-type"] == "image/png"
        slots = list(range(len(state["task"]["candidates"])))
        body = {"instance": state["task"]["instance"], "order": slots, "request": request()}
        state = client.post("/api/rankings", json=body, headers=keys).json()
    assert state["progress"] == {"total": total, "ranked": total, "skipped": 0}
    undone = client.post("/api/undo", json={"request": request()}, headers=keys).json()
    skip = {"instance": undone["task"]["instance"], "reason": "why not", "request": request()}
    assert client.post("/api/skips", json=skip, headers=keys).json()["progress"]["skipped"] == 1
    summary = client.get("/api/admin", headers=key_of(annotation, ADMIN)).json()
    assert summary["people"][0]["ranked"] == total - 1


def test_strangers_see_nothing_and_annotators_administer_nothing(annotation, client):
    task = annotation.state("ann")["task"]
    for token in ("", f"ben.{annotation.token('ann').partition('.')[2]}", annotation.token("eve"), "ann.", "ann.0"):
        headers = {"cookie": f"pacorl_annotator_8765={token}"}
        for path in ("/api/task", "/api/admin", task["reference"]):
            assert client.get(path, headers=headers).status_code == 401
        for path in ("/api/rankings", "/api/skips", "/api/undo"):
            assert client.post(path, json={"request": request()}, headers=headers).status_code == 401
    ann = key_of(annotation, "ann")
    assert client.get("/api/admin", headers=ann).status_code == 403
    assert client.post("/api/undo", content=iter([b" " * (BODY_BYTES + 1)]), headers=ann).status_code == 413
    for person in (ADMIN, "cy"):
        with pytest.raises(RefusedError, match=r"no instance|nobody disagrees"):
            annotation.rank(person, task["instance"], list(range(len(task["candidates"]))), request=request())
    # Two people may share a browser, and the same address has another candidate for each.
    assert client.get(task["reference"], headers=ann).headers["cache-control"] == "no-store"
    for path in ("/images/none/0", f"{task['reference']}9"):
        assert client.get(path, headers=ann).status_code == 404
    for path in ("/page/", "/page/admin.html", "/page/page.js", "/page/shared/base.css"):
        assert client.get(path).status_code == 200


def test_nothing_tells_control_questions_apart(annotation, client):
    keys = key_of(annotation, "ann")
    shapes = set()
    while task := annotation.state("ann")["task"]:
        shown = client.get("/api/task", headers=keys).json()["task"]
        shapes.add((tuple(shown), len(shown["instance"]), shown["previous"] is None))
        assert "control" not in json.dumps(shown)
        annotation.rank("ann", task["instance"], list(range(len(task["candidates"]))), request=request())
    assert len(shapes) == 1
    assert any(annotation.log.instances[event.instance].is_control for event in annotation.log.of("ann"))
