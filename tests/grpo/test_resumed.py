"""A run that was stopped and goes on ends as one that was not: log, images, scores, samples and weights, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import metrics, train_policy, weights
from toy_world import toy_config

from pacorl import PolicyTrainer
from pacorl.grpo import evaluate
from pacorl.grpo.checkpoint import best_checkpoint
from pacorl.io.files import digests
from pacorl.runtime.stopping import Interrupted

pytestmark = pytest.mark.usefixtures("toy")

SETTINGS = ["epochs=3", "keep_checkpoints=9", "evaluation.every=0", "prompts.evaluation=tiny:dev:1"]


def outcome(run: Path) -> list[Any]:
    """What a run leaves, without what clocks say."""
    best = best_checkpoint(run / "checkpoints")
    return [metrics(run), digests(run / "samples"), weights(run), best and best.name]


@pytest.mark.slow
def test_a_stopped_epoch_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train_policy(toy_config(tmp_path / "whole", *SETTINGS))
    trainer = PolicyTrainer(toy_config(tmp_path / "run", *SETTINGS))

    def stop() -> None:
        if trainer.epoch == 1:
            raise Interrupted("told to stop")

    monkeypatch.setattr(trainer.runtime, "check_stop", stop)
    with pytest.raises(Interrupted):
        trainer.train()
    run = train_policy(toy_config(tmp_path / "run", *SETTINGS), resume="auto")
    assert outcome(run) == outcome(whole)


@pytest.mark.parametrize("epoch", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stopped_evaluation_leaves_no_trace(epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SETTINGS, "evaluation.every=1", "epochs=2"]
    whole = train_policy(toy_config(tmp_path / "whole", *settings))
    keep = evaluate.keep_samples

    def stop(*arguments: Any, **options: Any) -> None:
        keep(*arguments, **options)
        if options["epoch"] == epoch:
            raise Interrupted("told to stop")

    with monkeypatch.context() as patch:
        patch.setattr(evaluate, "keep_samples", stop)
        with pytest.raises(Interrupted):
            train_policy(toy_config(tmp_path / "run", *settings))
    for _ in range(2):  # a finished run that starts again has nothing left to do
        run = train_policy(toy_config(tmp_path / "run", *settings), resume="auto")
        assert outcome(run) == outcome(whole)
