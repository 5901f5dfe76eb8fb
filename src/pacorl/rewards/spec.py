"""What a reward's signature says: its options, and whether it asks a judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pacorl.rewards.reward import Reward, RewardError

if TYPE_CHECKING:
    import torch

    from pacorl.judges.judge import Judge

INJECTED = ("judge", "device")
"""Arguments that the run gives, and no config."""


@dataclass(frozen=True)
class RewardSpec:
    """How a reward is made."""

    make: Callable[..., Reward]
    target: Callable[..., Any]
    """The class or function whose annotations are the options' types."""
    parameters: Mapping[str, inspect.Parameter]
    is_users: bool = False
    """Whether it comes from a file of the user's."""

    @classmethod
    def of(cls, target: Callable[..., Reward]) -> RewardSpec:
        """The spec of one of our own classes."""
        return cls(make=target, target=target, parameters=inspect.signature(target).parameters)

    @property
    def asks_judge(self) -> bool:
        return "judge" in self.parameters

    @property
    def options(self) -> Mapping[str, Any]:
        """Argument → type, of those that a config may give by name."""
        hints = self._hints()
        return {
            name: hints.get(name, Any)
            for name, parameter in self.parameters.items()
            if name not in INJECTED and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }

    def checked(self, args: Mapping[str, Any], *, at: str) -> dict[str, Any]:
        """The arguments as the types that the reward declares.

        Args:
            at: The key of the arguments, for messages.

        Raises:
            RewardError: naming an argument that is unknown, missing, or of another type.
        """
        options = self.options
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.parameters.values())
        for name in args:
            if name not in options and not (takes_any and name not in INJECTED):
                raise RewardError(f"{at}: unknown argument {name!r}; it takes {', '.join(options) or 'none'}")
        for name in options:
            if self.parameters[name].default is inspect.Parameter.empty and name not in args:
                raise RewardError(f"{at}: {name!r} is missing; this reward cannot do without it")
        return {name: _typed(value, options.get(name, Any), f"{at}.{name}") for name, value in args.items()}

    def build(self, args: Mapping[str, Any], *, judge: Judge | None, device: str | torch.device) -> Reward:
        """The reward, with the judge and the device if it asks for them."""
        injected = {"judge": judge, "device": device}
        return self.make(**{name: injected[name] for name in INJECTED if name in self.parameters}, **args)

    def _hints(self) -> Mapping[str, Any]:
        target: Any = self.target
        try:
            return get_type_hints(target.__init__ if inspect.isclass(target) else target)
        except (NameError, TypeError, AttributeError):  # somebody's annotations need not resolve
            return {}


def _typed(value: Any, hint: Any, at: str) -> Any:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticUserError:  # a type that brings its own config
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise RewardError(f"{at}: {error.errors()[0]['msg']} (got {value!r})") from None
