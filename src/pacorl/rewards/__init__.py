"""Rewards by name. To add one: a class behind `rewards.reward.Reward` and a line in REWARDS.

A reward's options are the arguments of its class, `judge` and `device` aside, which the run gives. They are checked,
names and types, before any weights are loaded; a class refuses values out of range when it is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, get_args

from pacorl.config.table import Table
from pacorl.config.user_files import FORM, is_in_file
from pacorl.rewards.reward import Reward, RewardError
from pacorl.rewards.spec import RewardSpec, user_spec

if TYPE_CHECKING:
    import torch

    from pacorl.config.reward_section import MeasureConfig
    from pacorl.judge.judge import Judge

REWARDS: Table[Callable[..., Reward]] = Table(
    "reward",
    {
        "consistency": "pacorl.rewards.consistency:Consistency",
        "panel_match": "pacorl.rewards.consistency:PanelMatch",
        "reference": "pacorl.rewards.reference:Reference",
        "edit_consistency": "pacorl.rewards.consistency:EditConsistency",
        "panel_clip_text": "pacorl.rewards.clip:PanelClipText",
        "aesthetic": "pacorl.rewards.clip:Aesthetic",
    },
)
"""Name → class; `reward_spec` inspects its signature."""


def reward_spec(name: str) -> RewardSpec:
    """Find a reward by name: an entry of REWARDS, or `path/to/file.py:Name`, whose file is executed.

    Raises:
        RewardError: if there is no such reward.
    """
    if is_in_file(name):
        return user_spec(name)
    try:
        target = REWARDS.named(name)
    except ValueError as error:
        raise RewardError(f"rewards: {error}, or your own as {FORM}") from None
    return RewardSpec(target, target, signature(target).parameters)


def arguments() -> list[str]:
    """Describe the arguments that a config may set of each reward, with their values and defaults."""
    lines = []
    for name in REWARDS:
        spec = reward_spec(name)
        texts = []
        for argument, hint in spec.options.items():
            values = " | ".join(map(str, get_args(hint)))
            texts.append(f"{argument}: {values} = {spec.parameters[argument].default!r}".replace(":  =", " ="))
        lines.append(f"{name}: {', '.join(texts) or 'none'}")
    return lines


def check_rewards(configs: Sequence[MeasureConfig], *, key: str = "rewards") -> None:
    """Check the name of each reward, and the names, types and ranges of its arguments.

    Loads no weights.

    Raises:
        ValueError: naming the reward, the argument and the fault.
    """
    for config in configs:
        spec = reward_spec(config.name)
        args = spec.checked(config.args, at=f"{key}.{config.key}.args")
        if not is_in_file(config.name):  # making one runs more of a stranger's code than a check should
            spec.build(args, judge=None, device="cpu")


def asks_judge(config: MeasureConfig) -> bool:
    """Check whether a reward has an argument `judge`."""
    return "judge" in reward_spec(config.name).parameters


def build_rewards(
    configs: Sequence[MeasureConfig], *, judge: Judge | None, device: str | torch.device = "cpu"
) -> Mapping[str, Reward]:
    """Build the configured rewards by key, in order; weights load later (`rewards.reward.smoke_test`).

    Args:
        judge: None if no reward asks one, or if they are made to check prompts only.
    """
    rewards = {}
    for config in configs:
        spec = reward_spec(config.name)
        args = spec.checked(config.args, at=f"rewards.{config.key}.args")
        rewards[config.key] = spec.build(args, judge=judge, device=device)
    return rewards
