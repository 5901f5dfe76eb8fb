"""Rewards by name. To add one: a class behind `rewards.reward.Reward` and a line in REWARDS.

A reward's options are the arguments of its class, `judge` and `device` aside, which the run gives. They are checked,
names and types, before any weights are loaded; a class refuses values out of range when it is made.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pacorl.rewards.clip import Aesthetic, PanelClipImage, PanelClipText, PickScore
from pacorl.rewards.consistency import Consistency, GridLayout, PanelMatch
from pacorl.rewards.dream import DreamSim
from pacorl.rewards.edits import EditConsistency
from pacorl.rewards.http import HttpScorer
from pacorl.rewards.jpeg import JpegSize
from pacorl.rewards.ocr import Ocr
from pacorl.rewards.reward import Reward, RewardError
from pacorl.rewards.user import UserMaker

if TYPE_CHECKING:
    import torch

    from pacorl.config.policy_run import RewardConfig
    from pacorl.judges.judge import Judge

REWARDS: dict[str, Callable[..., Reward]] = {
    "consistency": Consistency,
    "panel_match": PanelMatch,
    "grid_layout": GridLayout,
    "edit_consistency": EditConsistency,
    "panel_clip_text": PanelClipText,
    "panel_clip_image": PanelClipImage,
    "pick_score": PickScore,
    "aesthetic": Aesthetic,
    "dreamsim": DreamSim,
    "ocr": Ocr,
    "jpeg_size": JpegSize,
    "http": HttpScorer,
}

GIVEN = ("judge", "device")
"""Arguments that the run gives, and no config."""


def check_rewards(configs: Sequence[RewardConfig], *, key: str = "rewards") -> None:
    """Raises ValueError where a reward's name, or the name, type or range of an argument, is wrong.

    Loads no weights; runs the files of users' rewards.
    """
    for config in configs:
        maker = maker_of(config.name)
        args = _checked_args(config, maker, key=key)
        if not isinstance(maker, UserMaker):
            maker(**_given(maker, judge=None, device="cpu"), **args)


def asks_judge(config: RewardConfig) -> bool:
    """Whether a reward asks a judge, which it says by taking an argument `judge`. Runs the file of a user's reward."""
    return "judge" in _parameters(maker_of(config.name))


def build_rewards(
    configs: Sequence[RewardConfig], *, judge: Judge | None, device: str | torch.device = "cpu"
) -> Mapping[str, Reward]:
    """The configured rewards by their keys, in order; their weights are loaded later (`rewards.reward.smoke_test`).

    Args:
        judge: None if no reward asks one, or if they are made to check prompts only.
    """
    built = {}
    for config in configs:
        maker = maker_of(config.name)
        built[config.key] = maker(**_given(maker, judge=judge, device=device), **_checked_args(config, maker))
    return built


def maker_of(name: str) -> Callable[..., Reward]:
    """What makes the reward of that name: one of REWARDS, or a file's."""
    if ".py:" in name:
        return UserMaker(name)
    if name not in REWARDS:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        raise RewardError(
            f"rewards: {name!r} is none of {', '.join(sorted(REWARDS))}, and no path/to/file.py:Name"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )
    return REWARDS[name]


def _given(maker: Callable[..., Reward], **known: Any) -> dict[str, Any]:
    wanted = _parameters(maker)
    return {name: value for name, value in known.items() if name in wanted}


def _checked_args(config: RewardConfig, maker: Callable[..., Reward], *, key: str = "rewards") -> dict[str, Any]:
    where, parameters = f"{key}.{config.key}.args", _parameters(maker)
    known = [
        name
        for name, parameter in parameters.items()
        if name not in GIVEN and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in config.args:
        if name not in known and not (takes_any and name not in GIVEN):
            raise RewardError(f"{where}: unknown argument {name!r}; it takes {', '.join(known) or 'none'}")
    for name in known:
        if parameters[name].default is inspect.Parameter.empty and name not in config.args:
            raise RewardError(f"{where}: {name!r} is missing; this reward cannot do without it")
    hints = _hints(maker)
    return {name: _typed(value, hints.get(name, Any), f"{where}.{name}") for name, value in config.args.items()}


def _parameters(maker: Callable[..., Reward]) -> Mapping[str, inspect.Parameter]:
    return maker.parameters if isinstance(maker, UserMaker) else inspect.signature(maker).parameters


def _hints(maker: Callable[..., Reward]) -> Mapping[str, Any]:
    target: Any = maker.target if isinstance(maker, UserMaker) else maker
    try:
        return get_type_hints(target.__init__ if inspect.isclass(target) else target)
    except (NameError, TypeError, AttributeError):  # somebody's annotations need not resolve
        return {}


def _typed(value: Any, hint: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticUserError:  # a type that brings its own config
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise RewardError(f"{where}: {error.errors()[0]['msg']} (got {value!r})") from None
