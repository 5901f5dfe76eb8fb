"""Rewards as the scorers of benchmarks: by name and `key=value` arguments, as a config has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pacorl.config.policy_run import RewardConfig
from pacorl.io.documents import parse_yaml
from pacorl.rewards import build_rewards, check_rewards
from pacorl.rewards.reward import Loads, Reward


def load_reward(kind: str, arguments: Sequence[str]) -> tuple[Reward, str]:
    """A loaded reward from its name and `key=value` arguments, and what names both.

    Raises:
        ValueError: if there is no such reward, or it takes other arguments.
    """
    import torch

    config = RewardConfig(name=kind, args=dict(_argument(text) for text in arguments))
    check_rewards([config], key="scorer")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (reward,) = build_rewards([config], judge=_NoJudge(), device=device).values()
    if isinstance(reward, Loads):
        reward.load()
    return reward, " ".join([kind, *arguments])


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"argument {text!r} is not of the form name=value")
    return name, parse_yaml(value, name=f"argument {text!r}")


class _NoJudge:
    """A scorer that is named as a reward has no judge; to ask a judge, the scorer is `judge`."""

    def verdicts(self, questions: Any) -> Any:
        raise ValueError("this reward asks a judge; score with --scorer judge instead")

    explain = verdicts
