from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pacorl.core import questions
from pacorl.dataset.rules import (
    alike_pairs,
    best_worst,
    in_either_order,
    label_pairs,
    majority_rankings,
    pair_key,
    split_groups,
)
from pacorl.records.rankings import Ranking


def answer(annotator: str, order: str, reference: str = "r", instance: str = "") -> Ranking:
    return Ranking(instance or reference, annotator, "g", reference, tuple(order), theme="A cat.")


def shown(pair):
    return frozenset(map(str, pair.images))


def labels(answers):
    return {shown(pair): pair.consistent for pair in label_pairs(answers)[0]}


def test_majority_over_annotators_and_ties_dropped():
    answers = [answer("x", "abcd"), answer("y", "abdc"), answer("z", "cbad")]
    pairs, balance = label_pairs(answers)
    # a: 2 Yes. d: 2 No. c: 1 Yes, 1 No, so it is dropped. b: no vote.
    assert {shown(pair): pair.consistent for pair in pairs} == {frozenset("ra"): True, frozenset("rd"): False}
    assert balance == {"votes": 4, "yes": 1, "no": 1, "contradicted": 0, "undecided": 1}


def test_the_share_of_pairs_in_the_same_order_by_hand():
    """abcd against abdc: 5 of 6 alike; against dcba: 1 of 6 and none; a question of one person and a decision: none."""
    three = [answer("x", "abcd"), answer("y", "abdc"), answer("z", "dcba")]
    others = [answer("x", "abcd", instance="alone"), replace(answer("e", "dcba"), adjudicated=True)]
    assert alike_pairs(others) == {}
    assert alike_pairs([*three, *others]) == {"x": (5, 12), "y": (6, 12), "z": (1, 12)}
    # Of a = b > c > d and abcd, the pair that one of them ties is left out.
    tied = replace(answer("y", "abcd"), tiers=(("a", "b"), "c", "d"))
    assert alike_pairs([answer("x", "bacd"), tied])["x"] == (5, 5)
    assert alike_pairs([answer("x", "abdc"), tied])["x"] == (4, 5)


def test_one_of_three_labels_no_pair_and_the_benchmark_has_the_order_of_two():
    answers = [answer("x", "abcd"), answer("y", "abcd"), answer("z", "bdca")]
    assert labels(answers) == {frozenset("ra"): True, frozenset("rd"): False}
    assert [ranking.candidates for ranking in majority_rankings(answers)] == [tuple("abcd")]
    # Each of a, b and c wins once in a circle.
    assert majority_rankings([answer("x", "abc"), answer("y", "bca"), answer("z", "cab")]) == []


def test_both_orders_of_a_pair_are_one_and_a_contradiction_is_a_tie():
    pairs, balance = label_pairs([answer("x", "abcd", reference="r"), answer("x", "rbcd", reference="a")])
    assert (len(pairs), balance["votes"]) == (3, 4)
    assert frozenset("ra") not in labels([answer("x", "abcd", reference="r"), answer("x", "bcdr", reference="a")])


def test_a_decision_outvotes_the_question_that_has_the_pair_from_the_other_side():
    """Two people put the reference last among the candidates of its best candidate."""
    decided = replace(answer("judge", "ab", reference="r", instance="one"), adjudicated=True)
    others = [answer(name, "br", reference="a", instance="two") for name in ("x", "y")]
    for answers in ([decided, *others], [*others, decided]):
        assert labels(answers) == {frozenset("ra"): True, frozenset("rb"): False, frozenset("ab"): True}
    contrary = replace(answer("judge", "br", reference="a", instance="two"), adjudicated=True)
    for answers in ([decided, contrary], [contrary, decided]):
        assert labels(answers) == {frozenset("rb"): False, frozenset("ab"): True}


def test_order_of_a_pair_does_not_depend_on_who_is_asked_and_is_balanced():
    names = [f"images/{i:03d}.png" for i in range(400)]
    first = sum(in_either_order(a, b) == (a, b) for a, b in zip(names[::2], names[1::2], strict=True))
    assert 70 < first < 130
    assert all(in_either_order(a, b) == in_either_order(b, a) for a, b in zip(names[::2], names[1::2], strict=True))


def test_a_tie_is_a_vote_for_neither_in_the_merged_ranking():
    def merged(*answers: Ranking) -> list[tuple[str, ...]]:
        return [ranking.candidates for ranking in majority_rankings(answers)]

    assert best_worst([("a", "b"), ("c",)]) == [("a", True), ("b", True), ("c", False)]
    tied = replace(answer("x", "abcd"), tiers=("a", ("b", "c"), "d"))
    assert merged(tied) == []
    assert merged(tied, answer("y", "acbd")) == [tuple("acbd")]
    # One vote puts a before b; c is before both by one and behind both by the other, and so between them.
    shared = replace(answer("x", "abc"), tiers=(("a", "b"), "c"))
    assert merged(shared, answer("y", "cab")) == [tuple("acb")]
    assert merged(shared, replace(answer("judge", "bac"), adjudicated=True)) == [tuple("bac")]


def test_what_is_asked_depends_on_what_was_written_down():
    hat, both = {"Identity": {"Hat": "Same hat"}}, {"Identity": {"Hat": "Same hat"}, "Style": {"Ink": "Same ink."}}

    def asked(**texts) -> str:
        pairs, _ = label_pairs([Ranking("i", "ann", "g", "r", ("a", "b"), **texts)])
        return pairs[0].question

    assert asked(theme="A cat.", criteria=hat) == questions.same_theme("A cat.")
    assert asked(criteria=hat) == questions.meets_criterion("Same hat.")
    assert asked(criteria=both) == questions.meets_criterion("Same hat. Same ink.")
    assert asked() == questions.consistent()


def test_one_pair_may_be_asked_two_questions():
    style = Ranking("i", "x", "g", "r", ("a", "b"), theme="Style")
    pairs, _ = label_pairs([style, Ranking("j", "x", "g", "r", ("b", "a"), theme="Outfit")])
    assert len({pair_key(pair) for pair in pairs}) == len(pairs) == 4
    labelled = {(shown(pair), "Style" in pair.question): pair.consistent for pair in pairs}
    assert labelled[frozenset("ra"), True]
    assert not labelled[frozenset("ra"), False]


def test_few_groups_fill_every_split():
    ties = [(f"g{i}", f"own {i}") for i in range(4)]
    splits = split_groups(ties, test_share=0.1)
    assert sorted(splits.values()) == ["test", "train", "train", "train"]
    large = [*ties, *[(f"h{i}", "shared") for i in range(20)]]
    assert sum(split == "test" for split in split_groups(large, test_share=0.1).values()) <= 4
    assert set(split_groups(ties, test_share=0.0).values()) == {"train"}


def test_splits_keep_what_is_shared_together_and_meet_their_shares():
    ties = [(f"g{i}", f"own {i}") for i in range(100)]
    ties += [("g1", "picture"), ("g2", "picture"), ("g2", "theme"), ("g3", "theme")]
    splits = split_groups(ties, test_share=0.2, seed=3)
    assert splits["g1"] == splits["g2"] == splits["g3"]
    assert sum(split == "test" for split in splits.values()) == pytest.approx(20, abs=2)
    shuffled = random.Random(0).sample(ties, len(ties))
    assert split_groups(shuffled, test_share=0.2, seed=3) == splits
    assert split_groups(ties, test_share=0.2, seed=4) != splits
