"""Reference of every key of a run's config, for `pacorl config` and the site, and the guess for an unknown key."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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


def unknown_key(kind: type[BaseModel], path: Sequence[str | int], document: Any) -> str:
    """Describe an unknown key, and guess: a key of that name elsewhere, or of a near name in the same section.

    Args:
        kind: the whole config.
        path: the key and the sections above it.
        document: the config as it was given.
    """
    *sections, name = map(str, path)
    same = [key for key in _names(kind, document) if key.rpartition(".")[2] == name]
    section = kind
    for step in path[:-1]:
        has_items = isinstance(document, Mapping | list)
        document = document[step] if has_items else None
        if isinstance(step, str):
            section = _section_of(section.model_fields[step], document) or section

    near = difflib.get_close_matches(name, section.model_fields, n=1)
    guesses = same or [".".join([*sections, each]) for each in near]
    hint = f", did you mean {' or '.join(map(repr, guesses))}?"
    if not guesses:
        keys = f"there are {', '.join(section.model_fields)}"
        hint = f"; {keys}" if sections else "; `pacorl config --schema COMMAND` lists the keys"
    return f"{'.'.join([*sections, name])}: unknown key{hint}"


def _names(kind: type[BaseModel], document: Any) -> Iterator[str]:
    """Yield the dotted keys of a config, without lists; of a table only the selected entry's."""
    for name, field in kind.model_fields.items():
        inner = document.get(name) if isinstance(document, Mapping) else None
        section = None if get_origin(field.annotation) in (tuple, list) else _section_of(field, inner)
        if section is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in _names(section, inner))


def _section_of(field: FieldInfo, document: Any) -> type[BaseModel] | None:
    """Find the model of a field's section or items, by a choice the selected entry's; None if there is none."""
    part = next(_parts(Annotated[field.annotation, *field.metadata, ...]), None)
    if not isinstance(part, OneOf):
        return part
    return part.options_of(document) if part.name_in(document) in part.table else None


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the choices (`OneOf`) and models within a type, outermost first."""
    yield from (note for note in getattr(annotation, "__metadata__", ()) if isinstance(note, OneOf))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _parts(argument)


def _keys_of(model: type[BaseModel], *, run: str, prefix: str = "") -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        annotation: Any = Annotated[field.annotation, *field.metadata, ...]
        part = next(_parts(annotation), None)
        is_list = get_origin(field.annotation) in (tuple, list)

        # Its text, or that of the class that it overrides, else that of its section.
        above = [_fields(base)[name].description for base in model.__mro__ if name in _fields(base)]
        text = next((each for each in above if each), "")
        if not text and part is not None:
            text = f"The options of one {part.table.noun}." if isinstance(part, OneOf) else part.__doc__ or ""
        default = ""
        if is_list or part is None:
            value = None if field.is_required() else field.get_default(call_default_factory=True)
            default = "required" if field.is_required() else json.dumps(value, default=_plain, ensure_ascii=False)
        yield Key(run, path, "", _type_of(annotation), default, " ".join(text.split()))

        # The keys below it.
        inside = f"{path}[]." if is_list else f"{path}."
        if isinstance(part, OneOf):
            yield from _keys_by_choice(part, run=run, prefix=inside)
        elif part is not None:
            yield from _keys_of(part, run=run, prefix=inside)


def _fields(kind: type) -> Mapping[str, FieldInfo]:
    return kind.model_fields if issubclass(kind, BaseModel) else {}


def _keys_by_choice(choice: OneOf, *, run: str, prefix: str) -> Iterator[Key]:
    """List the keys of all entries, each once, with the names of the entries that have it in this form."""
    entries: dict[Key, list[str]] = {}
    for name, entry in choice.table.items():
        for key in _keys_of(entry.options, run=run, prefix=prefix):
            if key.name != f"{prefix}{choice.key}":
                entries.setdefault(key, []).append(name)
    noun = f"Which {choice.table.noun}; it brings the other keys of this section."
    yield Key(run, f"{prefix}{choice.key}", "", " | ".join(choice.table), json.dumps(choice.default), noun)
    for key, names in entries.items():
        yield replace(key, only="" if len(names) == len(choice.table) else f"{choice.key}: {', '.join(names)}")


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
