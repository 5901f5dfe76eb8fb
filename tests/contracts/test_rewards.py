"""What every entry of REWARDS must do, and what a file of one's own may do instead."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pacorl.config.policy_run import RewardConfig
from pacorl.data import characters
from pacorl.rewards import REWARDS, asks_judge, build_rewards, check_rewards, reward_spec
from pacorl.rewards.reward import RewardError, scores_of
from pacorl.rewards.spec import INJECTED
from pacorl.types import Prompt, Question, Verdict

REQUIRED: dict[str, dict[str, Any]] = {
    "http": {"url": "http://127.0.0.1:9"},
    "aesthetic": {"head": "head.pth"},
    "human_ranking": {"folder": "rankings"},
}
"""Arguments without which a reward cannot be made."""
SET = characters.character_prompts("dev", 1)[0]


class Certain:
    """A judge that says Yes to everything, and how often it was asked."""

    def __init__(self, p_yes: float | None = 1.0) -> None:
        self.p_yes, self.asked = p_yes, 0

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        self.asked += len(questions)
        return [Verdict(self.p_yes, "" if self.p_yes is not None else "asleep")] * len(questions)

    def explain(self, question: Question) -> str:
        return "Yes."


def config_of(name: str, **args: Any) -> RewardConfig:
    return RewardConfig(name=name, args={**REQUIRED.get(name, {}), **args})


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """A set and an edit in one, so that every reward of a judge can be asked of it."""
    Image.new("RGB", (16, 16), "red").save(tmp_path / "source.png")
    return Prompt(SET.id, SET.text, grid=SET.grid, panels=SET.panels, sources=(tmp_path / "source.png",))


def image() -> Image.Image:
    return characters.draw_grid([characters.Panel.parse(text) for text in SET.panels], SET.grid, 16)


@pytest.mark.parametrize("name", REWARDS)
def test_it_is_made_without_weights_and_is_a_reward(name: str) -> None:
    check_rewards([config_of(name)])
    (reward,) = build_rewards([config_of(name)], judge=Certain()).values()
    assert callable(reward)
    assert list(inspect.signature(reward.__call__).parameters)[:2] == ["prompts", "images"]
    reward.check([])


@pytest.mark.parametrize("name", REWARDS)
def test_every_option_has_a_type_that_a_config_is_held_to(name: str) -> None:
    spec = reward_spec(name)
    assert not set(spec.options) & set(INJECTED)
    assert Any not in spec.options.values()
    for option in spec.options:
        with pytest.raises(RewardError, match=rf"rewards\.{name}\.args\.{option}: .*\(got "):
            check_rewards([config_of(name, **{option: object()})])


@pytest.mark.parametrize("name", REWARDS)
def test_an_unknown_option_is_named(name: str) -> None:
    with pytest.raises(RewardError, match="unknown argument 'colour'"):
        check_rewards([config_of(name, colour=1)])


@pytest.mark.parametrize("name", [name for name in REWARDS if asks_judge(RewardConfig(name=name))])
def test_a_reward_that_asks_a_judge_scores_by_it_and_is_missing_with_it(name: str, prompt: Prompt) -> None:
    for p_yes, score in ((1.0, 1.0), (0.0, 0.0), (None, None)):
        judge = Certain(p_yes)
        (reward,) = build_rewards([config_of(name)], judge=judge).values()
        reward.check([prompt])
        assert scores_of(name, reward, [prompt], [image()]) == [score]
        assert judge.asked
        assert getattr(reward, "last_error") == ("asleep" if p_yes is None else "")  # noqa: B009


def test_a_name_that_is_none_is_met_with_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"'panel_mach'; did you mean 'panel_match'\?.* path/to/file\.py:Name"):
        reward_spec("panel_mach")


def test_a_file_of_one_s_own_is_a_spec_too(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def red(prompts, images, *, gain: float = 1.0):\n    return [gain for _ in images]\n"
        "class Asking:\n    def __init__(self, judge):\n        self.judge = judge\n"
        "    def __call__(self, prompts, images):\n        return [1.0 for _ in images]\n"
    )
    assert dict(reward_spec(f"{tmp_path}/mine.py:red").options) == {"gain": float}
    assert not reward_spec(f"{tmp_path}/mine.py:red").asks_judge
    assert reward_spec(f"{tmp_path}/mine.py:Asking").asks_judge
