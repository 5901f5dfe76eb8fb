"""What an epoch does to the trainer's state, and what a checkpoint brings back of it."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl import PolicyTrainer
from pacorl.core.objectives.diffusion_nft import lag
from pacorl.grpo import builders, checkpoint
from pacorl.grpo.checkpoint import best_checkpoint, write_checkpoint
from pacorl.judge.http import HttpJudge
from pacorl.models.adapters import adapter_state
from pacorl.models.lora import read_lora

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from pacorl.types import Prompt

RED = ("rewards=[{name: red}]", "optimizer.lr=0.1")
Weights = dict[str, "Tensor"]


def red(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
    return [float(image.getpixel((0, 0))[0]) for image in images]  # type: ignore[index]


def trainer(folder: Path, *settings: str, resume: bool = False) -> PolicyTrainer:
    """A toy run with a reward that is a function; its folder's lock is given up."""
    with toy_world():
        made = PolicyTrainer(toy_config(folder, *RED, *settings), resume=resume, rewards={"red": red})
    made._open.close()
    return made


def copied(state: Mapping[str, Tensor]) -> Weights:
    return {name: value.clone() for name, value in state.items()}


def between(first: Mapping[str, Tensor], second: Mapping[str, Tensor], share: float) -> Weights:
    """first + share·(second − first)."""
    return {name: value + share * (second[name] - value) for name, value in first.items()}


def assert_equal(state: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, within: float = 0.0) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=within)


def test_nfts_sampling_policy_lags_by_the_steps_taken(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", "objective.name=diffusion_nft")
    assert made.lora.old is not None
    start = copied(made.lora.old.state)
    made.run_epoch()
    assert made.lora.step == 2
    assert_equal(made.lora.old.state, between(start, adapter_state(made.lora.transformer), 1 - lag(2)), within=1e-7)


def test_without_a_lag_each_epoch_is_sampled_by_the_policy_that_was_trained(tmp_path: Path) -> None:
    """And the second update of an epoch knows that the policy has moved since."""
    made = trainer(tmp_path / "run", "objective.name=awm")
    assert made.run_epoch()["velocity_change"] > 0
    trained = copied(adapter_state(made.lora.transformer))
    made.run_epoch()
    assert made.lora.old is not None
    assert_equal(made.lora.old.state, trained)


def test_bad_steps_are_counted_in_a_row(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    made.lora.bad_steps = 3
    made.run_epoch()
    assert made.lora.bad_steps == 0


def test_evaluations_come_before_the_first_epoch_after_the_last_and_every_so_many(tmp_path: Path) -> None:
    with toy_world():
        config = toy_config(tmp_path / "run", *RED, "epochs=5", "evaluation.every=2", "save_every=9")
        lines = metrics(PolicyTrainer(config, rewards={"red": red}).train().folder, "evaluation")
    assert [line["epoch"] for line in lines] == [0, 2, 4, 5]


def test_a_score_is_of_the_weights_that_are_saved_with_it(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run")
    for evaluates in (True, False):
        if evaluates:
            made.evaluate()
        made.save()
        state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{made.lora.step:06d}" / "state.json").read_text())
        assert (state["score"] is not None) == evaluates
        made.run_epoch()


def test_the_best_is_what_scored_highest(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", "keep_checkpoints=1")
    for score in (0.5, 0.9, 0.7):
        made.evaluated, made.score = made.epoch, score
        made.save()
        made.epoch, made.lora.step = made.epoch + 1, made.lora.step + 1
    folder = tmp_path / "run" / "checkpoints"
    assert best_checkpoint(folder) == folder / "step-000001"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-000001", "step-000002"]


def test_a_checkpoint_has_the_weights_of_its_save_and_a_later_save_has_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on while it is written, on a thread."""
    made = trainer(tmp_path / "run")
    trained = threading.Event()

    def write(*args: Any, **rest: Any) -> None:
        assert trained.wait(60)
        return write_checkpoint(*args, **rest)

    monkeypatch.setattr(checkpoint, "write_checkpoint", write)
    state = {"epoch": 0, "score": None}
    before = {name: value.clone() for name, value in made.lora.tensors().items()}
    path = made.checkpoints.save(state)
    for value in made.lora.tensors().values():
        value.add_(1)
    trained.set()
    made.checkpoints.finish()
    kept = load_file(path / checkpoint.TENSORS)
    assert kept.keys() == before.keys()
    assert all(torch.equal(kept[name], value) for name, value in before.items())
    monkeypatch.setattr(checkpoint, "write_checkpoint", Mock(side_effect=OSError(28, "No space left on device")))
    made.checkpoints.save(state)
    with pytest.raises(OSError, match="No space"):
        made.checkpoints.save(state)


def test_all_that_learns_comes_back(tmp_path: Path) -> None:
    """The adapter, its average, the policy that samples and the optimizer's moments."""
    settings = ("objective.name=awm", "optimizer.ema_decay=0.5")
    made = trainer(tmp_path / "run", *settings)
    made.run_epoch()
    made.save()
    back = trainer(tmp_path / "run", *settings, resume=True)
    assert (back.epoch, back.lora.step) == (made.epoch, made.lora.step)
    assert made.lora.old is not None
    assert back.lora.old is not None
    states = [
        [adapter_state(one.lora.transformer), one.lora.average.state, one.lora.old.state]  # type: ignore[union-attr]
        for one in (made, back)
    ]
    for first, second in zip(*states, strict=True):
        assert_equal(second, first)
    adapter, average, old = states[0]
    name = next(iter(adapter))
    assert not torch.equal(adapter[name], average[name])
    assert not torch.equal(adapter[name], old[name])
    moments = [one.lora.optimizer.state_dict()["state"] for one in (made, back)]
    assert moments[0].keys() == moments[1].keys() != set()
    assert all(torch.equal(moments[0][key]["exp_avg"], moments[1][key]["exp_avg"]) for key in moments[0])
    assert_equal(read_lora(tmp_path / "run" / "adapter").state, average)


def test_the_optimizer_is_the_configs_and_the_adapter_the_seeds(tmp_path: Path) -> None:
    states = []
    for name in ("one", "other"):
        torch.rand(3)  # whatever was drawn before
        made = trainer(tmp_path / name, "optimizer.betas=[0.5,0.6]", "optimizer.weight_decay=0.03")
        group = made.lora.optimizer.param_groups[0]
        assert (group["betas"], group["weight_decay"]) == ((0.5, 0.6), 0.03)
        states.append(adapter_state(made.lora.transformer))
    assert_equal(*states)


def test_held_out_measures_have_the_judge_of_the_evaluation(tmp_path: Path) -> None:
    judge, asks = "evaluation.judge=tiny", "evaluation.rewards=[{name: panel_match}]"
    with toy_world():
        made = PolicyTrainer(toy_config(tmp_path / "run", judge, asks))
    made.close()
    assert made.held_out["held_out/panel_match"].judge is not made.rewards["consistency"].judge  # type: ignore[attr-defined]


def test_both_judges_of_a_run_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judges = {name: Mock(spec=HttpJudge) for name in ("rewards", "held_out")}
    monkeypatch.setattr(builders, "open_judges", lambda config, *, remote, **place: judges if remote else {})
    trainer(tmp_path / "run").close()
    assert all(judge.close.called for judge in judges.values())
