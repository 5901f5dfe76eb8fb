"""Signatures of rewards: options and use of a judge; and rewards of the user's own.

`name: path/to/file.py:Name` in a config is a reward without any installation:

    # file.py
    def redness(prompts, images, *, gain: float = 1.0):
        return [gain * np.asarray(image)[..., 0].mean() / 255 for image in images]

`Name` is a function of prompts and images, or a class whose instances are called with prompts and images. Its keyword
arguments are the reward's `args`; a class may ask for `judge` and `device`, and have `check(prompts)`, `load()` and
`panel_scores(prompts, images)` as ours do. A run and its `--dry-run` execute the file: name only trusted files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NotRequired, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from pacorl.config.user_files import blamed_on_code, users_value
from pacorl.io.documents import faults_of
from pacorl.rewards.reward import PanelScores, Reward, RewardError, named
from pacorl.types import Prompt

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

INJECTED = ("judge", "device")
"""Arguments that the run gives, and no config."""


@dataclass(frozen=True)
class RewardSpec:
    """Constructor and options of a reward."""

    make: Callable[..., Reward]
    target: Callable[..., Any]
    """The class or function whose annotations are the options' types."""
    parameters: Mapping[str, inspect.Parameter]

    @property
    def options(self) -> Mapping[str, Any]:
        """Argument → type, for the arguments that a config may set."""
        # A class declares its options in `__init__`. Users' annotations need not resolve.
        target: Any = self.target.__init__ if inspect.isclass(self.target) else self.target
        try:
            hints = get_type_hints(target)
        except (NameError, TypeError, AttributeError):
            hints = {}
        options = {}
        for name, parameter in self.parameters.items():
            if name not in INJECTED and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                options[name] = hints.get(name, Any)
        return options

    def checked(self, args: Mapping[str, Any], *, at: str) -> dict[str, Any]:
        """Validate the arguments by the reward's declared types.

        Args:
            at: The key of the arguments, for messages.

        Raises:
            RewardError: naming the unknown, missing or mistyped argument.
        """
        options = self.options
        types: dict[str, Any] = {}
        for name, hint in options.items():
            is_needed = self.parameters[name].default is inspect.Parameter.empty
            types[name] = hint if is_needed else NotRequired[hint]
        declare: Any = TypedDict
        arguments = declare("arguments", types)
        arguments.__pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        try:
            checked: dict[str, Any] = TypeAdapter(arguments).validate_python({**args})
        except ValidationError as error:
            faults = faults_of(error, unknown=lambda path: f"{path[0]}: unknown argument")
            raise RewardError(f"{at}.{faults}; it takes {', '.join(options) or 'none'}") from None
        return checked

    def build(self, args: Mapping[str, Any], *, judge: Judge | None, device: str | torch.device) -> Reward:
        """Build the reward, with the judge and device if it has such arguments."""
        injected = {"judge": judge, "device": device}
        return self.make(**{name: injected[name] for name in INJECTED if name in self.parameters}, **args)


def user_spec(name: str) -> RewardSpec:
    """Run the code of `path.py:Name`, and return the reward's spec.

    Raises:
        RewardError: if it cannot be run or lacks the name.
    """
    try:
        target = users_value(name)
    except ValueError as error:
        raise RewardError(f"rewards: {error}") from error
    where, _, attribute = name.rpartition(":")
    if not callable(target):
        raise RewardError(f"rewards: {where} has no function or class {attribute!r}")
    parameters = list(inspect.signature(target).parameters.items())
    if not inspect.isclass(target):
        del parameters[:2]  # a function's prompts and images
    return RewardSpec(partial(UserReward, target, name), target, dict(parameters))


class UserReward:
    """A user's function or class as a reward, with every fault of it named: the file, the line, the record."""

    def __init__(self, target: Callable[..., Any], spec: str, /, **args: Any) -> None:
        """
        Args:
            target: the function, or the class to be made.
            spec: its name, `path.py:Name` if it is in a file.
            args: keyword arguments of the function or class.
        """
        self.spec = spec
        with self._blamed("when it was made"):
            # An object that is called keeps its other methods.
            self.reward: Any = (
                target(**args) if inspect.isclass(target) else partial(target, **args) if args else target
            )
        if hasattr(target, "panel_scores"):
            self.panel_scores = self._panel_scores
            """The reward has parts."""

    def load(self) -> None:
        if hasattr(self.reward, "load"):
            with self._blamed("while loading"):
                self.reward.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if hasattr(self.reward, "check"):
            with self._blamed("while checking the prompts"):
                self.reward.check(prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> Any:
        with self._blamed(f"on {named(prompts)}"):
            result = self.reward(prompts, images)
            if isinstance(result, Iterator):
                return list(result)
            return result

    def _panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        with self._blamed(f"on {named(prompts)}"):
            scores: list[PanelScores] = self.reward.panel_scores(prompts, images)
            return scores

    def _blamed(self, when: str) -> AbstractContextManager[None]:
        """Convert exceptions of the block to RewardError with the file and line."""
        return blamed_on_code("reward", self.spec, f" {when}", fault=RewardError)
