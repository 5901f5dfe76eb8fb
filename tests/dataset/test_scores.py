"""Pairs of images and their scores: a pair is one item from both sides, and the export has every one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from pacorl.dataset.export import export, label
from pacorl.dataset.records import Answer, Instance, read_instances, write_records
from pacorl.dataset.scores import Scores
from pacorl.io.documents import read_jsonl


def answer(reference: str, *candidates: str, who: str = "ann", ranks: tuple[int, ...] = ()) -> Answer:
    return Answer(f"{reference}:{','.join(sorted(candidates))}", who, "g", reference, candidates, ranks=ranks)


def test_a_pair_is_one_item_whichever_of_the_two_was_the_reference():
    scores = Scores([answer("a", "b", "c"), answer("b", "a", "d")])
    best, *others = scores.pairs()
    assert (sorted(best.images), best.rankings, len(others)) == (["a", "b"], 2, 2)
    # a–c and b–d were never compared, and are tied by a–b.
    question = Instance("q", "g", "x", ("a", "b"))
    assert Scores([answer("a", "b", "c")], questions=[question]).pairs()[1].rankings == 0


def test_ties_compare_nothing():
    tied, plain = (Scores([answer("a", "b", "c", "d", ranks=ranks)]) for ranks in ((1, 1, 3), ()))
    score = {pair.images[1] if pair.images[0] == "a" else pair.images[0]: pair.score for pair in tied.pairs()}
    assert score["b"] == score["c"] > score["d"]
    assert len({pair.score for pair in plain.pairs()}) == 3


def test_a_contrary_person_has_less_skill_and_a_stranger_has_the_average():
    images = [f"i{n}" for n in range(6)]
    answers = [
        answer(name, *sorted(set(images) - {name}, reverse=who == "cat"), who=who)
        for name, who in product(images, ("ann", "ben", "cat"))
    ]
    scores = Scores(answers)
    ann, ben, cat = scores.skills()
    assert ann.skill == pytest.approx(ben.skill, rel=0.01)
    assert ann.skill > 1 > cat.skill
    assert (cat.rankings, scores.skill("nobody")) == (6, 1.0)


def test_an_earlier_fit_of_other_questions_is_no_start():
    earlier = Scores([answer("a", "b", "c")])
    later = Scores([answer("a", "b", "c"), answer("x", "y", "z")], previous=earlier)
    assert later.fit.score_I == pytest.approx(np.tile(earlier.fit.score_I, 2), abs=1e-6)


def test_labels_by_score_let_the_careful_outvote_the_careless(tmp_path):
    """Cat and dan name another best than ann does; on 20 other instances ann and ben agree and they rank by chance."""
    rng = np.random.default_rng(0)
    answers = [answer("r", "best", "worst", who="ann")]
    answers += [answer("r", "worst", "best", who=who) for who in ("cat", "dan")]
    for number in range(20):
        names = [f"{number}{letter}" for letter in "abcd"]
        answers += [answer(f"r{number}", *names, who=who) for who in ("ann", "ben")]
        answers += [answer(f"r{number}", *rng.permutation(names).tolist(), who=who) for who in ("cat", "dan")]
    write_records(tmp_path / "rankings.jsonl", answers)
    consistent = {
        labels: {pair.consistent for pair in label(tmp_path, labels=labels).pairs if set(pair.images) == {"r", "best"}}
        for labels in ("votes", "scores")
    }
    assert consistent == {"votes": {False}, "scores": {True}}
    with pytest.raises(ValueError, match="unknown labels 'vote'; there are votes, scores"):
        label(tmp_path, labels="vote")


def test_the_consensus_keeps_ties_and_decisions():
    tied = answer("a", "b", "c", "d", ranks=(1, 1, 3))
    decision = replace(answer("x", "y", "z"), adjudicated=True)
    one, other = Scores([tied, answer("x", "z", "y"), decision]).consensus()[0], decision
    assert (one.annotator, set(one.tiers[0]), one.tiers[1]) == ("scores", {"b", "c"}, ("d",))
    assert Scores([tied, decision]).consensus()[-1] == other


def test_the_export_has_scores_and_skills_and_stands_alone(dataset):
    folder = dataset(prompts=4, grids=3)
    rows = read_instances(folder / "instances.jsonl")
    answers = [Answer(one.id, who, one.group, one.reference, one.candidates) for one in rows for who in ("ann", "ben")]
    write_records(folder / "rankings.jsonl", answers)
    export(folder, shares={"train": 0.5, "test": 0.5}, formats=["scores"])
    pairs = read_jsonl(folder / "export/scores.jsonl")
    assert len(pairs) == len({tuple(sorted((one.reference, name))) for one in rows for name in one.candidates})
    assert [row["score"] for row in pairs] == sorted((row["score"] for row in pairs), reverse=True)
    assert {row["rankings"] for row in pairs} == {4}  # two people, from both sides
    assert all((folder / "export" / name).is_file() for row in pairs for name in row["images"])
    people = read_jsonl(folder / "export/annotators.jsonl")
    assert people == [{"annotator": name, "skill": 1.0, "rankings": len(rows)} for name in ("ann", "ben")]
    manifest = json.loads((folder / "manifests/export.json").read_text())
    assert sorted(manifest["outputs"]) == ["export/annotators.jsonl", "export/scores.jsonl"]
