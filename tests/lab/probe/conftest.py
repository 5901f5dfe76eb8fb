"""Configs of the toy world for probes: two prompts of four samples, three steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_world import toy_config, toy_world

from pacorl.grpo.policy_config import PolicyConfig


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[Callable[..., PolicyConfig]]:
    """Makes a config with some settings changed; within the test it runs in the toy world."""
    with toy_world():
        yield lambda *overrides: toy_config(tmp_path / "run", *overrides)
