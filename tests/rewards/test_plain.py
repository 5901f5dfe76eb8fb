"""Rewards of a user's own file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scored import score

from pacorl.config.reward_section import RewardConfig
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import RewardError
from pacorl.types import Prompt

OWN = """
import numpy as np

def redness(prompts, images, *, gain: float = 1.0):
    return [gain * float(np.asarray(image)[..., 0].mean()) for image in images]

class Picky:
    def __init__(self, judge, words: list[str], device="cpu"):
        self.judge, self.words, self.device = judge, words, device

    def check(self, prompts):
        for prompt in prompts:
            if not prompt.theme:
                raise ValueError(f"prompt {prompt.id} has no theme")

    def __call__(self, prompts, images):
        return [1 / (len(prompt.text) - 5) for prompt in prompts]

def leaves(prompts, images):
    raise SystemExit(0)
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def build(name: str, **args: object) -> dict[str, object]:
    config = RewardConfig(name=name, args=args)
    check_rewards([config])
    return dict(build_rewards([config], judge="the judge"))  # type: ignore[arg-type]


def test_a_function_of_one_s_own(own: Path, prompts: list[Prompt], sheets: list[Image.Image]) -> None:
    built = build(f"{own}:redness", gain=2)
    expected = [2 * float(np.asarray(sheet)[..., 0].mean()) for sheet in sheets]
    assert list(built) == ["redness"]
    assert built["redness"](prompts, sheets) == expected  # type: ignore[operator]
    assert built["redness"](prompts[3:5], sheets[3:5]) == expected[3:5]  # type: ignore[operator]


def test_a_class_of_one_s_own_is_given_the_judge(own: Path) -> None:
    reward = build(f"{own}:Picky", words=["a"])["Picky"].reward  # type: ignore[attr-defined]
    assert (reward.judge, reward.words, reward.device) == ("the judge", ["a"], "cpu")


def test_its_faults_name_line_and_record(own: Path, sheets: list[Image.Image]) -> None:
    picky = build(f"{own}:Picky", words=["a"])
    with pytest.raises(
        ValueError, match="Picky', line 14: ValueError while checking the prompts: prompt 3 has no theme"
    ):
        picky["Picky"].check([Prompt(id=3, text="a")])  # type: ignore[attr-defined]
    batch = [Prompt(id=1, text="long enough"), Prompt(id=2, text="seven")]
    with pytest.raises(ValueError, match="line 17: ZeroDivisionError on prompt 1, prompt 2"):
        score(picky, batch, sheets[:2])  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="line 20: SystemExit on prompt 1, prompt 2"):
        score(build(f"{own}:leaves"), batch, sheets[:2])  # type: ignore[arg-type]
