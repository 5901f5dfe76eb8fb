"""A judge's opinion: where scores begin, until people say otherwise."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from pacorl.cli import app
from pacorl.core.questions import same_theme
from pacorl.data.characters import Panel, draw
from pacorl.dataset.export import label
from pacorl.dataset.prior import PRIOR, judge_pairs, judged_scores, read_prior
from pacorl.dataset.records import Answer, Instance, read_pairs, write_records
from pacorl.dataset.scores import Scores, pair_of
from pacorl.io.documents import write_jsonl
from pacorl.io.images import open_image
from pacorl.score.reward import PacoReward
from pacorl.types import Question

NAMES = tuple("abcd")
QUESTIONS = [Instance("".join(two), "g", "r", two) for two in combinations(NAMES, 2)]
OPINION = {pair_of("r", name): p for name, p in zip(NAMES, (0.9, 0.6, 0.55, 0.1), strict=True)}


def ranked(*best_first: str, who: str = "ann") -> Answer:
    return Answer("".join(sorted(best_first)), who, "g", "r", best_first)


def order(scores: Scores) -> str:
    return "".join(next(name for name in pair.images if name != "r") for pair in scores.pairs())


def never() -> PacoReward:
    raise AssertionError("the judge was loaded")


def test_scores_begin_at_the_judges_opinion_and_people_have_the_last_word():
    assert order(Scores([], questions=QUESTIONS, p_yes=OPINION)) == "abcd"
    against = [ranked(*two[::-1], who=who) for two in combinations(NAMES, 2) for who in ("ann", "ben", "cat", "dan")]
    assert order(Scores(against, questions=QUESTIONS, p_yes=OPINION)) == "dcba"
    # A pair that was not judged begins at the mean; an opinion that is the same of all is none, and so is no file.
    without_a = {pair: p for pair, p in OPINION.items() if "a" not in pair}
    assert order(Scores([], questions=QUESTIONS, p_yes=without_a))[-1] == "d"
    plain = Scores(against, questions=QUESTIONS)
    same = Scores(against, questions=QUESTIONS, p_yes=dict.fromkeys(OPINION, 0.3))
    assert same.fit.score_I == pytest.approx(plain.fit.score_I, abs=1e-9)


def test_a_question_that_nobody_ranked_is_answered_by_the_others_about_its_pairs(tmp_path: Path):
    write_records(tmp_path / "instances.jsonl", QUESTIONS)
    write_records(tmp_path / "rankings.jsonl", [ranked("a", "b"), ranked("c", "b")])
    assert {one.instance for one in judged_scores(tmp_path, [ranked("a", "b")]).consensus()} == {"ab"}
    before = label(tmp_path, labels="scores").pairs
    write_jsonl(tmp_path / PRIOR, [{"images": pair, "p_yes": p} for pair, p in OPINION.items()])
    rankings = judged_scores(tmp_path, [ranked("a", "b"), ranked("c", "b")]).consensus()
    assert {one.instance: "".join(one.candidates) for one in rankings} == {"ab": "ab", "bc": "cb", "ac": "ac"}
    pairs = label(tmp_path, labels="scores").pairs
    assert {pair.images: pair.consistent for pair in pairs} != {pair.images: pair.consistent for pair in before}
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs  # a new prior makes new labels


def test_a_judge_is_asked_once_about_every_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    hero = Panel("red", "round", "crown", "night", "waving", "flag")
    panels = {"r": hero, "a": hero, "b": Panel("blue", "tall", "cap", "day", "jumping", "boat")}
    for name, panel in panels.items():
        draw(panel, 32).save(tmp_path / f"{name}.png")
    asked = [("1", "g", "r.png", ("a.png", "b.png"), "a hero"), ("2", "g", "a.png", ("r.png", "b.png"))]
    write_records(tmp_path / "instances.jsonl", [Instance(*question) for question in asked])
    assert judge_pairs(tmp_path, never, name="tiny", dry_run=True) == {"pairs": 3}
    assert judge_pairs(tmp_path, PacoReward.from_pretrained, name="tiny") == {"pairs": 3, "missing": 0}
    p_yes = read_prior(tmp_path)
    assert p_yes["a.png", "r.png"] > p_yes["b.png", "r.png"]
    with PacoReward.from_pretrained("tiny") as reward:
        images = tuple(open_image(tmp_path / name) for name in ("b.png", "r.png"))
        (verdict,) = reward.judge.verdicts([Question(images, same_theme("a hero"))])
    assert p_yes["b.png", "r.png"] == pytest.approx(verdict.p_yes, abs=1e-6)
    assert judge_pairs(tmp_path, never, name="tiny") == {"pairs": 3, "missing": 0}
    app(["dataset", "prior", str(tmp_path), "--dry-run", "--json"], standalone_mode=False)
    assert '"pairs": 3' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"images": ["a", "b"]}, "p_yes"),
        ({"images": ["a"], "p_yes": 0.5}, "images"),
        ({"images": ["a", "b"], "p_yes": 1.5}, "p_yes.*less than or equal to 1"),
        ({"images": ["a", "b"], "p_yes": True}, "p_yes"),
        ({"images": ["a", "c"], "p_yes": 0.5}, "already judged"),
    ],
)
def test_a_malformed_prior_is_named(tmp_path: Path, row: dict[str, object], fault: str):
    write_jsonl(tmp_path / PRIOR, [{"images": ["a", "c"], "p_yes": 1}, row])
    with pytest.raises(ValueError, match=rf"prior.jsonl, record 2: .*{fault}"):
        read_prior(tmp_path)
