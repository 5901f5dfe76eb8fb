from __future__ import annotations

import pytest

from pacorl.dataset.manifest import Step
from pacorl.dataset.records import read_answers, read_instances, read_pairs, read_prompts
from pacorl.io.files import Journal, inside, read_jsonl, read_keyed, safe_name, write_atomic, write_jsonl


def step(folder, **options):
    return Step(folder, "demo", inputs=[folder / "in.txt"], options=options, seed=1)


@pytest.fixture
def finished(tmp_path):
    write_atomic(tmp_path / "in.txt", "in")
    write_atomic(tmp_path / "out.txt", "out")
    step(tmp_path, size=(1, 2)).finish(outputs=[tmp_path / "out.txt"], counts={"rows": 3})
    return tmp_path


def test_a_finished_step_says_so(finished):
    assert step(finished, size=(1, 2)).counts_if_done() == {"rows": 3}


def test_other_options_inputs_or_outputs_are_work(finished):
    assert step(finished, size=(1, 3)).counts_if_done() is None
    write_atomic(finished / "out.txt", "tampered")
    assert step(finished, size=(1, 2)).counts_if_done() is None
    write_atomic(finished / "out.txt", "out")
    write_atomic(finished / "in.txt", "changed")
    assert step(finished, size=(1, 2)).counts_if_done() is None


@pytest.mark.parametrize("content", ["{", "[]", '{"plan": {}}'])
def test_a_broken_manifest_is_named(finished, content):
    write_atomic(finished / "manifests" / "demo.json", content)
    with pytest.raises(ValueError, match=r"demo\.json is no manifest.*delete it to do the step again"):
        step(finished, size=(1, 2)).counts_if_done()


def test_atomic_write_leaves_no_parts(tmp_path):
    write_atomic(tmp_path / "a" / "b.txt", "x")
    write_atomic(tmp_path / "a" / "b.txt", "y")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b.txt"]
    assert (tmp_path / "a" / "b.txt").read_text() == "y"


def test_journal_survives_a_torn_line(tmp_path):
    path = tmp_path / "j.jsonl"
    Journal(path).add({"key": "a", "n": 1})
    with path.open("a") as handle:
        handle.write('{"key": "b", "n"')
    journal = Journal(path)
    assert list(journal.items) == ["a"]
    journal.add({"key": "b", "n": 2})
    journal.add({"key": "a", "n": 3})
    assert {key: row["n"] for key, row in Journal(path).items.items()} == {"a": 3, "b": 2}


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "", "a\\b", "ünder", "x" * 121, "..", "a\0b", "con:1"])
def test_hostile_names_are_refused(name):
    with pytest.raises(ValueError, match="cannot name a folder"):
        safe_name(name)


@pytest.mark.parametrize("path", ["../up.png", "/etc/passwd", "a/../../up.png", "a\0b"])
def test_paths_cannot_leave_the_folder(tmp_path, path):
    with pytest.raises(ValueError, match=r"leads out of|is not a path"):
        inside(tmp_path, path)


def test_links_cannot_leave_the_folder(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.png").write_bytes(b"x")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads out of"):
        inside(tmp_path / "set", "link.png")


def test_bad_json_is_named_by_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{oops\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        read_jsonl(tmp_path / "a.jsonl")


def test_bad_prompts_are_named(tmp_path):
    path = tmp_path / "p.jsonl"
    good = {"idx": "1", "prompt": "A 2x2 set. [A]:one. [B]:two. [C]:three. [D]:four."}
    cases = [
        ([good, good], "already taken"),
        ([{**good, "idx": "../x"}], "cannot name a folder"),
        ([{**good, "layout": "1x3"}], "3 panels and the prompt describes 4"),
        ([{"idx": "1"}], r"p\.jsonl:1: 'prompt' is missing"),
        ([{"prompt": "x"}], "'idx' is missing"),
        ([{"idx": "1", "prompt": "x", "layout": "square"}], "no layout such as"),
    ]
    for rows, message in cases:
        write_jsonl(path, rows)
        with pytest.raises(ValueError, match=message):
            read_prompts(path)


def test_bad_instances_are_named(tmp_path):
    path = tmp_path / "i.jsonl"
    good = {"id": "a", "group": "g", "reference": "r.png", "candidates": ["a.png", "b.png"]}
    cases = [
        ([good, good], "already taken"),
        ([{**good, "candidates": ["a.png"]}], "at least two different"),
        ([{**good, "must": [[0, 2]]}], "beyond the 2"),
        ([{**good, "colour": 1}], "not a ranking instance"),
    ]
    for rows, message in cases:
        write_jsonl(path, rows)
        with pytest.raises(ValueError, match=message):
            read_instances(path)


ANSWER = {"instance": "i", "annotator": "ann", "group": "g", "reference": "r.png", "candidates": ["a.png", "b.png"]}
PAIR = {"key": "k", "group": "g", "images": ["a.png", "b.png"], "consistent": True, "question": "Q"}


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (read_answers, ANSWER, "record 2: ann has already ranked i"),
        (read_pairs, PAIR, "record 2: key 'k' is already taken by an earlier record"),
    ],
)
def test_what_stands_twice_is_refused(tmp_path, read, row, message):
    write_jsonl(tmp_path / "r.jsonl", [row])
    assert len(read(tmp_path / "r.jsonl")) == 1
    write_jsonl(tmp_path / "r.jsonl", [row, row])
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "r.jsonl")


def test_rows_by_their_key(tmp_path):
    path = tmp_path / "r.jsonl"
    write_jsonl(path, [{"idx": 1, "prompt": "a"}, {"idx": "2", "prompt": "b"}, {"idx": "2", "prompt": "b"}])
    assert {key: row["prompt"] for key, row in read_keyed(path, key="idx").items()} == {"1": "a", "2": "b"}
    write_jsonl(path, [{"idx": "1", "prompt": "a"}, {"idx": 1, "prompt": "other"}])
    with pytest.raises(ValueError, match=r"record 2: idx '1' is already taken by another record"):
        read_keyed(path, key="idx")
    write_jsonl(path, [{"prompt": "a"}])
    with pytest.raises(ValueError, match="record 1: 'idx' is missing"):
        read_keyed(path, key="idx")
