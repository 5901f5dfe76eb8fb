"""What a judge's training says of its held-out pairs: paired intervals, a verdict, and which pairs these were."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pacorl.judge_training.held_out import HeldOut
from pacorl.report.compare import write_comparison
from pacorl.report.page import write_report
from pacorl.types import Comparison


def pairs(folder: Path, *, prompts: int, colour: str = "red") -> list[Comparison]:
    """Pairs of two images, Yes and No in turn."""
    folder.mkdir(exist_ok=True)
    image = folder / "a.png"
    Image.new("RGB", (8, 8), colour).save(image)
    return [
        Comparison((image, image), "Same?", consistent=number % 2 == 0, group=f"prompt {number // 6}")
        for number in range(prompts * 6)
    ]


def evaluate(folder: Path, comparisons: Sequence[Comparison], before: Sequence[float], after: Sequence[float]) -> Any:
    """The summary of a run with these answers, in its folder with a log."""
    lines = []
    for step, answers in ((0, before), (20, after)):
        held_out = HeldOut(comparisons, folder / "held_out")
        rows = dict(enumerate([*answers, *answers]))
        metrics = held_out.measure(rows, step)
        lines.append({"kind": "evaluation", "epoch": step, "step": step, **metrics, "seconds/evaluation": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {"steps": 20} | HeldOut(comparisons, folder / "held_out").summary()
    (folder / "summary.json").write_text(json.dumps(summary))
    return summary


def answers(comparisons: Sequence[Comparison], *, right: float, seed: int = 0) -> list[float]:
    """P(Yes) that is on the label's side for a share of the pairs."""
    rng = np.random.default_rng(seed)
    return [
        float(0.5 + (0.1 + 0.3 * rng.random()) * (1 if pair.consistent == (rng.random() < right) else -1))
        for pair in comparisons
    ]


@pytest.mark.parametrize(
    ("prompts", "before", "after", "words"),
    [(12, 0.5, 0.95, ", +0."), (12, 0.95, 0.5, ", −0."), (6, 0.5, 0.95, ", +0.")],
)
def test_the_words_have_the_paired_difference(
    tmp_path: Path, prompts: int, before: float, after: float, words: str
) -> None:
    given = pairs(tmp_path, prompts=prompts)
    answered = answers(given, right=after, seed=1)
    summary = evaluate(tmp_path, given, answers(given, right=before), answered)
    line, accuracy, auc, *few = summary["verdict"]
    assert [f"{6 * prompts} pairs of {prompts} prompts is uncertain by ±" in each for each in few] == [True] * (
        prompts < 8
    )
    # Few pairs give no verdict, however much better the answers look.
    is_better = words == ", +0." and not few
    assert ("better than before training by +0." in line, "not shown" in line) == (is_better, not is_better)
    assert f"on {6 * prompts} pairs of {prompts} prompts" in line
    assert words in accuracy
    share = np.mean([p_yes > 0.5 for p_yes in answered])
    assert f"Yes to {share:.0%} of them, and 50% are labelled Yes" in line
    assert "commoner label alone has 0.500" in accuracy
    assert auc.startswith("AUC 0.")
    assert (" to " in accuracy) == (prompts == 12)  # few prompts give no interval
    page = write_report(tmp_path).read_text("utf-8")
    assert f'<div class="verdict"><p>{line}</p>' in page
    # The worst pairs come first, with their images.
    assert [abs(pair["p_yes"] - pair["consistent"]) for pair in summary["worst"]] == sorted(
        (abs(p_yes - pair.consistent) for p_yes, pair in zip(answered, given, strict=True)), reverse=True
    )[:6]
    assert page.count('alt="Image 1 of the pair"') == 6


def test_pairs_without_groups_are_grouped_by_their_first_image(tmp_path: Path) -> None:
    """Nine images, each with two others."""
    given = []
    for number in range(18):
        first, second = (tmp_path / f"{name}.png" for name in (number // 2, f"other {number}"))
        for path in (first, second):
            Image.new("RGB", (8, 8)).save(path)
        given.append(Comparison((first, second), "Same?", consistent=number % 2 == 0))
    summary = evaluate(tmp_path, given, answers(given, right=0.5), answers(given, right=0.9))
    assert summary["after"]["auc"]["groups"] == summary["difference"]["auc"]["groups"] == 9


def test_answers_to_other_pairs_are_not_compared(tmp_path: Path) -> None:
    """As in a run that is resumed with another data.evaluation."""
    old, new = pairs(tmp_path / "old", prompts=9), pairs(tmp_path / "new", prompts=10, colour="blue")
    HeldOut(old, tmp_path / "held_out").measure(dict(enumerate([0.4] * 2 * len(old))), 0)
    now = HeldOut(new, tmp_path / "held_out")
    now.measure(dict(enumerate([0.4] * 2 * len(new))), 20)
    summary = now.summary()
    assert (summary["before"], summary["difference"]) == ({}, {})
    assert "from before" not in summary["verdict"][1]


def test_runs_with_different_test_data_are_told_apart(tmp_path: Path) -> None:
    first, second, third = tmp_path / "judge", tmp_path / "judge2", tmp_path / "judge3"
    small, large = pairs(tmp_path / "small", prompts=2), pairs(tmp_path / "large", prompts=9)
    for run, given in ((first, small), (second, large), (third, large)):
        run.mkdir()
        evaluate(run, given, answers(given, right=0.5), answers(given, right=0.6))
    page, lines = write_comparison([first, second])
    said = "The runs were evaluated differently: held-out pairs "
    assert lines[0].startswith(f"warning: {said}")
    assert said in page.read_text("utf-8").partition('<section id="results">')[0]
    page, lines = write_comparison([second, third])
    assert not any(line.startswith("warning") for line in lines)


def test_a_changed_image_or_question_is_different_data(tmp_path: Path) -> None:
    """The same paths and labels, but another picture, or another question about it."""
    digests = [HeldOut(pairs(tmp_path, prompts=2, colour=colour), tmp_path).digest for colour in ("red", "blue", "red")]
    assert digests[0] == digests[2] != digests[1]
    asked = [replace(pair, question="Is it the same fox?") for pair in pairs(tmp_path, prompts=2, colour="red")]
    assert HeldOut(asked, tmp_path).digest not in digests


def test_a_judge_that_orders_well_and_says_no_is_to_be_calibrated(tmp_path: Path) -> None:
    given = pairs(tmp_path, prompts=8)
    right = answers(given, right=0.9)
    for after, hint in ((right, False), ([p_yes / 2 for p_yes in right], True)):
        assert any("pacorl calibrate" in line for line in evaluate(tmp_path, given, right, after)["verdict"]) == hint
