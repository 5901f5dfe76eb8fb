"""Agreement within and across the sets of an epoch, in runs of the toy world."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_runs import metrics
from toy_world import ToyJudge, toy_config, toy_world

from pacorl.core.set_scores import kappa
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.types import Question, Verdict

SHORT = ["epochs=1", "evaluation.every=0", "prompts.evaluation=tiny:dev:1"]


def lines_of(folder: Path, *settings: str) -> list[dict[str, float]]:
    with toy_world():
        PolicyTrainer(toy_config(folder, *SHORT, *settings)).train()
    return metrics(folder)


def signs(line: dict[str, float]) -> list[float]:
    return [line[f"monitor/{name}"] for name in ("within", "across", "kappa") if f"monitor/{name}" in line]


def test_the_log_has_agreement_from_the_first_epoch(tmp_path: Path) -> None:
    evaluation, epoch, _ = lines_of(tmp_path / "run", "rewards=[{name: panel_match}]")
    within, across, beyond_chance = signs(epoch)
    assert 0 < across < 1
    assert beyond_chance == kappa(within, across)
    assert signs(evaluation) == []


def test_the_number_of_pairs_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 whatever the group's size, half within a set; more samples are more questions of the reward alone."""
    calls: list[int] = []
    verdicts = ToyJudge.verdicts

    def counted(self: ToyJudge, questions: Sequence[Question]) -> list[Verdict]:
        calls.append(len(questions))
        return verdicts(self, questions)

    monkeypatch.setattr(ToyJudge, "verdicts", counted)
    for group_size in (2, 8):
        calls.clear()
        lines_of(tmp_path / str(group_size), "rewards=[{name: panel_match}]", f"group_size={group_size}")
        assert calls.count(128) == 1
