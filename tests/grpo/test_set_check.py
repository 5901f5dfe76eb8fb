"""A run with a set judge: which advantages its check compares, when, and what it says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tiny_runs import metrics
from toy_world import TOY_JUDGE, ToyJudge, toy_config

from pacorl.core.metric_names import SET_CORRELATION
from pacorl.grpo.policy_config import EvaluationConfig
from pacorl.grpo.set_check import advantage_agreement
from pacorl.grpo.trainer import train_policy
from pacorl.judge.local import LocalOptions
from pacorl.types import Advantages, Question, Verdict

pytestmark = pytest.mark.usefixtures("toy")


class ToySetJudge(ToyJudge):
    """Answers about the pairs of sets by another formula, unless it is to answer pair by pair."""

    def __init__(self, *, turned: bool) -> None:
        self.turned = turned
        self.reads_sets = True
        self.asked: list[bool] = []

    @contextmanager
    def pair_by_pair(self) -> Iterator[None]:
        self.reads_sets = False
        try:
            yield
        finally:
            self.reads_sets = True

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        verdicts = super().verdicts(questions)
        for number, question in enumerate(questions):
            if self.reads_sets and question.panels:
                p_yes = verdicts[number].p_yes or 0.0
                verdicts[number] = Verdict(1 - p_yes if self.turned else 0.9 * p_yes)
        self.asked += [self.reads_sets for question in questions if question.panels]
        return verdicts


@pytest.fixture
def judge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ToySetJudge:
    judge = ToySetJudge(turned=request.param)
    monkeypatch.setattr("toy_world.ToyJudge", lambda: judge)
    assert TOY_JUDGE.open(LocalOptions()) is judge
    return judge


RUN = ["epochs=3", "evaluation.every=0", "advantages.credit=panel", "judge.set_check_every=2"]


@pytest.mark.parametrize("judge", [False], indirect=True)
def test_the_advantages_of_an_epoch_are_compared_with_the_pair_judges(judge: ToySetJudge, tmp_path: Path) -> None:
    """Nine tenths of every P(Yes) are the same advantages."""
    run = train_policy(toy_config(tmp_path / "run", *RUN))
    checked = [epoch.get(SET_CORRELATION) for epoch in metrics(run, "epoch")]
    assert checked == [pytest.approx(1, abs=0.02), None, pytest.approx(1, abs=0.02)]
    # 8 sets of 6 pairs in each of 3 epochs, asked about again in two of them; evaluations are judged pair by pair.
    assert judge.asked.count(True) == 3 * 48
    assert judge.asked.count(False) > 2 * 48


@pytest.mark.parametrize("judge", [True], indirect=True)
def test_a_set_judge_that_disagrees_is_warned_of_once(
    judge: ToySetJudge, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewards = "rewards=[{name: consistency}]"
    with caplog.at_level(logging.WARNING):
        run = train_policy(toy_config(tmp_path / "run", *RUN, rewards, "judge.set_check_every=1"))
    assert all(epoch[SET_CORRELATION] < -0.9 for epoch in metrics(run, "epoch"))
    warnings = [message for message in caplog.messages if "judge.set_judge" in message]
    assert len(warnings) == 1
    assert "epoch 1: by judge.set_judge the advantages correlate by -" in warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize("judge", [False], indirect=True)
def test_no_check_changes_what_is_learned(judge: ToySetJudge, tmp_path: Path) -> None:
    lines = []
    for every in (0, 1):
        run = train_policy(toy_config(tmp_path / str(every), *RUN, f"judge.set_check_every={every}"))
        epochs = metrics(run, "epoch")
        assert [SET_CORRELATION in epoch for epoch in epochs] == [bool(every)] * 3
        lines.append([{name: value for name, value in epoch.items() if name != SET_CORRELATION} for epoch in epochs])
    assert lines[0] == lines[1]


def test_panels_count_where_they_have_advantages() -> None:
    used = torch.tensor([True, True, False])
    whole = Advantages(torch.tensor([1.0, -1.0, 9.0]), used, {})
    assert advantage_agreement(whole, whole) == pytest.approx(1)
    value_LBP = torch.tensor([[[1.0, 2.0], [-2.0, 0.5], [7.0, 7.0]]])
    first = Advantages(whole.value_B, used, {}, value_LBP=value_LBP)
    second = Advantages(whole.value_B, used, {}, value_LBP=-value_LBP)
    assert advantage_agreement(first, second) == pytest.approx(-1)
    constant = Advantages(torch.zeros(3), used, {})
    assert advantage_agreement(whole, constant) is None


def test_evaluations_refuse_it() -> None:
    held_out = {"backend": "local", "checkpoint": "tiny", "set_judge": "runs/set"}
    with pytest.raises(ValueError, match=r"leave evaluation\.judge\.set_judge out"):
        EvaluationConfig.model_validate({"rewards": [{"name": "consistency"}], "judge": held_out})
