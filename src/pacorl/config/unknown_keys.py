"""Message for an unknown config key, with the key that was probably meant.

Keys of that name elsewhere in the config come first, then the names of other libraries, then near spellings.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pacorl.config.one_of import OneOf

SYNONYMS: Mapping[str, Sequence[str]] = {
    "batch_size": ("batch",),
    "beta": ("kl_weight",),
    "cliprange": ("clip_range",),
    "epsilon": ("clip_range",),
    "eval_steps": ("evaluation.every", "evaluate_every"),
    "guidance": ("guidance_scale",),
    "kl_coef": ("kl_weight",),
    "learning_rate": ("lr",),
    "lora_alpha": ("adapter.alpha", "tuning.alpha"),
    "lora_r": ("rank",),
    "lora_rank": ("rank",),
    "lr_scheduler_type": ("schedule",),
    "model_name_or_path": ("model.checkpoint",),
    "num_epochs": ("epochs",),
    "num_generations": ("group_size",),
    "num_inference_steps": ("sampling.steps", "evaluation.steps"),
    "num_train_epochs": ("epochs",),
    "output_dir": ("out",),
    "per_device_eval_batch_size": ("evaluation.batch",),
    "per_device_train_batch_size": ("sampling.batch", "micro_batch"),
    "pretrained_model_name_or_path": ("model.checkpoint",),
    "report_to": ("trackers",),
    "resolution": ("size",),
    "reward_funcs": ("rewards",),
    "save_steps": ("save_every",),
    "save_total_limit": ("keep_checkpoints",),
    "target_modules": ("targets",),
    "torch_dtype": ("model.dtype",),
    "train_batch_size": ("sampling.batch", "optimizer.batch"),
    "train_dataset": ("prompts.train", "data.train"),
    "warmup_ratio": ("warmup", "warmup_steps"),
}
"""Name in TRL, PEFT, diffusers or transformers → the keys with that meaning, each by its last parts."""
SHOWN_KEYS = 3
"""Keys that a message suggests."""
NEAR = 0.75
"""Similarity from which a name elsewhere in the config counts as a near spelling."""


def unknown_key(kind: type[BaseModel], path: Sequence[str | int], document: Any) -> str:
    """Describe an unknown key of the config.

    Args:
        kind: the whole config.
        path: the key and the sections above it.
        document: the config as it was given.
    """
    *sections, name = path
    section, owner = _section_at(kind, sections, document)
    keys = list(_keys(kind, document))
    key = ".".join(map(str, path))

    # From the surest guess to the weakest.
    meant = _keys_called(str(name), keys)
    if meant:
        return f"{key}: unknown key, did you mean {_listed(meant)}?"
    near = difflib.get_close_matches(str(name), section.model_fields, n=1)
    if near:
        return f"{key}: unknown key, did you mean {'.'.join(map(str, [*sections, near[0]]))!r}?"
    names = [*SYNONYMS, *(key.rpartition(".")[2] for key in keys)]
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=NEAR)
    meant = _keys_called(near[0], keys) if near else []
    if meant:
        return f"{key}: unknown key, did you mean {_listed(meant)}?"
    return f"{key}: unknown key{owner}" + (f"; there are {', '.join(section.model_fields)}" if owner else "")


def _keys_called(name: str, keys: Sequence[str]) -> list[str]:
    """Find the keys of a name, or else of the same meaning."""
    same = [key for key in keys if key.rpartition(".")[2] == name]
    endings = [f".{ending}" for ending in SYNONYMS.get(name, ())]
    return same or [key for key in keys if f".{key}".endswith(tuple(endings))]


def _listed(keys: Sequence[str]) -> str:
    shown = [repr(key) for key in keys[:SHOWN_KEYS]]
    return f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else shown[0]


def _keys(kind: type[BaseModel], document: Any) -> Iterator[str]:
    """Yield the dotted keys of this config, without lists; of a table only the selected entry's."""
    for name, field in kind.model_fields.items():
        inner = document.get(name) if isinstance(document, Mapping) else None
        try:
            section = None if get_origin(field.annotation) in (tuple, list) else _section_of(field, inner)[0]
        except ValueError:
            continue  # an unknown table entry is reported separately
        if section is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in _keys(section, inner))


def _section_at(kind: type[BaseModel], path: Sequence[str | int], document: Any) -> tuple[type[BaseModel], str]:
    """Find the model of the section at `path`, and " of KEY NAME" if it is a table's entry."""
    owner = ""
    for step in path:
        if isinstance(document, Mapping):
            document = document.get(str(step))
        else:
            document = document[step] if isinstance(document, list) and isinstance(step, int) else None
        field = kind.model_fields.get(str(step))
        if field is None:
            continue  # the number of a list's item
        section, choice = _section_of(field, document)
        if choice:
            owner = f" of {choice.key} {choice.name_in(document)}"
        kind = section or kind
    return kind, owner


def _section_of(field: FieldInfo, document: Any) -> tuple[type[BaseModel] | None, OneOf | None]:
    """Find the model of a field's section or its items, and its table; None for each that is missing."""
    # An optional section has its `OneOf` inside the union.
    parts = [field.annotation, *get_args(field.annotation)]
    notes = [*field.metadata]
    for part in parts:
        notes += getattr(part, "__metadata__", ())
    for note in notes:
        if isinstance(note, OneOf):
            return note.options_of(document), note
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None), None
