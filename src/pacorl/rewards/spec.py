"""What a reward's signature says: its options, and whether it asks a judge; and rewards of one's own.

`name: path/to/file.py:Name` in a config is a reward without any installation:

    # file.py
    def redness(prompts, images, *, gain: float = 1.0):
        return [gain * np.asarray(image)[..., 0].mean() / 255 for image in images]

`Name` is a function of prompts and images, or a class whose instances are called with them. Its keyword arguments are
the reward's `args`; a class may ask for `judge` and `device`, and have `check(prompts)` and `load()` as ours do.
The file is run: name only what you trust.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pacorl.rewards.reward import Reward, RewardError, named
from pacorl.types import Prompt

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from pacorl.judges.judge import Judge

INJECTED = ("judge", "device")
"""Arguments that the run gives, and no config."""
NAME = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


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
        target: Any = self.target
        try:
            hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
        except (NameError, TypeError, AttributeError):  # somebody's annotations need not resolve
            hints = {}
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


def _typed(value: Any, hint: Any, at: str) -> Any:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticUserError:  # a type that brings its own config
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise RewardError(f"{at}: {error.errors()[0]['msg']} (got {value!r})") from None


# --- one's own -------------------------------------------------------------------------------------------------


def user_spec(name: str) -> RewardSpec:
    """The spec of the reward that `path.py:Name` names; runs the file.

    Raises:
        RewardError: if the file cannot be run or lacks it.
    """
    match = NAME.fullmatch(name)
    if not match:
        raise RewardError(f"rewards: {name!r} is not of the form path/to/file.py:Name")
    path = Path(match["path"])
    target = getattr(_run(path), match["name"], None)
    if not callable(target):
        raise RewardError(f"rewards: {path} has no function or class {match['name']!r}")
    parameters = list(inspect.signature(target).parameters.items())
    if not inspect.isclass(target):
        del parameters[:2]  # a function's prompts and images
    return RewardSpec(partial(UserReward, target, name, path), target, dict(parameters), is_users=True)


class UserReward:
    """Somebody's reward, with every fault of it named: the file, the line, the record."""

    def __init__(self, target: Callable[..., Any], spec: str, path: Path, /, **args: Any) -> None:
        self.spec, self.path = spec, path
        with self._blamed("when it was made"):
            self.reward: Any = target(**args) if inspect.isclass(target) else partial(target, **args)

    def load(self) -> None:
        if hasattr(self.reward, "load"):
            with self._blamed("while loading"):
                self.reward.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if hasattr(self.reward, "check"):
            with self._blamed("while checking the prompts"):
                self.reward.check(prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        try:
            return list(self.reward(prompts, images))
        except Exception as error:
            at_fault = self._at_fault(prompts, images)
            raise RewardError(_blame(self.spec, self.path, error, f"on {named(at_fault)}")) from error

    def _at_fault(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> Sequence[Prompt]:
        """The first prompt that raises alone; all if only the batch does."""
        for prompt, image in zip(prompts, images, strict=True):
            try:
                self.reward([prompt], [image])
            except Exception:
                return [prompt]
        return prompts

    @contextmanager
    def _blamed(self, when: str) -> Iterator[None]:
        """Within the block whatever is raised becomes a RewardError that names the file and its line."""
        try:
            yield
        except Exception as error:
            raise RewardError(_blame(self.spec, self.path, error, when)) from error


def _blame(spec: str, path: Path, error: Exception, when: str) -> str:
    # The last line within the file: the error itself often comes from a library that it calls.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    at_line = f", line {lines[-1]}" if lines else ""
    return f"reward {spec!r}{at_line}: {type(error).__name__} {when}: {error}"


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"rewards: {path} is no file; a reward of your own is named path/to/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"pacorl_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None  # always, of a .py file
    # Not put into sys.modules: a file that was mended is read anew, and shadows no other module.
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # A syntax error's traceback ends before the file begins, so its line is the error's own.
        at_line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise RewardError(_blame(f"{path}{at_line}", path, error, "when the file was run")) from error
    return module
