"""From groups of options (`config.options`) to the flags of a command.

    @app.command("score")
    @with_options
    def score(images: list[str] = typer.Argument(help="…"), *, judge: JudgeOptions, output: OutputOptions) -> None:
        …

A parameter whose type is a group becomes the flags of its fields; the command gets the group, filled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, get_annotations, signature
from typing import Any, ClassVar, get_type_hints

import typer

from pacorl.config.options import KEY, Option, option


@dataclass(frozen=True, kw_only=True)
class JsonOption:
    """Whether a command prints for programs."""

    panel: ClassVar[str | None] = None

    as_json: bool = option(False, "Print JSON.", flags=("--json",))


def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with a flag for each field of the groups among its parameters."""
    hints = get_type_hints(command)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters = [
        flag
        for name, parameter in signature(command).parameters.items()
        for flag in (_flags(groups[name]) if name in groups else [parameter.replace(annotation=hints[name])])
    ]

    @wraps(command)
    def filled(**values: Any) -> Any:
        options = {name: fill(group, values) for name, group in groups.items()}
        return command(**values, **options)

    # typer reads parameters from here; `__wrapped__` would lead it back to the groups.
    del filled.__wrapped__
    filled.__signature__ = signature(command).replace(parameters=parameters)  # type: ignore[attr-defined]
    filled.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return filled


def fill(group: type, values: dict[str, Any]) -> Any:
    """An object of the group from what was given on the command line, which is taken out of `values`.

    Raises:
        ValueError: if a text cannot be parsed; it names the flag.
    """
    return group(**{one.name: _parsed(one, values.pop(one.name)) for one in fields(group)})


def _parsed(one: Field[Any], value: Any) -> Any:
    parse = one.metadata[KEY].parse
    if parse is None:
        return value
    if not value:
        return one.default
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f"{_names(one)[0]} {error}") from None


def _flags(group: type) -> Iterator[Parameter]:
    """The parameters that typer makes flags of."""
    hints = get_type_hints(group)
    for one in fields(group):
        setting: Option = one.metadata[KEY]
        default = one.default_factory() if callable(one.default_factory) else one.default
        flag = typer.Option(
            ("" if default is None else str(default)) if setting.parse else default,
            *_names(one),
            help=setting.help,
            min=setting.least,
            max=setting.most,
            rich_help_panel=_panel(group, one.name),
        )
        annotation = str if setting.parse else hints[one.name]
        yield Parameter(one.name, Parameter.KEYWORD_ONLY, default=flag, annotation=annotation)


def _names(one: Field[Any]) -> list[str]:
    setting: Option = one.metadata[KEY]
    name = f"--{one.name.replace('_', '-')}"
    own = f"{name}/--no-{name[2:]}" if one.default is True else name  # a switch that is off needs no second name
    return [*(setting.flags or (own,)), *setting.also]


def _panel(group: type, name: str) -> str | None:
    """The heading of the help under which a field stands: that of the group that declares it first."""
    declaring = next(base for base in reversed(group.__mro__) if name in get_annotations(base))
    panel: str | None = getattr(declaring, "panel", None)
    return panel
