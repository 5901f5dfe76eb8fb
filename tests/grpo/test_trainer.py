"""The trainer as Python uses it: the example of its docstring, functions as rewards."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import Image, new
from pydantic import ValidationError
from tiny_runs import JPEG_SIZE, metrics
from toy_world import toy_config, toy_world

from pacorl import PolicyTrainer
from pacorl.config import base as configs
from pacorl.config.base import ConfigError
from pacorl.grpo import scoring
from pacorl.grpo.inputs import run_inputs
from pacorl.grpo.policy_config import PolicyConfig
from pacorl.models.policies import POLICIES
from pacorl.report.page import write_report
from pacorl.rewards.reward import PanelScores
from pacorl.tiny.world import set_prompts
from pacorl.types import Prompt


@pytest.mark.slow
def test_the_example_of_the_docstring_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = textwrap.dedent(inspect.getdoc(PolicyTrainer).partition("Example:\n")[2])  # type: ignore[union-attr]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(example, names)
    result = names["result"]
    (epoch,) = metrics(result.folder, "epoch")
    assert 0 < epoch["reward/redness/mean"] < 1
    assert (result.adapter / "adapter_model.safetensors").is_file()


def red(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
    return [image.getpixel((0, 0))[0] / 255 for image in images]  # type: ignore[index]


def half(prompts: Sequence[Prompt], images: Sequence[Image]) -> float:
    return 0.5


def forgetful(prompts: Sequence[Prompt], images: Sequence[Image]) -> None:
    red(prompts, images)


def unlike(images: Sequence[Image]) -> list[float]:
    return [0.5] * len(images)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A run of the toy world, by the keys of its config."""
    keys = ("group_size", "adapter", "sampling", "evaluation", "optimizer", "model")
    document = toy_config(tmp_path / "run").model_dump(include={*keys})
    with toy_world():
        model = document.pop("model")
        yield {**document, "model": model, "trackers": [], "epochs": 1, "out": tmp_path / "run"}


def test_texts_and_functions_are_all_that_a_run_needs(settings: dict[str, Any]) -> None:
    trainer = PolicyTrainer("flux", rewards=[red], prompts=["a fox", "a bear", "an owl"], **settings)
    assert [prompt.text for prompt in trainer.train_prompts] == ["a fox", "a bear", "an owl"]
    assert trainer.config.prompts_per_epoch == 4  # whole updates, of which there are 2
    assert trainer.config.judge is None
    result = trainer.train()
    (_, last) = metrics(result.folder, "evaluation")
    assert result.metrics["red"] == last["red"]
    assert [line["kind"] for line in result.history] == ["evaluation", "epoch", "evaluation"]
    assert result.before == result.history[0]
    assert "3 of 3 training prompts are measured on" in write_report(result.folder).read_text()
    assert result.folder == settings["out"]
    assert (result.adapter / "adapter_model.safetensors").is_file()
    # Everything that the run reads is in its folder: another process goes on from it.
    config = configs.load(PolicyConfig, result.folder / "config.yaml")
    assert Path(config.prompts.train).parent == result.folder / "prompts"


def alike(prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
    return [0.5] * len(images)


def test_a_constant_reward_is_named_once_and_is_an_alarm(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    settings["epochs"] = 2
    result = PolicyTrainer("flux", rewards=[alike], prompts=["a fox", "a bear"], **settings).train()
    said = [line for line in caplog.messages if "reward 'alike' gave all images of each prompt one score" in line]
    assert len(said) == 1
    assert [line["alarm/alike"] for line in metrics(result.folder, "epoch")] == [1.0, 1.0]
    page = " ".join(write_report(result.folder).read_text().split())
    assert "The monitor raised an alarm" in page
    assert "there is nothing to learn. <span>After epoch 1, 2 times until 2" in page


def test_nan_is_a_warning_per_reward_with_its_prompt_and_an_alarm(
    settings: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()

    def spotty(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        # The first call is the trial image's.
        bear = [prompt.text == "a bear" and next(calls) > 0 for prompt in prompts]
        return [float("inf") if is_bear else value for is_bear, value in zip(bear, red(prompts, images), strict=True)]

    settings["epochs"] = 2
    monkeypatch.setattr(scoring, "MAX_MISSING", 0.5)
    arguments = {"prompts": ["a bear", "a fox", "an owl"], **settings}
    result = PolicyTrainer("flux", rewards=[spotty], **arguments).train()
    (said,) = [line for line in caplog.messages if "returned NaN" in line]
    assert re.match(
        "evaluation after epoch 0: reward 'spotty' returned NaN or an infinity for 1 of the images, first for "
        ".*jsonl:1, 'a bear'",
        said,
    )
    alarm = "alarm/not_finite/spotty"
    assert [line[alarm] for line in metrics(result.folder, "evaluation")] == [1.0, 1.0]
    for line in metrics(result.folder, "epoch"):
        assert line.get(alarm, 0.0) == line["samples/not_finite"] * 4 * settings["group_size"]
    assert any(alarm in line for line in metrics(result.folder, "epoch"))
    page = " ".join(write_report(result.folder).read_text().split())
    assert "<b>Not finite · spotty</b>, evaluation: the reward returned NaN or an infinity" in page
    assert "<small>n = 2</small><small>1 image has no score</small>" in page


def test_a_prompt_that_the_tiny_generator_does_not_know_is_named() -> None:
    (known,) = set_prompts("train", count=1, seed=0)
    foreign = replace(known, id=7, text="a hero in the rain", panels=())
    warning = POLICIES["flux"].foreign_prompt("tiny", [known, foreign])
    assert warning.startswith("prompt 7 ('a hero in the rain') is not of the tiny world")
    assert "unknown words, 'rain'" in warning
    assert POLICIES["flux"].foreign_prompt("tiny", [known]) == ""
    assert POLICIES["flux"].foreign_prompt("org/base", [foreign]) == ""


def test_a_resumed_run_keeps_its_prompts(settings: dict[str, Any]) -> None:
    PolicyTrainer("flux", rewards=[red], prompts=["a fox", "a bear"], **settings).train()
    more = {**settings, "epochs": 2}
    with pytest.raises(ValueError, match="holds a run already"):
        PolicyTrainer("flux", rewards=[red], prompts=["a fox", "an owl"], **more)
    with pytest.raises(ValueError, match=r"prompts\.train was .* and is now"):
        PolicyTrainer("flux", rewards=[red], prompts=["a fox", "an owl"], resume="auto", **more)
    PolicyTrainer("flux", rewards=[red], prompts=["a fox", "a bear"], resume="auto", **more).train()
    assert len(metrics(settings["out"], "epoch")) == 2


def test_prompts_and_evaluation_prompts_of_a_library_are_taken(settings: dict[str, Any]) -> None:
    prompts = set_prompts("train", 4)
    trainer = PolicyTrainer(
        "flux", rewards=[red], prompts=prompts, evaluation_prompts=set_prompts("dev", 2), **settings
    )
    trainer.close()
    sets = [(prompt.text, prompt.theme, prompt.grid, prompt.panels) for prompt in trainer.train_prompts]
    assert sets == [(prompt.text, prompt.theme, prompt.grid, prompt.panels) for prompt in prompts]
    assert [prompt.text for prompt in trainer.evaluation_prompts] == [p.text for p in set_prompts("dev", 2)]


def test_rewards_by_name_and_weights_join_functions(settings: dict[str, Any]) -> None:
    trainer = PolicyTrainer(
        "flux",
        rewards=[
            red,
            {"name": JPEG_SIZE, "weight": 0.5},
            {"name": JPEG_SIZE, "label": "small", "weight": 0.25, "args": {"prefer": "small"}},
        ],
        prompts=["a fox", "a bear"],
        **settings,
    )
    trainer.close()
    weights = {reward.key: reward.weight for reward in trainer.config.rewards}
    assert weights == {"red": 1.0, "jpeg_size": 0.5, "small": 0.25}


def test_a_recipe_brings_its_settings_and_the_arguments_change_keys(tmp_path: Path) -> None:
    inputs = run_inputs("tiny", rewards=[red], out=tmp_path, sampling={"batch": 6})
    recipe = PolicyConfig.from_yaml("tiny")
    assert inputs.config.sampling == recipe.sampling.model_copy(update={"batch": 6})
    assert [reward.key for reward in inputs.config.rewards] == ["red"]
    assert inputs.config.prompts == recipe.prompts
    assert run_inputs(recipe).config is recipe


def test_listeners_follow_the_log_and_may_end_the_run(settings: dict[str, Any]) -> None:
    heard: list[tuple[str, int, bool]] = []

    def listen(trainer: PolicyTrainer, line: Mapping[str, Any]) -> None:
        heard.append((line["kind"], line["epoch"], "red" in line or "reward/red/mean" in line))
        trainer.should_training_stop = trainer.epoch == 2

    run = {**settings, "epochs": 9, "save_every": 9}
    result = PolicyTrainer("flux", rewards=[red], prompts=["a fox", "a bear"], listeners=[listen], **run).train()
    assert heard == [("evaluation", 0, True), ("epoch", 1, True), ("epoch", 2, True), ("evaluation", 2, True)]
    assert (result.adapter / "adapter_model.safetensors").is_file()


def test_a_run_that_ends_before_its_first_epoch_has_an_adapter(settings: dict[str, Any]) -> None:
    def stop(trainer: PolicyTrainer, line: Mapping[str, Any]) -> None:
        trainer.should_training_stop = True

    result = PolicyTrainer("flux", rewards=[red], prompts=["a fox", "a bear"], listeners=[stop], **settings).train()
    assert not metrics(result.folder, "epoch")
    assert (result.adapter / "adapter_model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"lr": 1e-4}, "lr: unknown key, did you mean 'optimizer.lr'?"),
        ({"epochs": "many"}, "epochs: Input should be a valid integer"),
        ({"prompts": []}, "prompts is empty"),
        ({"prompts": ["a fox", 3]}, r"prompts\[1\]: a int"),
        ({"prompts": [{"text": "a fox"}]}, r"prompts\[0\]: 'prompt' is missing or empty"),
        ({"rewards": red}, r"give a list, e.g. rewards=\[red\]"),
        ({"rewards": [lambda prompts, images: []]}, "is named <lambda>"),
        ({"rewards": [red, red]}, "is named red"),
        ({"rewards": ["rednes"]}, "rewards: .*rednes"),
        ({"rewards": [unlike]}, r"reward 'unlike': TypeError on .* takes 1 "),
        ({"rewards": [half]}, r"reward 'half' returned 0\.5 and no list of scores for 1 image"),
        ({"rewards": [forgetful]}, r"reward 'forgetful' returned None, as a function without `return` does"),
    ],
)
def test_a_wrong_argument_is_one_line(settings: dict[str, Any], arguments: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as refused:
        PolicyTrainer("flux", **{"rewards": [red], "prompts": ["a fox", "a bear"], **settings, **arguments})
    assert not isinstance(refused.value, ValidationError)
    assert "\n" not in str(refused.value)


def test_a_function_joins_the_rewards_of_the_config_and_may_be_weighted_there(tmp_path: Path) -> None:
    config = toy_config(tmp_path / "run", "rewards=[{name: twice, weight: 3.0, label: double}]", "epochs=1")
    rewards = {
        "twice": lambda prompts, images: [2.0 * image.getpixel((0, 0))[0] for image in images],
        "once": lambda prompts, images: [image.getpixel((0, 0))[0] for image in images],
    }
    with toy_world():
        trainer = PolicyTrainer(config, rewards=rewards)
        assert [(one.key, one.weight) for one in trainer.config.rewards] == [("double", 3.0), ("once", 1.0)]
        (line,) = metrics(trainer.train().folder, "epoch")
    assert line["reward/double/mean"] == pytest.approx(2 * line["reward/once/mean"])


def test_another_function_does_not_take_over_in_the_middle_of_a_run(settings: dict[str, Any]) -> None:
    """The change of a measure from before to after would be the change of its definition."""

    def first(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        return [image.getpixel((0, 0))[0] / 255 for image in images]  # type: ignore[index]

    def second(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        return [1 - image.getpixel((0, 0))[0] / 255 for image in images]  # type: ignore[index]

    arguments: dict[str, Any] = {"prompts": ["a fox", "a bear"], **settings}
    PolicyTrainer("flux", rewards={"mine": first}, **arguments).train()
    arguments |= {"epochs": 2, "resume": "auto"}
    changed = r"code of mine was 'sha256 (\w+)' and is now 'sha256 (?!\1)\w+': .*--allow-changes .*allow_changes=True"
    with pytest.raises(ConfigError, match=changed):
        PolicyTrainer("flux", rewards={"mine": second}, **arguments)
    PolicyTrainer("flux", rewards={"mine": first}, **arguments).train()
    arguments |= {"epochs": 3, "allow_changes": True}
    result = PolicyTrainer("flux", rewards={"mine": second}, **arguments).train()
    assert set(metrics(result.folder, "changes")[-1]["changes"]) == {"epochs", "code of mine"}  # type: ignore[call-overload]


def test_an_object_s_scores_of_panels_are_used(settings: dict[str, Any]) -> None:
    class Halves:
        def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float]:
            return red(prompts, images)

        def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
            return [PanelScores(score, [score]) for score in red(prompts, images)]

    trainer = PolicyTrainer("flux", rewards={"halves": Halves()}, prompts=["a fox", "a bear"], **settings)
    trainer.close()
    assert trainer.config.advantages.credit == "panel"
    (scores,) = trainer.rewards["halves"].panel_scores(trainer.train_prompts[:1], [new("RGB", (8, 8), "red")])  # type: ignore[attr-defined]
    assert scores.part_P == [1.0]


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_fault_of_a_reward_has_its_cause_and_its_record(settings: dict[str, Any], fails_at: int) -> None:
    """At the trial image and in the first epoch."""
    calls = count(1)

    def failing(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
        if next(calls) >= fails_at:
            raise KeyError("mine")
        return red(prompts, images)

    with pytest.raises(ValueError, match=r"reward 'failing': KeyError on .*jsonl:") as fault:
        PolicyTrainer("flux", rewards=[failing], prompts=["a fox", "a bear"], **settings).train()
    assert isinstance(fault.value.__cause__, KeyError)
