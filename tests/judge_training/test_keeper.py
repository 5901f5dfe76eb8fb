"""What a judge's run does beside learning, without a run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pacorl.judge_training.judge_config import JudgeConfig
from pacorl.judge_training.judge_trainer import RunKeeper
from pacorl.judge_training.loop import processes
from pacorl.runtime.logbook import Logbook
from pacorl.runtime.stopping import StopSignals


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gradients_that_are_not_finite_move_neither_weights_nor_moments(value: float) -> None:
    """With weight decay and earlier moments, which a gradient of 0 would let act."""
    processes()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    keeper = RunKeeper(Logbook(JudgeConfig(), main=False), StopSignals(), evaluates=False)
    for bad in (False, True):
        model(torch.ones(1, 2)).sum().backward()
        if bad:
            model.bias.grad.fill_(value)  # type: ignore[union-attr]
            before = [weight.detach().clone() for weight in model.parameters()]
            moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
        keeper.on_pre_optimizer_step(SimpleNamespace(device=torch.device("cpu")), None, None, model=model)  # type: ignore[arg-type]
        optimizer.step()
        assert keeper.bad_steps == bad
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, b["exp_avg"]) for a, b in zip(moments, optimizer.state.values(), strict=True))


def test_a_checkpoint_ends_a_line_of_the_log() -> None:
    """So that a resumed run logs the same lines, whatever the interval."""
    processes()
    keeper = RunKeeper(Logbook(JudgeConfig(), main=False), StopSignals(), evaluates=False)
    state, control = SimpleNamespace(global_step=5, max_steps=9), SimpleNamespace(should_save=True, should_log=False)
    assert keeper.on_step_end(SimpleNamespace(device=torch.device("cpu")), state, control).should_log  # type: ignore[arg-type]
