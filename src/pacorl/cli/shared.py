"""Base of all commands: flags from groups of options (`config.options`), a progress bar, one form of JSON.

    @Commands().command()
    def score(images: list[str] = Argument(help="…"), *, judge: JudgeOptions, output: OutputOptions) -> None:
        …

A parameter whose type is a group becomes the flags of its fields; the command gets an instance of the group.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, NoReturn, get_type_hints

import typer

from pacorl.config.options import FLAG, LARGEST, UsageError
from pacorl.io.terminal import CONTROLS, Progress, printable

if TYPE_CHECKING:
    from pacorl.plan.plan import Plan

MANY = 256
"""Questions of one call of a judge; more are announced."""
JSON = typer.Option(False, "--json", help="Print JSON.")
CARD = typer.Option(
    0, min=0, max=LARGEST, help="With --dry-run: gigabytes of the card to plan for, instead of this machine's."
)


class Commands(typer.Typer):
    """Group of commands with groups of options."""

    def command(self, *args: Any, **settings: Any) -> Callable[..., Any]:
        register = super().command(*args, **settings)
        return lambda command: register(with_options(command))


@contextmanager
def needing(extra: str, *, what: str) -> Iterator[None]:
    """Replace a failed import by a ValueError with the extra to install for `what`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(f"{what} needs {error.name}: pip install 'pacorl[{extra}]'") from None


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's groups of options by a flag for each option."""
    hints = get_type_hints(command)
    # A dataclass parameter becomes the flags of its fields.
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        parameters += _flags(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])]
    for parameter in parameters:
        if parameter.annotation is bool:
            parameter.default.metavar = ""  # else typer shows a switch as one that takes a value

    @wraps(command)
    def run(**values: Any) -> Any:
        for parameter in parameters:
            # A variable that a script takes for set; options that may be empty have that default.
            info, value = parameter.default, values[parameter.name]
            if (value == "" and info.default) or (isinstance(value, list) and "" in value):
                raise UsageError(f"{(info.param_decls or [parameter.name])[0]} is empty; is the variable set?")
        for name, group in groups.items():
            values[name] = group(**{each.name: values.pop(each.name) for each in fields(group)})
        return command(**values)

    # typer reads parameters from here; `__wrapped__` would lead it back to the groups.
    del run.__wrapped__
    run.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _flags(group: type) -> Iterator[Parameter]:
    """Yield typer's parameters of a group's flags."""
    hints = get_type_hints(group)
    for each in fields(group):
        settings = dict(each.metadata[FLAG])
        flags = settings.pop("flags") or [f"--{each.name.replace('_', '-')}"]
        default = each.default_factory() if callable(each.default_factory) else each.default
        info = typer.Option(default, *flags, rich_help_panel=getattr(group, "panel", None), **settings)
        yield Parameter(each.name, Parameter.KEYWORD_ONLY, default=info, annotation=hints[each.name])


@contextmanager
def progress(activity: str) -> Iterator[Progress]:
    """Show a bar on the error stream, if that is a terminal; yields (done, total) → None."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    # Transient below: only the results stay on a terminal. A judge's name is no markup.
    shown = TextColumn(printable(activity), markup=False)
    columns = shown, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def asking(judge: str) -> Iterator[Progress]:
    """Show the progress of a judge's questions; of more than `MANY`, print an estimate after the first answers."""
    with progress(f"questions to {judge}") as advance:
        begun_at = time.monotonic()
        measured = False

        def show(done: int, total: int) -> None:
            nonlocal measured
            advance(done, total)
            if done and total > MANY and not measured:
                measured = True
                announce(f"{total:,} questions to {judge} take", (time.monotonic() - begun_at) * total / done)

        yield show


def announce(activity: str, seconds: float) -> None:
    """Print how long an activity takes, if that is more than a minute."""
    if seconds > 60:
        minutes = seconds / 60
        duration = f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.0f} h"
        echo_errors(f"{activity} about {duration}")


def echo(text: object, *, err: bool = False) -> None:
    """Print a text, which may be untrusted, without control characters."""
    typer.echo(printable(str(text)), err=err)


def print_json(document: Mapping[str, Any] | list[dict[str, Any]]) -> None:
    """Print a document for programs, in UTF-8; control characters are JSON's escapes."""
    text = json.dumps(document, indent=2, ensure_ascii=False)
    typer.echo(CONTROLS.sub(lambda match: json.dumps(match[0])[1:-1], text))


def check_card(card: int, *, dry_run: bool) -> None:
    """Raise UsageError for a card without a plan."""
    if card and not dry_run:
        raise UsageError("--card plans for another card; add --dry-run, or leave it out to use this one")


def end_with(plan: Plan, *, as_json: bool) -> NoReturn:
    """Print a plan, and end the command by its exit code."""
    if as_json:
        print_json(plan.to_dict())
    else:
        echo(plan)
    raise typer.Exit(plan.exit_code)


def fault_line(error: Exception) -> str:
    """Format a fault for its user."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ImportError) and error.__cause__:
        # transformers keeps back why a library that it tries fails: torchvision, say, is built for another torch.
        return f"{error.__cause__}: a library is absent or does not fit torch; remove it, or install its build for it"
    return str(error).strip() or type(error).__name__


def echo_errors(*lines: str) -> None:
    """Print lines on the error stream; empty lines are left out."""
    for line in lines:
        if line:
            echo(line, err=True)
