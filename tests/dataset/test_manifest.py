from __future__ import annotations

import pytest

from pacorl.dataset.folder import read_answers, read_instances, read_prompts
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic


def step(folder, **options):
    return DatasetStep(folder, "demo", inputs=[folder / "in.txt"], options=options, seed=1)


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


def test_what_stands_twice_is_refused(tmp_path):
    write_jsonl(tmp_path / "r.jsonl", [ANSWER])
    assert len(read_answers(tmp_path / "r.jsonl")) == 1
    write_jsonl(tmp_path / "r.jsonl", [ANSWER, ANSWER])
    with pytest.raises(ValueError, match="record 2: ann has already ranked i"):
        read_answers(tmp_path / "r.jsonl")
