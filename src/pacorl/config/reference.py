"""Reference of every key of a run's config: meaning, values and default, for `pacorl config` and the site."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from pacorl.config.one_of import OneOf
from pacorl.config.table import Table
from pacorl.io.terminal import did_you_mean

RUNS: Table[type[BaseModel]] = Table(
    "command",
    {
        "train-policy": "pacorl.grpo.policy_config:PolicyConfig",
        "train-reward": "pacorl.judge_training.judge_config:JudgeConfig",
        "train-character": "pacorl.character_training.character_config:CharacterConfig",
    },
)
"""Command → the config that it reads."""

WORDS = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true | false",
    dict: "mapping",
    Path: "path",
    NoneType: "none",
}
"""Python type → its name for users."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config."""

    run: str
    """Command that reads the key."""
    name: str
    """Name with its sections: `sampling.tree.seeds`."""
    only: str
    """Choice with this key, such as `kind: flux, kontext`; empty for a key of every choice."""
    type: str
    default: str
    """Default in YAML's flow form; empty for a section, whose keys have their own."""
    text: str

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.type}"]
        if self.default:
            lines[0] += f" = {self.default}"
        if self.only:
            lines.append(f"    (with {self.only})")
        return "\n".join([*lines, *textwrap.wrap(self.text, 100, initial_indent="    ", subsequent_indent="    ")])


@cache
def keys() -> tuple[Key, ...]:
    """List the keys of all runs, in the order of their declaration."""
    return tuple(chain(*(_keys_of(model, run=run) for run, model in RUNS.items())))


def matching(name: str) -> list[Key]:
    """Find the key `name` and all keys below it, or else the keys that end in `name`.

    Raises:
        ValueError: if there are none; it names the nearest keys.
    """
    below = [key for key in keys() if key.name == name or key.name.startswith(f"{name}.")]
    matches = below or [key for key in keys() if f".{key.name}".endswith(f".{name}")]
    if matches:
        return matches
    # The whole name or its last part may be misspelt.
    names = {key.name for key in keys()} | {key.name.rpartition(".")[2] for key in keys()}
    raise ValueError(f"no config has the key {name!r}; {did_you_mean(name, sorted(names))}".removesuffix("; "))


def _keys_of(model: type[BaseModel], *, run: str, prefix: str = "") -> Iterator[Key]:
    texts = _texts_of(model)
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        annotation = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        choice, sections = _sections_of(annotation)
        is_list = get_origin(field.annotation) in (tuple, list)

        # Its text, else that of its section, whose keys have defaults of their own.
        text = texts.get(name, "")
        if not text and choice:
            text = f"The options of one {choice.table.noun}."
        elif not text and sections:
            text = " ".join((next(iter(sections.values())).__doc__ or "").split())
        default = ""
        if field.is_required() and (is_list or not sections):
            default = "required"
        elif is_list or not sections:
            default = json.dumps(field.get_default(call_default_factory=True), default=_plain, ensure_ascii=False)
        # The key itself.
        yield Key(run, path, "", _type_of(annotation), default, text)

        # The keys below it.
        inside = f"{path}[]." if is_list else f"{path}."
        if choice:
            yield from _keys_by_choice(choice, sections, run=run, prefix=inside)
        else:
            for section in sections.values():
                yield from _keys_of(section, run=run, prefix=inside)


def _keys_by_choice(choice: OneOf, sections: Mapping[str, type[BaseModel]], *, run: str, prefix: str) -> Iterator[Key]:
    """List the keys of all entries, each once, with the names of the entries that have it in this form."""
    entries: dict[Key, list[str]] = {}
    for name, section in sections.items():
        for key in _keys_of(section, run=run, prefix=prefix):
            if key.name != f"{prefix}{choice.key}":
                entries.setdefault(key, []).append(name)
    noun = f"Which {choice.table.noun}; it brings the other keys of this section."
    yield Key(run, f"{prefix}{choice.key}", "", " | ".join(sections), json.dumps(choice.default), noun)
    for key, names in entries.items():
        yield replace(key, only="" if len(names) == len(sections) else f"{choice.key}: {', '.join(names)}")


def _sections_of(annotation: Any) -> tuple[OneOf | None, dict[str, type[BaseModel]]]:
    """Find the models within a type; for a choice by a table's entry, the choice and the models of its entries."""
    for note in getattr(annotation, "__metadata__", ()):
        if isinstance(note, OneOf):
            return note, {name: note.table[name].options for name in note.table}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return None, {"": annotation}
    within = [_sections_of(argument) for argument in get_args(annotation)]
    return next(((note, options) for note, options in within if options), (None, {}))


def _type_of(annotation: Any) -> str:
    origin = get_origin(annotation) or annotation
    arguments = get_args(annotation)
    if origin is Annotated:
        return _type_of(arguments[0])
    if origin in (tuple, list) and arguments:
        return f"list of {_type_of(arguments[0])}"
    if origin is Literal:
        return " | ".join([str(argument) for argument in arguments])
    if origin in (Union, UnionType):
        return " | ".join([_type_of(argument) for argument in arguments])
    if isinstance(origin, type) and issubclass(origin, BaseModel):
        return "section"
    return WORDS.get(origin, getattr(origin, "__name__", str(origin)))


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_defaults=True)
    return str(value)


def _texts_of(model: type[BaseModel]) -> dict[str, str]:
    """Read the docstring below each field of a model and its bases from the source, the only place that has them."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel and base.__module__.startswith("pacorl."):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            for field, text in pairwise(typing.cast(ast.ClassDef, definition).body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                        texts[name] = " ".join(words.split())
    return texts


INTRODUCTION = """# Config keys

Every key that a run's YAML may have, with its default. `pacorl config KEY` prints the same in a terminal, and
`pacorl config --schema` a JSON schema for editors. A YAML needs only what differs from the defaults, which are the
paper's settings for FLUX.1-dev. Any key can follow a command: `pacorl train-policy CONFIG sampling.steps=8`. `[]`
stands for each item of a list. A note in brackets names the choice that has the key. Another choice brings keys of its
own: `objective.name=awm` leaves out the file's other keys of `objective`, but no key on the command line.
"""


def page() -> str:
    """All keys in Markdown, a table for each run."""
    lines = [INTRODUCTION]
    for run in RUNS:
        lines += [f"## `pacorl {run}`", "", "| Key | Type | Default | Meaning |", "|---|---|---|---|"]
        for key in (key for key in keys() if key.run == run):
            meaning = f"{key.text} (With {key.only}.)" if key.only else key.text
            cells = (f"`{key.name}`", key.type, f"`{key.default}`" if key.default else "", meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
