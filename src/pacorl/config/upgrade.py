"""Old names of config keys: files of the first edition keep loading, and one line says each new name.

To rename a key, change its field and add one line to `RENAMED` of its run; to drop one, add it to `DROPPED`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, Mapping[str, str]] = {
    "PolicyRun": {
        "model.guidance": "model.guidance_scale",
        "model.true_cfg": "model.true_cfg_scale",
        "model.text_tokens": "model.max_sequence_length",
        "sampling.noise_steps": "sampling.sde_steps",
        "sampling.kernel": "sampling.sde_type",
        "sampling.merge": "sampling.fuse_lora",
        "watch": "monitor",
        "monitor.lattice": "monitor.grid_artifact",
    },
}
"""Run → old dotted key → new one, in the order in which they are applied."""

DROPPED: Mapping[str, Mapping[str, Any]] = {
    "PolicyRun": {"adapter.dropout": 0.0},
}
"""Run → key that is no more → the only value that it could have."""

RETIRED: Mapping[str, Mapping[str, str]] = {
    "PolicyRun": {
        "advantages.min_valid": "groups with fewer than 2 judged samples are dropped",
        "monitor.average": "an epoch's signs are averaged over 3 epochs",
        "report_every": "report.html is built with each evaluation and each checkpoint",
    },
}
"""Run → key that is no more, whatever its value was → what happens now."""


def upgrade(document: dict[str, Any], run: str) -> list[str]:
    """Renames and drops the old keys of a run's document in place.

    Returns:
        One line for each key that was changed.

    Raises:
        ValueError: if a key stands under both its names, or a dropped key has a value that meant something.
    """
    notices = []
    for old, new in RENAMED.get(run, {}).items():
        if _has(document, old):
            if _has(document, new):
                raise ValueError(f"{old} is now called {new}, and both are given; leave {old} out")
            _put(document, new, _pop(document, old))
            notices.append(f"{old} is now called {new}")
    for key, value in DROPPED.get(run, {}).items():
        if _has(document, key) and (given := _pop(document, key)) != value:
            raise ValueError(f"{key} {given!r} is no longer a setting: it could only be {value!r}; leave it out")
    for key, today in RETIRED.get(run, {}).items():
        if _has(document, key):
            _pop(document, key)
            notices.append(f"{key} is no longer a setting: {today}")
    return notices


def _parent(document: dict[str, Any], key: str) -> tuple[dict[str, Any] | None, str]:
    """The mapping that holds a dotted key's last part, if there is one."""
    *sections, last = key.split(".")
    inner: Any = document
    for section in sections:
        inner = inner.get(section) if isinstance(inner, dict) else None
    return (inner if isinstance(inner, dict) else None), last


def _has(document: dict[str, Any], key: str) -> bool:
    inner, last = _parent(document, key)
    return inner is not None and last in inner


def _pop(document: dict[str, Any], key: str) -> Any:
    inner, last = _parent(document, key)
    assert inner is not None
    return inner.pop(last)


def _put(document: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        document = document.setdefault(section, {})
    document[last] = value
