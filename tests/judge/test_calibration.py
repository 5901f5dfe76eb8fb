from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pacorl.core.calibration import Curve
from pacorl.core.questions import consistent, meets_criterion, same_theme, without_theme
from pacorl.judge import identity_of
from pacorl.judge.calibration import (
    Answers,
    Calibration,
    ask_comparisons,
    check_folds,
    cross_validated,
    fit_calibration,
    read_calibration,
    threshold,
)
from pacorl.judge.judge import JudgeSettings
from pacorl.judge.local import LocalJudge
from pacorl.judge.paco_reward import PacoReward
from pacorl.records.comparisons import comparisons_from
from pacorl.tiny.characters import all_panels, draw
from pacorl.types import Comparison, Question, Verdict

TWO = (draw(all_panels()[0], 32), draw(all_panels()[1], 32))


def answers(count: int, text: str, *, temperature: float, seed: int = 0) -> Answers:
    random = np.random.default_rng(seed)
    p_N = 1 / (1 + np.exp(-random.normal(0, 5, count)))
    yes_N = random.random(count) < Curve(temperature).of(p_N)
    return Answers((text,) * count, p_N, yes_N, tuple(str(number // 4) for number in range(count)))


def joined(first: Answers, second: Answers) -> Answers:
    return Answers(
        first.questions + second.questions,
        np.concatenate([first.p_N, second.p_N]),
        np.concatenate([first.yes_N, second.yes_N]),
        first.groups + tuple(f"second {group}" for group in second.groups),
    )


def test_each_question_with_enough_pairs_has_its_own_curve() -> None:
    both = joined(answers(400, "hat", temperature=2), answers(400, "colour", temperature=6, seed=1))
    calibration = fit_calibration(joined(both, answers(8, "rare", temperature=1)), judge="j")
    assert set(calibration.curves) == {"", "hat", "colour"}
    assert calibration.curve_of("hat").temperature < 3 < calibration.curve_of("colour").temperature
    assert calibration.curve_of("rare") == calibration.curves[""]


def test_a_theme_is_no_part_of_a_question() -> None:
    assert without_theme(same_theme("a fox")) == without_theme(same_theme("an owl")) != consistent()
    assert without_theme(meets_criterion("x")) == meets_criterion("x")


@pytest.mark.slow
def test_cross_validation_never_fits_on_the_group_that_it_measures() -> None:
    given = answers(400, "hat", temperature=4)
    before, after = given.errors(given.p_N, cross_validated(given))
    assert after.mean < before.mean / 2
    assert after.low is not None
    assert before.low is not None
    with pytest.raises(ValueError, match="2 groups of pairs are too few for 5 folds"):
        cross_validated(answers(8, "hat", temperature=1))


def test_a_question_about_any_theme_has_the_curve_of_its_question() -> None:
    own = Curve(3.0)
    calibration = Calibration("j", {"": Curve(), without_theme(same_theme("a fox")): own})
    assert calibration.curve_of(same_theme("an owl at night")) is own
    assert calibration.curve_of(consistent()) == Curve()
    question = Question((), same_theme("a cat"))
    (verdict,) = calibration.calibrated([question], [Verdict(0.9)])
    assert verdict.p_yes == pytest.approx(own(0.9))


def log_loss(p_N: np.ndarray, yes_N: np.ndarray) -> float:
    return float(-np.log(np.where(yes_N, p_N, 1 - p_N)).mean())


def test_cross_validation_of_random_labels_shows_no_gain() -> None:
    """Labels drawn by the judge's own P(Yes) leave nothing to learn. Curves of twenty questions, fitted on copies of a
    few pairs, lower the loss of these pairs, and cross-validation must not pass that for a better judge."""
    random = np.random.default_rng(0)
    questions, p, yes, groups = [], [], [], []
    for question in range(20):
        for group in range(20):
            chance = random.uniform(0.1, 0.9)
            label = random.random() < chance
            questions += [f"question {question}"] * 3
            p += [chance] * 3
            yes += [label] * 3
            groups += [f"{question}-{group}"] * 3
    order = random.permutation(len(p))
    given = Answers(
        tuple(questions[index] for index in order),
        np.array(p)[order],
        np.array(yes)[order],
        tuple(groups[index] for index in order),
    )
    own = log_loss(given.p_N, given.yes_N)
    assert log_loss(given.of(fit_calibration(given, judge="j")), given.yes_N) < 0.97 * own
    assert log_loss(cross_validated(given), given.yes_N) > own


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration = Calibration("j", {"": Curve(2.0, 0.5)}, {"panels": {4: 0.4, 16: 0.2}})
    calibration.save(path)
    assert read_calibration(path) == calibration
    assert read_calibration("") is None
    path.write_text(json.dumps({"judge": "j", "curves": {"": {"temperature": 0, "bias": 0}}}))
    with pytest.raises(ValueError, match=r"c\.json"):
        read_calibration(path)
    path.write_text(json.dumps({"judge": "j", "curves": {}}))
    with pytest.raises(ValueError, match="no entry"):
        read_calibration(path)


@pytest.mark.parametrize(("panels", "least"), [(2, 0.4), (4, 0.4), (15, 0.4), (16, 0.2), (99, 0.2)])
def test_the_threshold_depends_on_the_number_of_panels(panels: int, least: float) -> None:
    calibration = Calibration("j", {"": Curve()}, {"panels": {4: 0.4, 16: 0.2}})
    assert threshold(calibration, None, panels=panels) == least
    assert threshold(calibration, 0.9, panels=panels) == 0.9


def test_a_threshold_must_be_given_without_a_calibration() -> None:
    fault = "no threshold: give least, or a calibration that has thresholds"
    for calibration in (None, Calibration("j", {"": Curve()}, {"panels": {4: 0.4}})):
        with pytest.raises(ValueError, match=fault):
            threshold(calibration, None, panels=4, references=[1])


@pytest.mark.parametrize(("size", "least"), [("4", 7.0), ("4", -1.0), ("0", 0.5), ("-4", 0.5)])
def test_a_file_with_an_impossible_threshold_is_refused(tmp_path: Path, size: str, least: float) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"judge": "tiny", "curves": {"": {}}, "thresholds": {"panels": {size: least}}}))
    with pytest.raises(ValueError, match=rf"c\.json: thresholds\.panels\.{size} is {least:g};"):
        read_calibration(path)


def test_thresholds_are_for_one_reference_and_the_plain_question() -> None:
    calibration = Calibration("j", {"": Curve()}, {"panels": {4: 0.4}, "references": {4: 0.3}})
    assert threshold(calibration, None, panels=4, references=[1]) == 0.3
    for case in ({"references": [3]}, {"references": [1, 1]}, {"references": [1], "plain": False}, {"plain": False}):
        with pytest.raises(ValueError, match="one character, one reference image and the plain question"):
            threshold(calibration, None, panels=4, **case)
        assert threshold(calibration, 0.5, panels=4, **case) == 0.5


def test_the_question_of_a_failed_fit_is_named() -> None:
    wrong = answers(400, "hat", temperature=2)
    wrong = Answers(wrong.questions, 1 - wrong.p_N, wrong.yes_N, wrong.groups)
    with pytest.raises(ValueError, match=r"^the question 'hat': .* no higher for pairs labelled Yes"):
        fit_calibration(joined(wrong, answers(4000, "colour", temperature=2, seed=1)), judge="j")


def test_folds_are_checked_without_a_judge() -> None:
    pairs = [Comparison((Path(f"{number}.png"),), "same?", consistent=number > 0) for number in range(8)]
    with pytest.raises(ValueError, match=r"without fold \d of 5 there are \d pairs labelled Yes and 0 labelled No"):
        check_folds(pairs)
    with pytest.raises(ValueError, match="4 groups of pairs are too few for 5 folds"):
        check_folds(pairs[:4])


def test_a_calibration_of_another_judge_is_noted() -> None:
    for name, noted in (("tiny", False), ("other", True)):
        judge = LocalJudge.from_pretrained("tiny", calibration=Calibration("tiny", {"": Curve()}))
        assert ("The calibration is of the judge tiny" in PacoReward(judge, name=name).note) is noted


@pytest.mark.slow
def test_the_judge_of_a_config_and_of_a_script_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    curve = Curve(3.0, 0.25)
    Calibration("tiny", {"": curve}).save(path)
    question = Question(TWO, consistent())
    plain = LocalJudge.from_pretrained("tiny").verdicts([question])[0].p_yes
    assert plain is not None
    with PacoReward.from_pretrained("tiny", calibration=path) as reward:
        assert reward.judge.verdicts([question])[0].p_yes == pytest.approx(curve(plain), abs=1e-6)
        assert reward.score_set(TWO).calibrated
        assert "uncalibrated" not in str(reward.score_set(TWO))
    assert "uncalibrated" in str(PacoReward(LocalJudge.from_pretrained("tiny")).score_set(TWO))

    from pacorl.judge import open_judge

    opened = open_judge(JudgeSettings(checkpoint="tiny", dtype="float32", calibration=str(path)), device="cpu")
    assert opened.verdicts([question])[0].p_yes == pytest.approx(curve(plain), abs=1e-6)


def test_another_calibration_is_another_judge_for_a_run(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    identities = {identity_of(JudgeSettings(checkpoint="tiny"))}
    for bias in (0.0, 1.0):
        Calibration("tiny", {"": Curve(1.0, bias)}).save(path)
        identities.add(identity_of(JudgeSettings(checkpoint="tiny", calibration=str(path))))
    assert len(identities) == 3
    assert all(identities)


class Silent:
    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        return [Verdict(None, "no power") for _ in questions]

    def explain(self, question: Question) -> str:
        return ""


def test_a_missing_answer_ends_a_calibration(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    comparison = Comparison((tmp_path / "a.png",) * 2, "same?", consistent=True)
    with pytest.raises(RuntimeError, match="gave no answer: no power"):
        ask_comparisons(Silent(), [comparison])


@pytest.mark.slow
def test_the_error_of_the_tiny_judge_halves_on_held_out_pairs(tmp_path: Path) -> None:
    judge = LocalJudge.from_pretrained("tiny")
    dev = ask_comparisons(judge, comparisons_from("tiny:dev:300", scratch=tmp_path))
    test = ask_comparisons(judge, comparisons_from("tiny:test:300", scratch=tmp_path))
    before, after = test.errors(test.p_N, test.of(fit_calibration(dev, judge="tiny")))
    assert after.mean < before.mean / 2
