"""Reference of every key of a run's config, from its JSON schema: `pacorl config KEY`, and the hint for a wrong key."""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

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

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config."""

    name: str
    """Name with its sections: `sampling.tree.seeds`."""
    type: str
    """JSON's name of it, the choices, or `section`."""
    default: str
    """Default as JSON; empty for a section, whose keys have their own."""
    text: str
    only: str = ""
    """Choices with this key, such as `kind: flux, kontext`; empty for a key outside of a table's entries."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.type}" + (f" = {self.default}" if self.default else "")]
        if self.only:
            lines.append(f"    (with {self.only})")
        return "\n".join([*lines, *textwrap.wrap(self.text, 100, initial_indent="    ", subsequent_indent="    ")])


def matching(name: str) -> list[Key]:
    """Find the key `name` and all keys below it, or else the keys that end in `name`.

    Raises:
        ValueError: if there are none; it names the nearest key.
    """
    keys: list[Key] = []
    for model in RUNS.values():
        keys += keys_of(model)
    below = [key for key in keys if key.name == name or key.name.startswith(f"{name}.")]
    matches = below or [key for key in keys if key.name.endswith(f".{name}")]
    if not matches:
        hint = did_you_mean(name, {key.name for key in keys})
        raise ValueError(f"no config has the key {name!r}; {hint}".removesuffix("; "))
    return matches


def unknown_key(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Describe an unknown key of a config, and guess: a key of that name elsewhere, or one of a near name beside it."""
    *sections, last = [str(step) for step in path if isinstance(step, str)]
    above = "".join(f"{section}." for section in sections)
    known = [key.name for key in keys_of(model)]
    guesses = [key for key in known if key.rpartition(".")[2] == last]
    if not guesses:
        beside = [key.removeprefix(above) for key in known if key.startswith(above)]
        guesses = [f"{above}{key}" for key in difflib.get_close_matches(last, beside, n=1)]
    name = ".".join(map(str, path))
    if not guesses:
        return f"{name}: unknown key; `pacorl config SECTION` lists the keys"
    return f"{name}: unknown key, did you mean {' or '.join(map(repr, dict.fromkeys(guesses)))}?"


def keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """List the keys of a config, in the order of their declaration; of a list of sections, the keys of one."""
    schema = model.model_json_schema()
    yield from _keys(schema, schema.get("$defs", {}), prefix="")


def _keys(section: Schema, definitions: Schema, *, prefix: str) -> Iterator[Key]:
    for name, part in section["properties"].items():
        inner = _sections(part.get("items", part), definitions)
        text = part.get("description") or next((each.get("description", "") for each in inner), "")
        default = "required"
        if "default" in part:
            default = json.dumps(part["default"], ensure_ascii=False)
        if inner and "items" not in part:
            default = ""
        yield Key(f"{prefix}{name}", _type_of(part), default, " ".join(text.split()))
        if len(inner) > 1:
            yield from _keys_by_choice(inner, definitions, prefix=f"{prefix}{name}.")
        elif inner:
            yield from _keys(inner[0], definitions, prefix=f"{prefix}{name}.")


def _keys_by_choice(entries: Sequence[Schema], definitions: Schema, *, prefix: str) -> Iterator[Key]:
    """List the keys of all entries of a table, each form once, with the names of the entries that have it."""
    choice = next(name for name, part in entries[0]["properties"].items() if "const" in part)
    having: dict[Key, list[str]] = {}
    for entry in entries:
        for key in _keys(entry, definitions, prefix=prefix):
            having.setdefault(key, []).append(entry["properties"][choice]["const"])
    names = [entry["properties"][choice]["const"] for entry in entries]
    text = f"Which of these; it brings the other keys of {prefix.removesuffix('.')}."
    yield Key(f"{prefix}{choice}", " | ".join(names), json.dumps(names[0]), text)
    for key, entries_of_key in having.items():
        if key.name != f"{prefix}{choice}":
            yield replace(key, only=f"{choice}: {', '.join(entries_of_key)}")


def _sections(part: Schema, definitions: Schema) -> list[Schema]:
    """List the sections that a value may be."""
    if "$ref" in part:
        return [definitions[part["$ref"].rpartition("/")[2]]]
    if "properties" in part:
        return [part]
    sections = []
    for choice in (*part.get("oneOf", ()), *part.get("anyOf", ())):
        sections += _sections(choice, definitions)
    return sections


def _type_of(part: Schema) -> str:
    if "anyOf" in part:
        return " | ".join(map(_type_of, part["anyOf"]))
    if "enum" in part or "const" in part:
        return " | ".join(map(str, part.get("enum", [part.get("const")])))
    if part.get("type") == "array":
        return f"list of {_type_of(part.get('items') or part['prefixItems'][0])}"
    return "section" if "properties" in part else str(part.get("type", "section"))
