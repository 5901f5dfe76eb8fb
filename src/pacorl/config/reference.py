"""Reference of every key of a run's config: `pacorl config KEY`, and the hint for a wrong key."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Collection, Sequence
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pacorl.config.table import Table
from pacorl.io.terminal import did_you_mean, nearest

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
    """Explain the key `name` and all keys below it, or else the keys that end in `name`, of each command's config.

    Raises:
        ValueError: if there are none; it names the nearest key.
    """
    texts = []
    keys_of_all: dict[str, str] = {}
    for command, model in RUNS.items():
        keys = keys_of(model)
        keys_of_all |= keys
        below = [key for key in keys if f"{key}.".startswith(f"{name}.")]
        for key in below or [key for key in keys if key.endswith(f".{name}")]:
            texts.append(keys[key].replace("\n", f"  ({command})\n", 1))
    if not texts:
        hint = _guess(name, keys_of_all) or "`pacorl config` lists the sections"
        raise ValueError(f"no config has the key {name!r}; {hint}")
    return texts


def unknown_key(model: type[BaseModel], path: Sequence[str | int]) -> str:
    """Describe an unknown key of a config, with the entries of its section that have it, or the nearest key."""
    name = ".".join(step for step in path if isinstance(step, str))
    section, _, last = name.rpartition(".")
    hint = _guess(name, keys_of(model)) or "`pacorl config SECTION` lists the keys"
    field = model.model_fields.get(section)
    table = _table_of(field) if field else None
    owners = [entry for entry in table or () if table and last in table[entry].options.model_fields]
    if table and owners:
        whole = f"{section}={{{table.key}: …}}"
        hint = f"it belongs to {' or '.join(owners)}; give the section of another {table.key} whole, as {whole}"
    return f"{'.'.join(map(str, path))}: unknown key, {hint}"


def _guess(name: str, keys: Collection[str]) -> str:
    """Ask about the key whose last part resembles a wrong key's, in its own section first; empty if none does."""
    section, _, last = name.rpartition(".")
    beside = [key for key in keys if key.rpartition(".")[0] == section]
    for candidates in (beside, keys):
        meant = nearest(last, [key.rpartition(".")[2] for key in candidates])
        if meant:
            key = next(key for key in candidates if f".{key}".endswith(f".{meant}"))
            return f"did you mean {key!r}?"
    # Another word for it: optimizer.learning_rate.
    return did_you_mean(name, keys)


def keys_of(model: type[BaseModel], *, prefix: str = "") -> dict[str, str]:
    """List the keys of a config, each with its choices, default and meaning; of a list of sections, the keys of one.

    If several entries of a table share a key, the first entry explains it.
    """
    keys: dict[str, str] = {}
    for name, field in model.model_fields.items():
        key, table = f"{prefix}{name}", _table_of(field)
        if table:
            sections = [table[entry].options for entry in (*table, *table.users)]
            kind = f"section, of {table.key} {' | '.join(table)}"
        else:
            sections = _models_in(field.annotation)
            kind = "section" if sections else _values(field)
        keys[key] = _explained(key, kind, field.description or (sections[0].__doc__ if sections else "") or "")
        for section in reversed(sections):
            keys |= keys_of(section, prefix=f"{key}.")
        if table:
            choice = f"{key}.{table.key}"
            keys[choice] = _explained(choice, f"{' | '.join(table)} = {json.dumps(next(iter(table)))}", CHOICE)
    return keys


def _explained(key: str, kind: str, text: str) -> str:
    return f"{key}: {kind}\n{textwrap.indent(textwrap.fill(' '.join(text.split()), 96), '    ')}"


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
