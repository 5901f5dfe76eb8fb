"""A config's text in today's keys: what `upgrade` does to a document, done to its lines, so that comments stay."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import yaml

from pacorl.config.upgrade import DROPPED, RENAMED, RETIRED, upgrade
from pacorl.io.documents import dump_yaml, parse_yaml

JUDGE_SECTIONS = {"tuning", "data", "loss"}
"""Sections that only a judge's training has."""

Edit = tuple[int, int, str]
"""From a character of the text to another → what stands there instead."""


def rewrite(text: str, *, name: str) -> tuple[str, list[str]]:
    """The text of a config in today's keys.

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
    run = "RewardRun" if JUDGE_SECTIONS & set(document) else "PolicyRun"
    today = deepcopy(document)
    try:
        notices = upgrade(today, run)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    dropped = [key for key in DROPPED.get(run, {}) if _find(yaml.compose(text), key)]
    notices += [f"{key} is no longer a setting" for key in dropped]
    if not notices:
        return text, []
    edited = _edited(text, run)
    if parse_yaml(edited, name=name) == today:
        return edited, notices
    # A key that went to another section, or a section that is empty now: lines do not say that.
    return dump_yaml(today), [*notices, "comments are lost: the keys could not be changed line by line"]


def _edited(text: str, run: str) -> str:
    """The text with keys renamed and removed where they stand."""
    root = yaml.compose(text)
    edits = [*_renamings(root, run), *_removals(root, text, run)]
    for start, end, instead in sorted(edits, reverse=True):  # from the end, so that earlier places stay valid
        text = text[:start] + instead + text[end:]
    return text


def _renamings(root: Any, run: str) -> Iterator[Edit]:
    for old, new in RENAMED.get(run, {}).items():
        if entry := _find(root, old):
            key = entry[1]
            yield key.start_mark.index, key.end_mark.index, new.rpartition(".")[2]


def _removals(root: Any, text: str, run: str) -> Iterator[Edit]:
    for old in [*DROPPED.get(run, {}), *RETIRED.get(run, {})]:
        if entry := _find(root, old):
            section, key, value = entry
            if section.flow_style:
                yield (*_flow_span(section, key), "")
            else:
                start = text.rfind("\n", 0, key.start_mark.index) + 1
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


def _find(root: Any, dotted: str) -> tuple[Any, Any, Any] | None:
    """The mapping, the key and the value of a dotted key in a tree of YAML nodes."""
    section, entry = root, None
    for name in dotted.split("."):
        pairs = section.value if isinstance(section, yaml.MappingNode) else []
        entry = next(((section, key, value) for key, value in pairs if key.value == name), None)
        if entry is None:
            return None
        section = entry[2]
    return entry
