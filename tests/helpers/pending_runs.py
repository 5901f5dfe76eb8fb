"""A run of the toy world as each process of a world makes it, with the exit code of the command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import toy_world


def train(settings: Sequence[str], resume: str) -> None:
    """Ends the process as `pacorl train-policy` does."""
    from pacorl.cli import exit_code
    from pacorl.config import base as configs
    from pacorl.grpo.policy_config import PolicyConfig
    from pacorl.grpo.trainer import train_policy

    toy_world.install()
    config = configs.load(PolicyConfig, None, [*toy_world.SETTINGS, *settings])
    sys.exit(exit_code(lambda: train_policy(config, resume=resume) and 0))
