"""A reward of one's own: `name: path/to/file.py:Name` in a config, no installation.

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
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pacorl.rewards.reward import RewardError, named
from pacorl.rewards.spec import RewardSpec
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

NAME = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_]\w*)")


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
    return RewardSpec(partial(_make, target, name, path), target, _parameters(target), is_users=True)


def _parameters(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """What may be given to it: all keyword arguments, a function's prompts and images aside."""
    parameters = dict(inspect.signature(target).parameters)
    injected = 0 if inspect.isclass(target) else 2
    return dict(list(parameters.items())[injected:])


def _make(target: Callable[..., Any], spec: str, path: Path, /, **args: Any) -> UserReward:
    with _blamed(spec, path, "when it was made"):
        made: Any = target(**args) if inspect.isclass(target) else partial(target, **args)
    return UserReward(made, spec=spec, path=path)


class UserReward:
    """Somebody's reward, with every fault of it named: the file, the line, the record."""

    def __init__(self, reward: Callable[..., Any], *, spec: str, path: Path) -> None:
        self.reward = reward
        self.spec = spec
        self.path = path

    def load(self) -> None:
        if hasattr(self.reward, "load"):
            with _blamed(self.spec, self.path, "while loading"):
                self.reward.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if hasattr(self.reward, "check"):
            with _blamed(self.spec, self.path, "while checking the prompts"):
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
def _blamed(spec: str, path: Path, when: str) -> Iterator[None]:
    """Within the block whatever is raised becomes a RewardError that names the file and its line."""
    try:
        yield
    except Exception as error:
        raise RewardError(_blame(spec, path, error, when)) from error


def _blame(spec: str, path: Path, error: Exception, when: str) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    at_line = f", line {lines[-1]}" if lines else ""
    return f"reward {spec!r}{at_line}: {type(error).__name__} {when}: {error}"


def _run(path: Path) -> ModuleType:
    if not path.is_file():
        raise RewardError(f"rewards: {path} is no file; a reward of your own is named path/to/file.py:Name")
    spec = importlib.util.spec_from_file_location(f"pacorl_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None  # always, of a .py file
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        at_line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise RewardError(_blame(f"{path}{at_line}", path, error, "when the file was run")) from error
    return module
