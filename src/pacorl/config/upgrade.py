"""Old names of config keys: files of the first edition keep loading, and one line says each new name.

To rename a key, change its field and add one line to `RENAMED` of its run; to drop one, add it to `DROPPED`.
`pacorl config upgrade FILE` does to a file's lines what `load` does to its document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import yaml

from pacorl.io.documents import compose_yaml, dump_json, dump_yaml, parse_yaml

RENAMED: Mapping[str, Mapping[str, str]] = {
    "PolicyConfig": {
        "model.guidance": "model.guidance_scale",
        "model.true_cfg": "model.true_cfg_scale",
        "model.text_tokens": "model.max_sequence_length",
        "sampling.noise_steps": "sampling.sde_steps",
        "sampling.kernel": "sampling.sde_type",
        "sampling.merge": "sampling.fuse_lora",
        "watch": "monitor",
        "monitor.lattice": "monitor.grid_artifact",  # after its section has its new name
    },
}
"""Run → old dotted key → new one, in the order in which they are applied."""

DROPPED: Mapping[str, Mapping[str, Any]] = {
    "PolicyConfig": {"adapter.dropout": 0.0},
}
"""Run → key that is no more → the only value that it could have."""

REPLACED: Mapping[str, Mapping[str, tuple[str, Mapping[Any, Any]]]] = {
    "PolicyConfig": {"sampling.shared_noise": ("sampling.tree", {True: {"seeds": 1}, False: {}})},
}
"""Run → key that is no more → the key that says it today, and its value for each old one."""

BAD_STEPS = "the run stops after 10 steps in a row whose gradients are not finite"
RETIRED: Mapping[str, Mapping[str, str]] = {
    "PolicyConfig": {
        "advantages.min_valid": "groups with fewer than 2 judged samples are dropped",
        "monitor.average": "an epoch's signs are averaged over 3 epochs",
        "report_every": "report.html is built with each evaluation and each checkpoint",
        "evaluation.min_correlation": "the run warns of correlations that are surely below 0.3",
        "optimizer.max_bad_steps": BAD_STEPS,
    },
    "JudgeConfig": {"optimizer.max_bad_steps": BAD_STEPS},
}
"""Run → key that is no more, whatever its value was → what happens now."""

JUDGE_SECTIONS = {"tuning", "data", "loss"}
"""Sections that only a judge's training has."""

Edit = tuple[int, int, str]
"""From a character of the text to another → what stands there instead."""


def upgrade(document: dict[str, Any], run: str) -> list[str]:
    """Renames and drops the old keys of a run's document in place.

    Returns:
        One line for each key that was changed.

    Raises:
        ValueError: if a key stands under both its names, or a dropped key has a value that meant something.
    """
    notices = []
    for old, new in RENAMED.get(run, {}).items():
        section, name = _section(document, old)
        if name in section:
            target, new_name = _section(document, new, create=True)
            if new_name in target:
                raise ValueError(f"{old} is now called {new}, and both are given; leave {old} out")
            target[new_name] = section.pop(name)
            notices.append(f"{old} is now called {new}")
    for key, only in DROPPED.get(run, {}).items():
        section, name = _section(document, key)
        if (stated := section.pop(name, only)) != only:
            raise ValueError(f"{key} {stated!r} is no longer a setting: it could only be {only!r}; leave it out")
    notices += _replace(document, run)
    for key, today in RETIRED.get(run, {}).items():
        section, name = _section(document, key)
        if name in section:
            section.pop(name)
            notices.append(f"{key} is no longer a setting: {today}")
    return notices


def _replace(document: dict[str, Any], run: str) -> list[str]:
    """Say old values by the keys that say them today."""
    notices = []
    for key, (new, values) in REPLACED.get(run, {}).items():
        section, name = _section(document, key)
        if name not in section:
            continue
        value = _today(values, section.pop(name), key)
        target, new_name = _section(document, new, create=True)
        if target.get(new_name, value) != value:
            raise ValueError(f"{key} is now said by {new}, and both are given and disagree; leave {key} out")
        target[new_name] = value
        notices.append(f"{key} is now {new}: {value}")
    return notices


def _today(values: Mapping[Any, Any], value: Any, key: str) -> Any:
    """What stands for an old value today; a list, which some file may have, is no key of a mapping."""
    for old, new in values.items():
        if old == value:
            return new
    raise ValueError(f"{key} {value!r} is none of its values, {' and '.join(map(dump_json, values))}")


def _section(document: dict[str, Any], key: str, *, create: bool = False) -> tuple[dict[str, Any], str]:
    """The mapping that holds the last part of a dotted key (an empty one if there is none), and that part."""
    *sections, last = key.split(".")
    for section in sections:
        inner = document.setdefault(section, {}) if create else document.get(section)
        document = inner if isinstance(inner, dict) else {}
    return document, last


# --- the same done to a text -----------------------------------------------------------------------------------


def rewrite(text: str, *, name: str) -> tuple[str, list[str]]:
    """The text of a config in today's keys; comments stay.

    Args:
        name: the file, for messages.

    Returns:
        The text, and a line for each key that was changed.

    Raises:
        ValueError: if the text is no config, or a key that is no more had a meaning.
    """
    document = parse_yaml(text, name=name)
    if not isinstance(document, dict):
        raise ValueError(f"{name}: a config is a mapping of keys, this is a {type(document).__name__}")
    run = "JudgeConfig" if JUDGE_SECTIONS & set(document) else "PolicyConfig"
    today = deepcopy(document)
    try:
        notices = upgrade(today, run)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    # `load` says nothing of these, because they never changed a run; a file's owner sees a line disappear.
    for key in DROPPED.get(run, {}):
        section, last = _section(document, key)
        notices += [f"{key} is no longer a setting"] if last in section else []
    if not notices:
        return text, []
    edited = text
    for start, end, replacement in sorted(_edits(text, run), reverse=True):  # from the end: earlier offsets stay valid
        edited = edited[:start] + replacement + edited[end:]
    if parse_yaml(edited, name=name) == today:
        return edited, notices
    # A key that went to another section, or a section that is empty now: lines do not say that.
    return dump_yaml(today), [*notices, "comments are lost: the keys could not be changed line by line"]


def _edits(text: str, run: str) -> Iterator[Edit]:
    """Renames and removes keys as they stand in the text."""
    # Composed nodes know where they stand in the text; a loaded document does not.
    root = compose_yaml(text)
    for old, new in RENAMED.get(run, {}).items():
        if entry := _node(root, old):
            key = entry[1]
            yield key.start_mark.index, key.end_mark.index, new.rpartition(".")[2]
    for old, (new, values) in REPLACED.get(run, {}).items():
        if entry := _node(root, old):
            _, key, value = entry
            section = _today(values, parse_yaml(value.value, name=old), old)
            inside = ", ".join(f"{name}: {setting}" for name, setting in section.items())
            yield key.start_mark.index, value.end_mark.index, f"{new.rpartition('.')[2]}: {{{inside}}}"
    for old in [*DROPPED.get(run, {}), *RETIRED.get(run, {})]:
        if entry := _node(root, old):
            section, key, value = entry
            if section.flow_style:
                yield (*_flow_span(section, key), "")
            else:
                start = text.rfind("\n", 0, key.start_mark.index) + 1
                # A block's end mark lies in the line after it.
                end = text.find("\n", max(value.end_mark.index - 1, key.end_mark.index))
                yield start, end + 1 if end >= 0 else len(text), ""


def _flow_span(section: Any, key: Any) -> tuple[int, int]:
    """From a key in `{a: 1, b: 2}` to the next one, or from the end of the one before it."""
    pairs = section.value
    number = next(number for number, (other, _) in enumerate(pairs) if other is key)
    if number + 1 < len(pairs):
        return key.start_mark.index, pairs[number + 1][0].start_mark.index
    before = pairs[number - 1][1].end_mark.index if number else key.start_mark.index
    return before, pairs[number][1].end_mark.index


def _node(root: Any, dotted: str) -> tuple[Any, Any, Any] | None:
    """The mapping, the key and the value of a dotted key in a tree of YAML nodes."""
    section, entry = root, None
    for name in dotted.split("."):
        pairs = section.value if isinstance(section, yaml.MappingNode) else []
        entry = next(((section, key, value) for key, value in pairs if key.value == name), None)
        if entry is None:
            return None
        section = entry[2]
    return entry
