"""Reference of every key of a run's config: `pacorl config KEY`, and the hint for a wrong key."""

import json
from collections.abc import Sequence
from inspect import getdoc
from textwrap import fill
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pacorl.config.table import Table
from pacorl.config.user_files import FORM
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
INDENT = " " * 4


def matching(name: str) -> list[str]:
    """Explain the keys that contain `name`, which may have several parts, in each command's config.

    Raises:
        ValueError: if there are none; it names the nearest key.
    """
    texts = []
    all_keys = []
    for command, model in RUNS.items():
        for key, text in keys_of(model).items():
            all_keys.append(key)
            if f".{name}." in f".{key}.":
                texts.append(f"{command} {text}")
    if not texts:
        last_parts = [key.rpartition(".")[2] for key in all_keys]
        hint = did_you_mean(name, [*all_keys, *last_parts]) or "`pacorl config` lists the sections"
        raise ValueError(f"no config has the key {name!r}; {hint}")
    return texts


def unknown_key(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Describe an unknown key of a config, with the nearest key."""
    name = ".".join(step for step in path if isinstance(step, str))
    keys = keys_of(model)
    hint = did_you_mean(name, keys) or "`pacorl config SECTION` lists the keys"
    section, _, last = name.rpartition(".")
    field = model.model_fields.get(section)
    table = _table_of(field) if field else None
    if table and name in keys:
        owners = [entry for entry in (*table, *table.users) if last in table[entry].options.model_fields]
        hint = f"it belongs to {' or '.join(owners)}, chosen by {section}.{table.key}=…"
    return f"{'.'.join(map(str, path))}: unknown key, {hint}"


def keys_of(model: type[BaseModel], *, prefix: str = "") -> dict[str, str]:
    """List the keys of a config, each with its choices, default and meaning; of a list of sections, the keys of one.

    If several entries of a table share a key, the first entry explains it.
    """
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        sections = _models_in(field.annotation)
        table = _table_of(field)
        if table:
            sections = [table[entry].options for entry in (*table, *table.users)]
        meaning = field.description or getdoc(sections[0] if sections else None) or ""
        keys[key] = _explained(key, "section" if sections else _values(field), meaning)
        if table:
            choice = f"{key}.{table.key}"
            entries = [*table, FORM] if table.is_open else table
            keys[choice] = _explained(choice, " | ".join(entries), "Selects which keys the section has.")
        for section in sections:
            for inner, text in keys_of(section, prefix=f"{key}.").items():
                keys.setdefault(inner, text)
    return keys


def _explained(key: str, values: str, meaning: str) -> str:
    return f"{key}: {values}\n{fill(meaning, 100, initial_indent=INDENT, subsequent_indent=INDENT)}"


def _values(field: FieldInfo) -> str:
    """Format the choices and the default of a key."""
    if field.is_required():
        return "required"
    default = json.dumps(field.get_default(call_default_factory=True), default=str)
    if get_origin(field.annotation) is Literal:
        return f"{' | '.join(map(str, get_args(field.annotation)))} = {default}"
    return default


def _table_of(field: FieldInfo) -> Table[Any] | None:
    """Return the table whose entries decide the keys of a section; None for another key."""
    return next((table for table in field.metadata if isinstance(table, Table)), None)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that a key or its list accepts."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
