"""Reference of every key of a run's config: `pacorl config KEY`, and the hint for a wrong key."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

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
CHOICE = "Selects which keys the section has."


def matching(name: str) -> list[str]:
    """Explain the key `name` and all keys below it, or else the keys that end in `name`.

    Raises:
        ValueError: if there are none; it names the nearest key.
    """
    # A key and its text, and the commands whose configs have both.
    keys: dict[tuple[str, str], list[str]] = {}
    for command, model in RUNS.items():
        for key in keys_of(model).items():
            keys.setdefault(key, []).append(command)
    below = [key for key in keys if f"{key[0]}.".startswith(f"{name}.")]
    matches = below or [key for key in keys if key[0].endswith(f".{name}")]
    if not matches:
        raise ValueError(f"no config has the key {name!r}; {_nearest(name, [key for key, _ in keys])}")
    return [key[1].replace("\n", f"  ({', '.join(keys[key])})\n", 1) for key in matches]


def _nearest(name: str, texts: Collection[str]) -> str:
    """Ask about a key of a near name, about keys that end in a part like it; else name the lists."""
    if hint := did_you_mean(name, texts):
        return hint
    last = {key: key.rpartition(".")[2] for key in texts}
    near = [key for key in texts if name in last[key].split("_") or get_close_matches(name, [last[key]])]
    if not near:
        return "`pacorl config` lists all, and `pacorl config rewards.args` the arguments of rewards"
    return f"did you mean {' or '.join(map(repr, near[:3]))}?"


def unknown_key(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Describe an unknown key of a config, and guess: a near key of its section, its name elsewhere, or a near name."""
    name = ".".join(step for step in path if isinstance(step, str))
    last = name.rpartition(".")[2]
    section = name.removesuffix(last)
    where = ".".join(map(str, path))

    # Another entry of the section has the key.
    field = model.model_fields.get(section.removesuffix("."))
    for table in field.metadata if field else ():
        if isinstance(table, Table):
            owners = [entry for entry in (*table, *table.users) if last in table[entry].options.model_fields]
            if owners:
                lists = f"`pacorl config {section[:-1]}` lists the keys of each"
                return f"{where}: unknown key, it belongs to {section}{table.key} {' or '.join(owners)}; {lists}"

    # A near key of the section, the same key of another one, or a near one.
    valid_keys = [key for key in keys_of(model) if key != name]
    siblings = [key.removeprefix(section) for key in valid_keys if section and key.startswith(section)]
    sibling = did_you_mean(last, siblings)
    elsewhere = " or ".join(repr(key) for key in valid_keys if key.rpartition(".")[2] == last)
    if sibling:
        hint = sibling.replace("'", f"'{section}", 1)
    else:
        hint = f"did you mean {elsewhere}?" if elsewhere else did_you_mean(name, valid_keys)
    return f"{where}: unknown key, {hint or '`pacorl config SECTION` lists the keys'}"


def keys_of(model: type[BaseModel], *, prefix: str = "") -> dict[str, str]:
    """List the keys of a config, each with its choices, default and meaning; of a list of sections, the keys of one.

    If several entries of a table share a key, the first entry explains it.
    """
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        sections, kind = _sections(field)
        if not sections:
            default = field.get_default(call_default_factory=True)
            kind = "required" if field.is_required() else json.dumps(default, default=str)
            if get_origin(field.annotation) is Literal:
                kind = f"{' | '.join(map(str, get_args(field.annotation)))} = {kind}"
        text = field.description or (sections[0].__doc__ if sections else "") or ""
        keys[f"{prefix}{name}"] = _explained(f"{prefix}{name}", kind, text)
        for section in reversed(sections):
            keys |= keys_of(section, prefix=f"{prefix}{name}.")
        for table in field.metadata:
            if isinstance(table, Table):
                key = f"{prefix}{name}.{table.key}"
                keys[key] = _explained(key, f"{' | '.join(table)} = {json.dumps(next(iter(table)))}", CHOICE)
    return keys


def _explained(key: str, kind: str, text: str) -> str:
    return f"{key}: {kind}\n{textwrap.indent(textwrap.fill(' '.join(text.split()), 96), '    ')}"


def _sections(field: FieldInfo) -> tuple[list[type[BaseModel]], str]:
    """List the sections that a key or its list accepts, and the key that selects one."""
    for table in field.metadata:
        if isinstance(table, Table):
            entries = [table[name].options for name in (*table, *table.users)]
            return entries, f"section, of {table.key} {' | '.join(table)}"
    annotations, sections = [field.annotation], []
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            sections.append(annotation)
        annotations += get_args(annotation)
    return sections, "section"
