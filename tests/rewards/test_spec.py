"""Rewards of one's own: scripts that end by `sys.exit`."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from pacorl.rewards import reward_spec
from pacorl.rewards.reward import RewardError
from pacorl.types import Prompt


def test_a_reward_that_exits_is_a_fault(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import sys\ndef red(prompts, images):\n    sys.exit(0)\n")
    reward = reward_spec(f"{mine}:red").build({}, judge=None, device="cpu")
    with pytest.raises(RewardError, match=r"line 3: SystemExit on prompt 7"):
        reward([Prompt(id=7, text="x")], [Image.new("RGB", (4, 4))])
