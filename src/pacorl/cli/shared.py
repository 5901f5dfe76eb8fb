"""What the commands share: flags from groups of options (`config.options`), a progress bar, one form of JSON.

    @Commands().command()
    def score(images: list[str] = typer.Argument(help="…"), *, judge: JudgeOptions, output: OutputOptions) -> None:
        …

A parameter whose type is a group becomes the flags of its fields; the command gets the group, filled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, get_annotations, signature
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from pacorl.config.options import KEY, JudgeOptions, Option, inherited, option
from pacorl.io.terminal import printable, printable_json

INCOMPLETE = 3
"""Exit code if something has no judgement, or was left out because the user allowed it."""
BELOW = 4
"""Exit code if a score is below what was asked for."""
METAVARS: Mapping[type, str] = {bool: "", int: "N", float: "X", Path: "PATH"}
"""What the help calls the values of a type; those of all others are texts."""


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Whether a command prints for programs."""

    panel: ClassVar[str | None] = None

    as_json: bool = option(False, "Print JSON.", flags=("--json",))


@dataclass(frozen=True, kw_only=True)
class OnlyJudge(JudgeOptions):
    """The judge of a command without a generator, whose flags have short second names therefore."""

    judge_model: str = inherited(JudgeOptions, "judge_model", also=("--model",))
    judge_adapter: str = inherited(JudgeOptions, "judge_adapter", also=("--adapter",))


class SuggestingGroup(TyperGroup):
    """A group whose refusal of an unknown command also names the commands that begin with the word, or `--help`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if self.get_command(ctx, word) is None:
            meant = [name for name in self.list_commands(ctx) if name.startswith(f"{word}-")]
            if word == "help":
                meant = ["--help"]
            if meant:
                ctx.fail(f"No such command {word!r}. Did you mean {', '.join(map(repr, meant))}?")

        return super().resolve_command(ctx, args)


class Commands(typer.Typer):
    """A group of commands that may take groups of options."""

    def __init__(self, *, cls: type[TyperGroup] = SuggestingGroup, **settings: Any) -> None:
        super().__init__(cls=cls, **settings)

    def command(self, *args: Any, **settings: Any) -> Callable[..., Any]:
        register = super().command(*args, **settings)
        return lambda command: register(with_options(command))


@contextmanager
def needing(extra: str, *, what: str) -> Iterator[None]:
    """Within the block an import that fails names the extra to install, and `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs {error.name}: pip install 'pacorl[{extra}]'") from None


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with a flag for each option of the groups among its parameters."""
    hints = get_type_hints(command)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters = [
        flag
        for name, parameter in signature(command).parameters.items()
        for flag in (_flags(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])])
    ]

    for parameter in parameters:
        if isinstance(flag := parameter.default, OptionInfo) and flag.metavar is None:
            flag.metavar = _metavar(parameter.annotation)

    @wraps(command)
    def run(**values: Any) -> Any:
        options = {
            name: group(**{field.name: _parsed(field, values.pop(field.name)) for field in _options_of(group)})
            for name, group in groups.items()
        }
        return command(**values, **options)

    # typer reads parameters from here; `__wrapped__` would lead it back to the groups.
    del run.__wrapped__
    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _metavar(annotation: Any) -> str:
    """What the help calls a flag's value: nothing for a switch. Typer's own `<float range>` takes a whole column."""
    inner = next((kind for kind in get_args(annotation) if kind is not type(None)), annotation)
    return METAVARS.get(inner, "TEXT")


def _options_of(group: type) -> list[Field[Any]]:
    """A field without an option is no flag: what a shared group has and one command does not."""
    return [field for field in fields(group) if KEY in field.metadata]


def _parsed(field: Field[Any], value: Any) -> Any:
    setting: Option = field.metadata[KEY]
    if setting.parse is None:
        return value
    if not value:
        return field.default
    try:
        return setting.parse(value)
    except ValueError as error:
        raise ValueError(f"{_names(field)[0]} {error}") from None


def _flags(group: type) -> Iterator[Parameter]:
    """The parameters that typer makes flags of."""
    hints = get_type_hints(group)
    for field in _options_of(group):
        setting: Option = field.metadata[KEY]
        default = field.default_factory() if callable(field.default_factory) else field.default
        # The heading of the help is that of the group that declares the field first.
        declaring = next(base for base in reversed(group.__mro__) if field.name in get_annotations(base))
        flag = typer.Option(
            ("" if default is None else str(default)) if setting.parse else default,
            *_names(field),
            help=setting.help,
            metavar=setting.metavar,
            min=setting.least,
            max=setting.most,
            envvar=setting.variable,
            rich_help_panel=getattr(declaring, "panel", None),
        )
        # Typer would read a pair or a Size in its own way, and its message would not name the fix.
        annotation = str if setting.parse else hints[field.name]
        yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=flag, annotation=annotation)


def _names(field: Field[Any]) -> list[str]:
    setting: Option = field.metadata[KEY]
    name = f"--{field.name.replace('_', '-')}"
    # A switch that is off needs no second name.
    return [*(setting.flags or (f"{name}/--no-{name[2:]}" if field.default is True else name,)), *setting.also]


# --- printing --------------------------------------------------------------------------------------------------


@contextmanager
def progress(activity: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A bar on the error stream, so that `--json` stays clean; yields (done, total) → None."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from pacorl.io.console import PlainConsole

    # Transient below: what stays on a terminal are the results.
    columns = TextColumn(activity), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=PlainConsole(stderr=True), disable=not shown, transient=True) as bar:
        task = bar.add_task(activity, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def echo(text: object, *, err: bool = False) -> None:
    """Print a text without the control characters that others may have put into it."""
    typer.echo(printable(str(text)), err=err)


def echo_json(document: str) -> None:
    """Print a JSON text for programs."""
    typer.echo(printable_json(document))


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document for programs."""
    echo_json(json.dumps(document, indent=2, ensure_ascii=False))


def echo_errors(*lines: str) -> None:
    """Print the lines that are not empty on the error stream."""
    for line in filter(None, lines):
        echo(line, err=True)
