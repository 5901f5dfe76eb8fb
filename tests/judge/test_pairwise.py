"""Every question once, in order, and every answer where it belongs."""

from __future__ import annotations

import pytest
from asked import Asked
from PIL import Image

from pacorl.judge.pairwise import ask, ask_edits, ask_pairs, edit_score, mean_over_dimensions
from pacorl.types import Question, Verdict


def p_of(question: Question) -> float:
    shades = [int(image.getpixel((0, 0))) for image in question.images]
    return (shades[0] + 2 * shades[-1] + len(question.text)) / 1000


def shade(number: int) -> Image.Image:
    return Image.new("L", (4, 4), number)


def test_answers_about_pairs_are_found_by_set_pair_and_name() -> None:
    sets = [[shade(1), shade(2), shade(3)], [shade(9)], [shade(4), shade(5)]]
    texts = [{"style": "Style?", "logic": "Logic, too?"}, {"style": "S"}, {"style": "Is it?"}]
    judge = Asked(p_of)
    answers = ask_pairs(judge, sets, texts)
    assert [list(pairs) for pairs in answers] == [[(0, 1), (0, 2), (1, 2)], [], [(0, 1)]]
    for images, named, pairs in zip(sets, texts, answers, strict=True):
        for (i, j), verdicts in pairs.items():
            for name, text in named.items():
                assert verdicts[name].p_yes == p_of(Question((images[i], images[j]), text))
    # Sets first, then pairs, then names: the order decides which questions share a batch.
    assert [question.text for question in judge.questions] == ["Style?", "Logic, too?"] * 3 + ["Is it?"]


def test_a_judge_that_miscounts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Asked(p_of)
    monkeypatch.setattr(judge, "verdicts", lambda questions: [])
    with pytest.raises(ValueError, match="returned 0 verdicts for 1 questions"):
        ask(judge, {"only": Question((shade(10),), "A hero?")})


def test_an_edit_s_source_is_shown_at_the_edit_s_size() -> None:
    judge = Asked(p_of)
    first, second = ask_edits(judge, [(shade(10), Image.new("L", (8, 2), 20), "a"), (shade(10), shade(40), "b")])
    assert [question.images[0].size for question in judge.questions] == [(8, 2), (8, 2), (4, 4), (4, 4)]
    assert first["kept"].p_yes == p_of(judge.questions[0])
    assert second["followed"].p_yes == p_of(judge.questions[3])
    assert edit_score({"kept": 0.9, "followed": 0.4}) == pytest.approx(0.6)
    assert edit_score({"kept": 0.9, "followed": None}) is None


def test_dimensions_weigh_alike_however_many_criteria_they_have() -> None:
    answers = {("Style", "Ink"): Verdict(0.2), ("Style", "Paper"): Verdict(0.4), ("Logic", "Order"): Verdict(0.9)}
    assert mean_over_dimensions(answers).p_yes == pytest.approx((0.3 + 0.9) / 2)
    missing = Verdict(None, "asleep")
    assert mean_over_dimensions(answers | {("Logic", "Order"): missing}) is missing
