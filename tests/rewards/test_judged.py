"""Rewards that ask a judge: by criteria and with contrast, and against questions asked one by one of the tiny judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from asked import Asked
from PIL import Image

from pacorl.core import questions
from pacorl.records.prompts import load_prompts
from pacorl.rewards.consistency import Consistency, Contrast, PanelMatch
from pacorl.rewards.reward import RewardError
from pacorl.types import Grid, Prompt

CRITERIA = {"Style": {"Ink": "one ink", "Paper": "one paper"}, "Logic": {"Order": "in order"}}


def answering(ink: list[float | None], paper: list[float | None], order: list[float | None]) -> Asked:
    texts = [questions.meets_criterion(text) for text in ("one ink", "one paper", "in order")]
    return in_turn(dict(zip(texts, (ink, paper, order), strict=True)))


def in_turn(answers: Mapping[str, Sequence[float | None]]) -> Asked:
    """Answers to each text, one after another."""
    given = {text: iter(values) for text, values in answers.items()}
    return Asked(lambda question: next(given[question.text]))


PROMPT = Prompt(id=5, text="a set", grid=Grid(1, 3), criteria=CRITERIA)
SHEET = Image.new("RGB", (48, 16))


def test_null_criteria_are_not_asked(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "A 1x3 grid.", "criteria": {"Style": {"Ink": "one ink", "Paper": null}, "Logic": null}}\n'
    )
    prompt = load_prompts(tmp_path / "a.jsonl")[0]
    judge = answering([0.2, 0.4, 0.6], [], [])
    assert Consistency(judge, ask="criteria")([prompt], [SHEET]) == [pytest.approx(0.4)]


def test_a_record_without_criteria_is_named() -> None:
    reward = Consistency(answering([], [], []), ask="criteria")
    with pytest.raises(ValueError, match=r"prompt 7: .* has no criteria"):
        reward.check([PROMPT, Prompt(id=7, text="a", grid=Grid(1, 2), criteria={"Style": {}})])


def test_criteria_weigh_alike_in_their_dimension_and_parts_are_the_pairs_of_each_panel() -> None:
    judge = answering([0.1, 0.2, 0.3], [0.5, 0.7, 0.9], [1.0, 0.0, 1.0])  # pairs 0.65, 0.225 and 0.8
    (found,) = Consistency(judge, ask="criteria").panel_scores([PROMPT], [SHEET])
    assert found.score == pytest.approx((0.65 + 0.225 + 0.8) / 3)
    assert found.part_P == pytest.approx([(0.65 + 0.225) / 3, (0.65 + 0.8) / 3, (0.225 + 0.8) / 3])
    assert len(judge.questions) == 9, "each question once"


def test_the_parts_of_a_missing_pair_are_missing() -> None:
    reward = Consistency(answering([0.1, None, 0.3], [0.5] * 3, [1.0] * 3), ask="criteria")
    (found,) = reward.panel_scores([PROMPT], [SHEET])
    assert found.score is None
    assert found.part_P is not None
    assert [part is None for part in found.part_P] == [True, False, True]
    # It is told at the end of an epoch, whose later sets may have all of their answers.
    answered = answering([0.1] * 3, [0.5] * 3, [1.0] * 3)
    reward.judge = answered
    reward([PROMPT], [SHEET])
    assert reward.last_error == "no connection"


# --- contrast --------------------------------------------------------------------------------------------------


def test_a_lone_sample_cannot_be_compared() -> None:
    with pytest.raises(RewardError, match=r"args\.contrast is 1\.0, and a call has one sample of prompt 5"):
        Contrast(Consistency(answering([], [], []), contrast=1.0), [0]).panel_scores([PROMPT], [SHEET])


@pytest.mark.parametrize("args", [{"contrast": -1.0}, {"contrast": math.inf}, {"partners": 0}])
def test_a_contrast_that_cannot_be_is_named(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"rewards\.consistency\.args\.{next(iter(args))}"):
        Consistency(answering([], [], []), **args)


def test_the_parts_of_panel_match_are_tempered_and_sum_up_to_the_score() -> None:
    prompt = Prompt(id=5, text="a set", grid=Grid(1, 3), panels=("one", "two", "three"))
    texts: dict[str, list[float | None]] = {
        questions.shows_text(text): [p_yes] for text, p_yes in zip(prompt.panels, (0.1, 0.5, 0.8), strict=True)
    }
    (found,) = PanelMatch(in_turn(texts), temperature=2.0).panel_scores([prompt], [SHEET])
    assert found.part_P == pytest.approx([0.25 / 3, 0.5 / 3, 2 / 3 / 3])
    assert found.score == pytest.approx(sum(part for part in found.part_P or () if part is not None))
    texts[questions.shows_text("two")] = [None]
    (missing,) = PanelMatch(in_turn(texts)).panel_scores([prompt], [SHEET])
    assert missing.score is None
