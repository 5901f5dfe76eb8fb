"""What every entry of REWARDS must do, and what a file of one's own may do instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asked import Asked
from PIL import Image
from tiny_sets import draw_grid, panels_of_prompt

from pacorl.config.reward_section import RewardConfig
from pacorl.core.questions import same_pose
from pacorl.rewards import REWARDS, asks_judge, build_rewards, check_rewards, reward_spec
from pacorl.rewards.reward import RewardError, scores_of, smoke_test
from pacorl.rewards.spec import INJECTED
from pacorl.testing import check_reward
from pacorl.tiny import world
from pacorl.types import Character, Prompt, Size

REQUIRED: dict[str, dict[str, Any]] = {"aesthetic": {"head": "head.pth"}}
"""Arguments without which a reward cannot be made."""
STAND_INS = ("panel_clip_text", "aesthetic")
"""Rewards that need weights; `tests/rewards` checks their contract with a stand-in."""
SET = world.set_prompts("dev", 1)[0]


def certain(p_yes: float | None) -> Asked:
    """A judge that says the same to everything, and the opposite to pasted references."""
    return Asked(lambda question: 1 - p_yes if p_yes is not None and question.text == same_pose() else p_yes)


def config_of(name: str, **args: Any) -> RewardConfig:
    return RewardConfig(name=name, args={**REQUIRED.get(name, {}), **args})


@pytest.fixture
def prompt(tmp_path: Path) -> Prompt:
    """A set of a known character and an edit in one, so that every reward of a judge can be asked of it."""
    source = tmp_path / "source.png"
    Image.new("RGB", (16, 16), "red").save(source)
    hero = Character("hero", "a hero", images=(source,))
    return Prompt(
        SET.id, SET.text, grid=SET.grid, panels=SET.panels, sources=(source,), characters=(hero,), references=(source,)
    )


def image() -> Image.Image:
    return draw_grid(panels_of_prompt(SET), SET.grid, 16)


@pytest.mark.parametrize("name", REWARDS)
def test_it_is_made_without_weights_and_is_a_reward(name: str) -> None:
    check_rewards([config_of(name)])
    (reward,) = build_rewards([config_of(name)], judge=Asked(lambda question: 1.0)).values()
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
    with pytest.raises(RewardError, match=rf"rewards\.{name}\.args\.colour: "):
        check_rewards([config_of(name, colour=1)])


@pytest.mark.parametrize("name", [name for name in REWARDS if asks_judge(RewardConfig(name=name))])
def test_a_reward_that_asks_a_judge_scores_by_it_and_is_missing_with_it(name: str, prompt: Prompt) -> None:
    for p_yes, score in ((1.0, 1.0), (0.0, 0.0), (None, None)):
        judge = certain(p_yes)
        (reward,) = build_rewards([config_of(name)], judge=judge).values()
        reward.check([prompt])
        assert scores_of(name, reward, [prompt], [image()]) == [score]
        assert judge.questions
        assert getattr(reward, "last_error") == ("no connection" if p_yes is None else "")  # noqa: B009


@pytest.mark.parametrize("name", [name for name in REWARDS if asks_judge(RewardConfig(name=name))])
def test_one_answer_that_is_missing_makes_the_score_missing(name: str, prompt: Prompt) -> None:
    """The first of a call."""
    asked, judge = count(), certain(1.0)
    silent = Asked(lambda question: judge.answer(question) if next(asked) else None)
    (reward,) = build_rewards([config_of(name)], judge=silent).values()
    assert scores_of(name, reward, [prompt], [image()]) == [None]


@pytest.mark.parametrize("name", [name for name in REWARDS if name not in STAND_INS])
def test_it_keeps_the_contract(name: str, prompt: Prompt) -> None:
    judge = Asked(lambda question: fmean(np.asarray(image).mean() / 255 for image in question.images))
    (reward,) = build_rewards([config_of(name)], judge=judge).values()
    images = [Image.blend(image(), Image.new("RGB", image().size, colour), 0.5) for colour in ("red", "white", "black")]
    check_reward(reward, [prompt] * 3, images)


def test_the_example_that_reads_words_keeps_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that reads as many letters of a sign as the image is bright."""

    def read(pixels: np.ndarray[Any, Any]) -> SimpleNamespace:
        return SimpleNamespace(txts=["open: NOW"[: int(pixels[0, 0, 2]) // 25]])

    monkeypatch.setitem(sys.modules, "rapidocr", SimpleNamespace(RapidOCR=lambda **options: read))
    example = Path(__file__).parents[2] / "examples/ocr_reward.py:Ocr"
    (reward,) = build_rewards([config_of(str(example))], judge=None).values()
    with pytest.raises(RewardError, match="prompt 4"):
        reward.check([Prompt(id=4, text="a fox")])
    smoke_test("ocr", reward, [Prompt(id=0, text='A sign that says "Open".')], size=Size(8, 8))
    images = [Image.new("RGB", (8, 8), (level, 0, 0)) for level in (50, 225, 0, 175)]
    prompts = [Prompt(id=number, text='Signs reading "Open now" and "NOW".') for number in range(4)]
    # "op" has the o of "now", and "open n" its n too.
    assert scores_of("ocr", reward, prompts, images) == pytest.approx(
        [(2 / 7 + 1 / 3) / 2, 1.0, 0.0, (5 / 7 + 1 / 3) / 2]
    )
    check_reward(reward, prompts, images)


def brightness(prompts: Sequence[Prompt], images: Sequence[Image.Image]) -> list[float]:
    return [float(np.asarray(image).mean()) for image in images]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda prompts, images: [0.5 for _ in images], "all images have the score 0.5"),
        (lambda prompts, images: brightness(prompts, images)[:-1], "returned 2 scores for 3 images"),
        (lambda prompts, images: sorted(brightness(prompts, images)), "in a batch of one"),
        (lambda prompts, images: brightness(prompts, images)[::-1], "in a batch of one"),
        (lambda prompts, images: [b / len(images) for b in brightness(prompts, images)], "in a batch of one"),
        (lambda prompts, images: [None for _ in images], "all images have the score None"),
    ],
)
def test_wrong_rewards_are_seen(wrong: Any, said: str) -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in ("white", "red", "black")]
    with pytest.raises((AssertionError, RewardError), match=said):
        check_reward(wrong, [SET] * 3, images)


def test_a_name_that_is_none_is_met_with_the_nearest() -> None:
    with pytest.raises(RewardError, match=r"'panel_mach'; did you mean 'panel_match'\?.* path/to/file\.py:NAME"):
        reward_spec("panel_mach")
