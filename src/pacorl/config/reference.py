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
WORDS = {
    "string": "text",
    "boolean": "true | false",
    "null": "none",
    "object": "mapping",
}
"""JSON type → its name for users, if that is another."""
ITEMS = "[]"
"""Ending of a key whose value is a list of sections."""

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config."""

    name: str
    """Name with its sections: `sampling.tree.seeds`."""
    type: str
    default: str
    """Default as JSON; empty for a section, whose keys have their own."""
    text: str
    only: str = ""
    """Choice with this key, such as `kind: flux, kontext`; empty for a key of every choice."""

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.type}"]
        if self.default:
            lines[0] += f" = {self.default}"
        if self.only:
            lines.append(f"    (with {self.only})")
        return "\n".join([*lines, *textwrap.wrap(self.text, 100, initial_indent="    ", subsequent_indent="    ")])


def matching(name: str) -> list[Key]:
    """Find the key `name` and all keys below it, or else the keys that end in `name`.

    Raises:
        ValueError: if there are none; it names the nearest keys.
    """
    keys = [key for model in RUNS.values() for key in keys_of(model)]
    below = [key for key in keys if key.name == name or key.name.startswith(f"{name}.")]
    matches = below or [key for key in keys if f".{key.name}".endswith(f".{name}")]
    if matches:
        return matches
    names = {key.name for key in keys} | {key.name.rpartition(".")[2] for key in keys}
    raise ValueError(f"no config has the key {name!r}; {did_you_mean(name, sorted(names))}".removesuffix("; "))


def unknown_key(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Describe an unknown key of a config, and guess: a key of that name elsewhere, or one of a near name."""
    name, last = ".".join(map(str, path)), str(path[-1])
    above = "".join(f"{step}." for step in path[:-1] if isinstance(step, str))
    keys: dict[str, list[Key]] = {}
    for key in keys_of(model):
        keys.setdefault(key.name.replace(ITEMS, ""), []).append(key)
    guesses = [known for known in keys if known.rpartition(".")[2] == last]
    if not guesses:
        beside = [known.removeprefix(above) for known in keys if known.startswith(above)]
        guesses = [f"{above}{near}" for near in difflib.get_close_matches(last, beside, n=1)]
    if not guesses:
        return f"{name}: unknown key; `pacorl config SECTION` lists the keys"
    meant = []
    for guess in guesses:
        choices = [key.only for key in keys[guess] if key.only]
        meant.append(f"{guess!r}" + (f" (with {choices[0]})" if len(choices) == 1 else ""))
    return f"{name}: unknown key, did you mean {' or '.join(meant)}?"


def keys_of(model: type[BaseModel]) -> Iterator[Key]:
    """List the keys of a config, in the order of their declaration."""
    schema = model.model_json_schema()
    yield from _keys(schema, schema.get("$defs", {}), prefix="")


def _keys(section: Schema, definitions: Schema, *, prefix: str) -> Iterator[Key]:
    for name, part in section["properties"].items():
        is_list = "items" in part
        inner = _sections(part["items"] if is_list else part, definitions)
        text = part.get("description") or next((each.get("description", "") for each in inner), "")
        default = json.dumps(part["default"], ensure_ascii=False) if "default" in part else "required"
        shown = default if is_list or not inner else ""
        yield Key(f"{prefix}{name}", _type_of(part), shown, " ".join(text.split()))
        below = f"{prefix}{name}{ITEMS if is_list else ''}."
        if len(inner) > 1:
            yield from _keys_by_choice(inner, definitions, prefix=below)
        elif inner:
            yield from _keys(inner[0], definitions, prefix=below)


def _keys_by_choice(entries: Sequence[Schema], definitions: Schema, *, prefix: str) -> Iterator[Key]:
    """List the keys of all entries of a table, each once, with the names of the entries that have it in this form."""
    choice = next(name for name, part in entries[0]["properties"].items() if "const" in part)
    names = [entry["properties"][choice]["const"] for entry in entries]
    text = f"Which of these; it brings the other keys of {prefix.removesuffix('.')}."
    yield Key(f"{prefix}{choice}", " | ".join(names), json.dumps(names[0]), text)
    having: dict[Key, list[str]] = {}
    for name, entry in zip(names, entries, strict=True):
        for key in _keys(entry, definitions, prefix=prefix):
            if key.name != f"{prefix}{choice}":
                having.setdefault(key, []).append(name)
    for key, those in having.items():
        yield replace(key, only="" if len(those) == len(names) else f"{choice}: {', '.join(those)}")


def _sections(part: Schema, definitions: Schema) -> list[Schema]:
    """List the sections that a value may be."""
    if "$ref" in part:
        return [definitions[part["$ref"].rpartition("/")[2]]]
    choices = [*part.get("oneOf", ()), *part.get("anyOf", ())]
    return [part] if "properties" in part else [found for each in choices for found in _sections(each, definitions)]


def _type_of(part: Schema) -> str:
    if "$ref" in part or "properties" in part or "oneOf" in part:
        return "section"
    if "anyOf" in part:
        return " | ".join(map(_type_of, part["anyOf"]))
    if "enum" in part or "const" in part:
        return " | ".join(map(str, part.get("enum", [part.get("const")])))
    if part.get("type") == "array":
        return f"list of {_type_of(part.get('items') or part['prefixItems'][0])}"
    if part.get("format") == "path":
        return "path"
    word = str(part.get("type", "any value"))
    return WORDS.get(word, word)
