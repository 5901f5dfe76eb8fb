"""The trainer as Python uses it: functions as rewards, listeners."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import Image
from tiny_runs import metrics
from toy_world import toy_config, toy_world

from pacorl import PolicyTrainer
from pacorl.config.base import ConfigError
from pacorl.grpo import scoring
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.report.page import write_report
from pacorl.types import Prompt


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    with toy_world():
        yield


def run(folder: Path, reward: str, *settings: str) -> PolicyConfig:
    """A run of the toy world of one epoch about a bear and a fox, with a function as its reward."""
    prompts = folder / "prompts.txt"
    prompts.write_text("a bear\na fox\n")
    sources = f"prompts={{train: {prompts}, evaluation: {prompts}}}"
    return toy_config(folder / "run", f"rewards=[{{name: {reward}}}]", sources, "epochs=1", *settings)


def red(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
    return [image.getpixel((0, 0))[0] / 255 for image in images]  # type: ignore[index]


def alike(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
    return [0.5] * len(images)


def half(prompts: Sequence[Prompt], images: Sequence[Image]) -> float:
    return 0.5


def unlike(images: Sequence[Image]) -> list[float]:
    return [0.5] * len(images)


def test_a_function_is_all_that_a_run_needs_and_listeners_follow_its_log(tmp_path: Path) -> None:
    heard: list[Mapping[str, Any]] = []
    config = run(tmp_path, "red", "epochs=2", "save_every=9")
    trainer = PolicyTrainer(config, rewards={"red": red}, listeners=[lambda trainer, line: heard.append(line)])
    assert trainer.config.judge is None
    result = trainer.train()
    (_, last) = metrics(result.folder, "evaluation")
    assert result.metrics["red"] == last["red"]
    kinds = [("evaluation", 0), ("epoch", 1), ("epoch", 2), ("evaluation", 2)]
    assert kinds == [(line["kind"], line["epoch"]) for line in heard]
    assert kinds == [(line["kind"], line["epoch"]) for line in result.history]
    assert all("red" in line or "reward/red/mean" in line for line in heard)
    assert result.before == result.history[0]
    assert "2 of 2 training prompts are measured on" in write_report(result.folder).read_text()
    assert (result.adapter / "adapter_model.safetensors").is_file()


def test_a_constant_reward_is_named_once_and_is_an_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = PolicyTrainer(run(tmp_path, "alike", "epochs=2"), rewards={"alike": alike}).train()
    assert len([line for line in caplog.messages if "'alike'" in line]) == 1
    assert [line["alarm/alike"] for line in metrics(result.folder, "epoch")] == [1.0, 1.0]
    assert "The monitor raised an alarm" in " ".join(write_report(result.folder).read_text().split())


def test_nan_is_a_warning_per_reward_with_its_prompt_and_an_alarm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()

    def spotty(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
        # The first two are trial images.
        bear = [prompt.text == "a bear" and next(calls) > 1 for prompt in prompts]
        return [float("inf") if is_bear else value for is_bear, value in zip(bear, red(prompts, images), strict=True)]

    monkeypatch.setattr(scoring, "MAX_MISSING", 0.5)
    config = run(tmp_path, "spotty", "epochs=2")
    result = PolicyTrainer(config, rewards={"spotty": spotty}).train()
    (said,) = [line for line in caplog.messages if "'spotty'" in line]
    assert re.search(r"evaluation .*prompts\.txt:1, 'a bear'", said)
    alarm = "alarm/not_finite/spotty"
    assert [line[alarm] for line in metrics(result.folder, "evaluation")] == [1.0, 1.0]
    samples = config.prompts_per_epoch * config.group_size
    for line in metrics(result.folder, "epoch"):
        assert line[alarm] == line["samples/missing"] * samples
    page = " ".join(write_report(result.folder).read_text().split())
    assert "<b>Not finite · spotty</b>" in page
    assert "1 image has no score" in page


@pytest.mark.parametrize(("function", "fault"), [(unlike, "TypeError"), (half, r"returned 0\.5")])
def test_a_wrong_function_is_named_in_one_line(tmp_path: Path, function: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=f"reward 'mine'.*{fault}") as refused:
        PolicyTrainer(run(tmp_path, "mine"), rewards={"mine": function})
    assert "\n" not in str(refused.value)


def test_functions_have_the_weights_of_the_config_which_names_each(tmp_path: Path) -> None:
    named = "rewards=[{name: twice, weight: 3.0, label: double}, {name: once}, {name: alike}]"
    config = toy_config(tmp_path / "run", named, "epochs=1")
    rewards = {
        "twice": lambda prompts, images: [2.0 * image.getpixel((0, 0))[0] for image in images],
        "once": lambda prompts, images: [image.getpixel((0, 0))[0] for image in images],
        "alike": alike,
    }
    with pytest.raises(ValueError, match="the function 'other' is no reward of the config"):
        PolicyTrainer(config, rewards={**rewards, "other": alike})
    trainer = PolicyTrainer(config, rewards=rewards)
    assert [(one.key, one.weight) for one in trainer.config.rewards] == [("double", 3.0), ("once", 1.0), ("alike", 1.0)]
    (line,) = metrics(trainer.train().folder, "epoch")
    assert line["reward/double/mean"] == pytest.approx(2 * line["reward/once/mean"])
    assert "alarm/alike" not in line, "there is something to learn from the others"


def test_another_function_does_not_take_over_in_the_middle_of_a_run(tmp_path: Path) -> None:
    """The change of a measure from before to after would be the change of its definition."""

    def other(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
        return [1 - value for value in red(prompts, images)]

    PolicyTrainer(run(tmp_path, "mine"), rewards={"mine": red}).train()
    longer = run(tmp_path, "mine", "epochs=2")
    with pytest.raises(ConfigError, match=r"code of mine was 'sha256 (\w+)' and is now 'sha256 (?!\1)\w+'"):
        PolicyTrainer(longer, rewards={"mine": other}, resume=True)
    PolicyTrainer(longer, rewards={"mine": red}, resume=True).train()


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_fault_of_a_reward_has_its_cause_and_its_record(tmp_path: Path, fails_at: int) -> None:
    """At the trial image and in the first epoch."""
    calls = count(1)

    def failing(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
        if next(calls) >= fails_at:
            raise KeyError("mine")
        return red(prompts, images)

    with pytest.raises(ValueError, match=r"reward 'failing': KeyError on .*prompts\.txt:") as fault:
        PolicyTrainer(run(tmp_path, "failing"), rewards={"failing": failing}).train()
    assert isinstance(fault.value.__cause__, KeyError)
