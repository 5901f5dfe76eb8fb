"""Rewards by name. To add one: a class behind `rewards.reward.Reward` and a line in REWARDS."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from pacorl.rewards.consistency import Consistency, PanelMatch
from pacorl.rewards.reward import Reward

if TYPE_CHECKING:
    from pacorl.config import RewardConfig
    from pacorl.models.judge import Judge

REWARDS: dict[str, Callable[..., Reward]] = {"consistency": Consistency, "panel_match": PanelMatch}


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Raises ValueError where a reward's name or arguments are unknown."""
    for config in configs:
        if config.name not in REWARDS:
            raise ValueError(f"rewards: {config.name!r} is none of {', '.join(sorted(REWARDS))}")
        known = [name for name in signature(REWARDS[config.name]).parameters if name != "judge"]
        for name in config.args:
            if name not in known:
                raise ValueError(
                    f"rewards.{config.name}.args: unknown argument {name!r}; it takes {', '.join(known) or 'none'}"
                )


def build_rewards(configs: Sequence[RewardConfig], *, judge: Judge) -> Mapping[str, Reward]:
    """The configured rewards, in order."""
    shared: dict[str, Any] = {"judge": judge}
    built = {}
    for config in configs:
        maker = REWARDS[config.name]
        wanted = {name: value for name, value in shared.items() if name in signature(maker).parameters}
        built[config.name] = maker(**wanted, **config.args)
    return built
