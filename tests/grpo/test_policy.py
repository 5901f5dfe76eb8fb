"""The policy loop through its real doors, and what survives a stop."""

import os
import signal
from pathlib import Path

import pytest
from tiny_runs import metrics, tiny_run, train_policy
from toy_world import toy_config, toy_world

from pacorl.grpo import checkpoint, epoch
from pacorl.grpo.trainer import PolicyTrainer
from pacorl.runtime.stopping import Interrupted


def test_a_run_that_is_told_to_stop_twice_still_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers repeat their signal; the second one comes while the state is saved."""
    config = toy_config(tmp_path / "run", "epochs=3", "evaluation.every=0")
    held: list[bool] = []
    draw_samples, save = epoch.draw_samples, PolicyTrainer.save

    def draw_and_stop(*arguments):  # type: ignore[no-untyped-def]
        os.kill(os.getpid(), signal.SIGTERM)
        return draw_samples(*arguments)

    def save_and_look(trainer):  # type: ignore[no-untyped-def]
        held.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
        save(trainer)

    monkeypatch.setattr(epoch, "draw_samples", draw_and_stop)
    monkeypatch.setattr(PolicyTrainer, "save", save_and_look)
    with toy_world(), pytest.raises(Interrupted, match="stopped after epoch 0, and saved"):
        train_policy(config)
    assert held == [True]


@pytest.mark.slow
@pytest.mark.usefixtures("toy")
def test_gradients_that_are_not_finite_are_skipped_then_stop_the_run(
    small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pacorl.grpo.lora_training.MAX_BAD_STEPS", 3)
    config = tiny_run([*small, "epochs=3"])
    plain = epoch.update_policy

    def broken(loss, *args, **kwargs):  # type: ignore[no-untyped-def]
        found = plain(loss, *args, **kwargs)
        next(p for p in loss.draw.policy.transformer.parameters() if p.grad is not None).grad.fill_(float("nan"))
        return found

    monkeypatch.setattr(epoch, "update_policy", broken)
    with pytest.raises(ValueError, match="3 optimizer steps in a row"):
        train_policy(config)
    assert metrics(config.out)[1]["skipped"] == 1.0
    assert checkpoint.checkpoints(config.out / "checkpoints")
