"""Signatures of rewards: options and use of a judge; and rewards of the user's own.

`name: path/to/file.py:Name` in a config is a reward without any installation:

    # file.py
    def redness(prompts, images, *, gain: float = 1.0):
        return [gain * np.asarray(image)[..., 0].mean() / 255 for image in images]

`Name` is a function of prompts and images, or a class whose instances are called with prompts and images. Its keyword
arguments are the reward's `args`; a class may ask for `judge` and `device`, and have `check(prompts)`, `load()` and
`panel_scores(prompts, images)` as ours do. The file is run when a run begins: name only trusted files. `--dry-run` does
not run it, so it checks names and arguments, not their types.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from pacorl.config.user_files import FAULTS, file_and_name, line_in, users_value
from pacorl.io.documents import read_text
from pacorl.rewards.reward import PanelScores, Reward, RewardError, ScoresPanels, listed, named
from pacorl.types import Prompt

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from pacorl.judge.judge import Judge

ANY_ARGUMENTS = {"args": inspect.Parameter("args", inspect.Parameter.VAR_KEYWORD)}
"""Parameters of a reward that takes any argument."""
INJECTED = ("judge", "device")
"""Arguments that the run gives, and no config."""


@dataclass(frozen=True)
class RewardSpec:
    """Constructor and options of a reward."""

    make: Callable[..., Reward]
    target: Callable[..., Any]
    """The class or function whose annotations are the options' types."""
    parameters: Mapping[str, inspect.Parameter]
    is_users: bool = False
    """Whether it comes from a file of the user's."""

    @classmethod
    def of(cls, target: Callable[..., Reward]) -> RewardSpec:
        """Create the spec of a built-in reward."""
        return cls(make=target, target=target, parameters=inspect.signature(target).parameters)

    @property
    def asks_judge(self) -> bool:
        return "judge" in self.parameters

    @property
    def options(self) -> Mapping[str, Any]:
        """Argument → type, for the arguments that a config may set."""
        # A class declares its options in `__init__`.
        target: Any = self.target
        try:
            hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
        except (NameError, TypeError, AttributeError):  # users' annotations need not resolve
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
        # Unknown names first, then missing ones, then types.
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
        """Build the reward, with the judge and device if it has such arguments."""
        injected = {"judge": judge, "device": device}
        return self.make(**{name: injected[name] for name in INJECTED if name in self.parameters}, **args)


def _typed(value: Any, hint: Any, at: str) -> Any:
    try:
        return TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value)
    except PydanticUserError:  # the type has its own config
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise RewardError(f"{at}: {error.errors()[0]['msg']} (got {value!r})") from None


# --- one's own -------------------------------------------------------------------------------------------------


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
    path = Path(where)
    parameters = list(inspect.signature(target).parameters.items())
    if not inspect.isclass(target):
        del parameters[:2]  # a function's prompts and images
    return RewardSpec(partial(UserReward, target, name, path), target, dict(parameters), is_users=True)


def parsed_spec(name: str) -> RewardSpec:
    """Parse a user's file like `user_spec`, without running it. The spec cannot be built, and knows no types.

    Raises:
        RewardError: if the file is no Python or lacks the name.
    """
    path, attribute = _file_and_name(name)
    try:
        tree = ast.parse(read_text(path))
    except SyntaxError as error:
        raise RewardError(f"reward {name!r}, line {error.lineno}: SyntaxError: {error.msg}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == attribute:
            return RewardSpec(_unbuilt, _unbuilt, _parameters(node.args, skip=2), is_users=True)  # prompts and images
        if isinstance(node, ast.ClassDef) and node.name == attribute:
            makers = [n.args for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            # Without one of its own, a base or a decorator may bring arguments along.
            parameters = _parameters(makers[0], skip=1) if makers else {}
            if makers or not (node.bases or node.decorator_list):
                return RewardSpec(_unbuilt, _unbuilt, parameters, is_users=True)
            return RewardSpec(_unbuilt, _unbuilt, ANY_ARGUMENTS, is_users=True)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.asname or node.name for node in ast.walk(tree) if isinstance(node, ast.alias)}
    if attribute not in bound:
        raise RewardError(f"rewards: {path} has no function or class {attribute!r}")
    return RewardSpec(_unbuilt, _unbuilt, ANY_ARGUMENTS, is_users=True)


def _parameters(arguments: ast.arguments, *, skip: int) -> dict[str, inspect.Parameter]:
    """List the arguments of a definition after the first `skip`; of defaults only their presence is known."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip([a.arg for a in positional[::-1]], arguments.defaults[::-1], strict=False))
    defaults |= {a.arg: d for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is not None}
    parameters = {}
    for argument in (*positional[skip:], *arguments.kwonlyargs):
        default = None if argument.arg in defaults else inspect.Parameter.empty
        parameters[argument.arg] = inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=default)
    return parameters | (ANY_ARGUMENTS if arguments.kwarg else {})


def _unbuilt(**args: Any) -> Any:
    raise AssertionError("a reward whose file is only parsed is not built")


class UserReward:
    """A user's function or class as a reward, with every fault of it named: the file, the line, the record."""

    def __init__(self, target: Callable[..., Any], spec: str, path: Path | None = None, /, **args: Any) -> None:
        """
        Args:
            target: the function, or the class to be made.
            spec: the reward's name.
            path: the file that holds it, for the lines of its faults.
            args: keyword arguments of the function or class.
        """
        self.spec = spec
        self.path = path
        with self._blamed("when it was made"):
            # An object that is called keeps its other methods, such as `panel_scores`.
            self.reward: Any = (
                target(**args) if inspect.isclass(target) else partial(target, **args) if args else target
            )

    def load(self) -> None:
        if hasattr(self.reward, "load"):
            with self._blamed("while loading"):
                self.reward.load()

    def check(self, prompts: Sequence[Prompt]) -> None:
        if hasattr(self.reward, "check"):
            with self._blamed("while checking the prompts"):
                self.reward.check(prompts)

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        scores: list[float | None] = self._result(self.reward, prompts, images)
        return scores

    def panel_scores(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[PanelScores]:
        """Score each image, with its parts if the reward has parts."""
        if isinstance(self.reward, ScoresPanels):
            parted: list[PanelScores] = self._result(self.reward.panel_scores, prompts, images)
            return parted
        return [PanelScores(score, None) for score in listed(self.spec, self(prompts, images), prompts)]

    def _result(self, score: Callable[..., Any], prompts: Sequence[Prompt], images: Sequence[Image]) -> Any:
        """Call the user's code, and convert exceptions to RewardError with the file, the line and the record."""
        try:
            result = score(prompts, images)
            return list(result) if isinstance(result, Iterator) else result
        except FAULTS as error:
            at_fault = self._at_fault(score, prompts, images)
            raise RewardError(self._blame(error, f"on {named(at_fault)}")) from error

    def _at_fault(
        self, score: Callable[..., object], prompts: Sequence[Prompt], images: Sequence[Image]
    ) -> Sequence[Prompt]:
        """Find the first prompt that raises alone; all if only the batch does."""
        for prompt, image in zip(prompts, images, strict=True):
            try:
                score([prompt], [image])
            except FAULTS:
                return [prompt]
        return prompts

    @contextmanager
    def _blamed(self, when: str) -> Iterator[None]:
        """Convert exceptions of the block to RewardError with the file and line."""
        try:
            yield
        except FAULTS as error:
            raise RewardError(self._blame(error, when)) from error

    def _blame(self, error: BaseException, when: str) -> str:
        line = line_in(self.path, error) if self.path else ""
        return f"reward {self.spec!r}{line}: {type(error).__name__} {when}: {error}"


def _file_and_name(name: str) -> tuple[Path, str]:
    try:
        return file_and_name(name)
    except ValueError as error:
        raise RewardError(f"rewards: {error}") from None
