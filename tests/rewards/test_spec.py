"""Rewards of one's own: what a plan may know without running them, and scripts that end by `sys.exit`."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pacorl.rewards import reward_spec
from pacorl.rewards.reward import RewardError
from pacorl.rewards.spec import parsed_spec
from pacorl.types import Prompt

MINE = """
import dataclasses, pathlib
from somewhere import imported
pathlib.Path(__file__).with_name("ran").touch()
assigned = imported

def red(prompts, images, strength: float, /, *, gain: print("evaluated") = print("evaluated too"), must):
    return [0.0 for _ in images]

@imported
class Wrapped:
    pass

class Asking:
    def __init__(self, judge, device, beauty=1.0):
        pass

class Plain:
    def __call__(self, prompts, images):
        return [0.0 for _ in images]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize(
    ("name", "asks"), [("red", False), ("Asking", True), ("Plain", False), ("imported", False), ("assigned", False)]
)
def test_a_file_is_searched_for_a_name_without_running_it(
    mine: Path, name: str, asks: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parsed_spec(f"{mine}:{name}")
    assert (spec.asks_judge, spec.is_users) == (asks, True)
    assert spec.checked({"any": 1}, at="args") == {"any": 1}
    assert not (mine.parent / "ran").exists()
    assert capsys.readouterr().out == ""


def test_what_a_text_lacks_is_said(mine: Path) -> None:
    with pytest.raises(RewardError, match=r"mine.py has no function or class 'green'"):
        parsed_spec(f"{mine}:green")
    mine.write_text("def red(:\n")
    with pytest.raises(RewardError, match=r"mine.py:red', line 1: SyntaxError"):
        parsed_spec(f"{mine}:red")
    with pytest.raises(RewardError, match=r"none.py is no file"):
        parsed_spec(f"{mine.with_name('none.py')}:red")


def test_a_reward_that_exits_is_a_fault(mine: Path) -> None:
    mine.write_text("import sys\ndef red(prompts, images):\n    sys.exit(0)\n")
    reward = reward_spec(f"{mine}:red").build({}, judge=None, device="cpu")
    with pytest.raises(RewardError, match=r"line 3: SystemExit on prompt 7"):
        reward([Prompt(id=7, text="x")], [Image.new("RGB", (4, 4))])
