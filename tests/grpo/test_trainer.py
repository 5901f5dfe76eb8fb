"""The trainer as Python uses it: the example of its docstring, functions as rewards."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
from tiny_runs import metrics
from toy_world import toy_config, toy_world

import pacorl
from pacorl import PolicyTrainer


@pytest.mark.slow
def test_the_example_of_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = textwrap.dedent(inspect.getdoc(PolicyTrainer).partition("Example:\n")[2])  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(example, names)
    folder = tmp_path / str(names["folder"])
    epochs = metrics(folder, "epoch")
    assert len(epochs) == 2
    assert 0 < epochs[0]["reward/redness/mean"] < 1
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()


def test_a_function_joins_the_rewards_of_the_config_and_may_be_weighted_there(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", "rewards=[{name: twice, weight: 3.0, label: double}]", "epochs=1")
    rewards = {
        "twice": lambda prompts, images: [2.0 * image.getpixel((0, 0))[0] for image in images],
        "once": lambda prompts, images: [image.getpixel((0, 0))[0] for image in images],
    }
    with toy_world():
        trainer = PolicyTrainer(config, rewards=rewards)
        assert [(one.key, one.weight) for one in trainer.config.rewards] == [("double", 3.0), ("once", 1.0)]
        (line,) = metrics(trainer.train(), "epoch")
    assert line["reward/double/mean"] == pytest.approx(2 * line["reward/once/mean"])


def test_a_function_with_too_few_scores_is_named_before_anything_is_sampled(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run")
    with toy_world(), pytest.raises(ValueError, match="reward 'short' returned 0 scores for 1 image"):
        PolicyTrainer(config, rewards={"short": lambda prompts, images: []})


def test_the_package_exports_the_trainer_and_its_config() -> None:
    from pacorl.grpo import trainer
    from pacorl.grpo.policy_config import PolicyConfig

    assert pacorl.PolicyTrainer is trainer.PolicyTrainer
    assert pacorl.PolicyConfig is PolicyConfig
