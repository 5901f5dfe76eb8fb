from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asked import Asked
from PIL import Image

from pacorl.config.options import UsageError
from pacorl.core.calibration import Curve
from pacorl.core.questions import consistent
from pacorl.gate.calibrate import FEWEST, ask_comparisons, check_pairs, held_out_line
from pacorl.gate.paco_reward import PacoReward
from pacorl.judge import check_judge
from pacorl.judge.calibration import Calibration, read_calibration, threshold
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import all_panels, draw
from pacorl.types import Comparison, Question

TWO = (draw(all_panels()[0], 32), draw(all_panels()[1], 32))


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    calibration = Calibration("j", Curve(2.0, 0.5), {"panels": {4: 0.4, 16: 0.2}})
    calibration.save(path)
    assert read_calibration(path) == calibration
    assert read_calibration("") is None
    for curve in ({"temperature": 0, "bias": 0}, None):
        path.write_text(json.dumps({"judge": "j", "curve": curve}))
        with pytest.raises(ValueError, match=r"c\.json"):
            read_calibration(path)


@pytest.mark.parametrize(("panels", "least"), [(2, 0.4), (4, 0.4), (15, 0.4), (16, 0.2)])
def test_the_threshold_depends_on_the_number_of_panels(panels: int, least: float) -> None:
    calibration = Calibration("j", Curve(), {"panels": {4: 0.4, 16: 0.2}})
    assert threshold(calibration, None, panels=panels) == least
    assert threshold(calibration, 0.9, panels=panels) == 0.9


def test_thresholds_are_for_one_reference_and_the_plain_question() -> None:
    calibration = Calibration("j", Curve(), {"panels": {4: 0.4}, "references": {4: 0.3}})
    assert threshold(calibration, None, panels=4, references=[1]) == 0.3
    for case in ({"references": [3]}, {"references": [1, 1]}, {"references": [1], "plain": False}, {"plain": False}):
        with pytest.raises(ValueError, match="one character, one reference image and the plain question"):
            threshold(calibration, None, panels=4, **case)
        assert threshold(calibration, 0.5, panels=4, **case) == 0.5


def test_a_judge_of_the_calibrated_name_with_other_weights_is_refused() -> None:
    calibration = Calibration("j", Curve(), identity="sha256 0")
    calibration.check_judge("server", "other name", "sha256 0")
    with pytest.raises(UsageError, match="sha256 1"):
        calibration.check_judge("folder", "j", "sha256 1")


@pytest.mark.slow
def test_the_judge_of_a_config_and_of_a_script_is_calibrated(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    curve = Curve(3.0, 0.25)
    Calibration("tiny", curve, pairs=240).save(path)
    question = Question(TWO, consistent())
    plain = LocalJudge.from_pretrained("tiny").verdicts([question])[0].p_yes
    assert plain is not None
    with PacoReward.from_pretrained("tiny", calibration=path) as reward:
        assert reward.judge.verdicts([question])[0].p_yes == pytest.approx(curve(plain), abs=1e-6)
        assert reward.score_set(TWO).calibrated_on == 240


@pytest.mark.slow
def test_a_judge_is_compared_with_its_calibration_once_its_weights_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.json"
    Calibration("tiny", Curve(), identity="sha256 0").save(path)
    monkeypatch.setattr("pacorl.judge.identity_at", lambda source: "")  # as of a hub's name before its download
    check_judge("tiny", calibration=path)
    with pytest.raises(UsageError, match="sha256 0"):
        PacoReward.from_pretrained("tiny", calibration=path)


def test_a_missing_answer_ends_a_calibration(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    comparison = Comparison((tmp_path / "a.png",) * 2, "same?", consistent=True)
    with pytest.raises(RuntimeError, match="gave no answer: no connection"):
        ask_comparisons(Asked(lambda question: None), [comparison])


def test_too_few_pairs_of_a_label_are_refused() -> None:
    """Of twelve pairs a curve may call anything Yes."""
    pair = Comparison((Path("a.png"), Path("b.png")), "same?", consistent=True)
    labelled = [replace(pair, consistent=number < FEWEST) for number in range(2 * FEWEST)]
    check_pairs("http://judge", labelled)
    more = labelled[-FEWEST // 2 :]
    for pairs in (labelled[1:], labelled[:-1], [*labelled[1:], *more]):
        with pytest.raises(ValueError, match=f"{FEWEST} of each or more"):
            check_pairs("http://judge", pairs)


def test_a_curve_that_does_not_help_held_out_pairs_is_refused() -> None:
    random = np.random.default_rng(0)
    p_N = random.random(400)
    yes_N = random.random(400) < p_N
    with pytest.raises(ValueError, match="take the judge as it is"):
        held_out_line((p_N, yes_N))
    assert "held-out" in held_out_line((p_N**4, yes_N))
