"""What sources of prompts and of comparisons have in common: a limit, and the tiny world's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from pacorl.data.characters import Split

Item = TypeVar("Item")

TINY = "tiny:"
SPLITS: Mapping[str, Split] = {"train": "train", "dev": "dev", "test": "test"}


def evenly_spread(items: Sequence[Item], limit: int | None, *, source: object = "") -> list[Item]:
    """At most `limit` of the items, evenly spread from the first on; all without a limit.

    Raises:
        ValueError: the limit is below 1; `source` says of what.
    """
    if limit is not None and limit < 1:
        raise ValueError(
            f"a limit of {limit} leaves nothing{f' of {source}' if source else ''}; give at least 1, or none"
        )
    if limit is None or limit >= len(items):
        return list(items)
    return [items[index * len(items) // limit] for index in range(limit)]


def tiny_source(source: str, *, counts: Mapping[Split, int]) -> tuple[Split, int]:
    """The split and the count of `tiny:SPLIT` or `tiny:SPLIT:COUNT`.

    Args:
        source: the name as a config gives it.
        counts: how many items a split has if the source does not say.

    Raises:
        ValueError: there is no such split, or the count is not a whole number above 0.
    """
    _, name, *counted = source.split(":")
    if name not in SPLITS or len(counted) > 1:
        raise ValueError(
            f"{source!r} is no part of the tiny world; give tiny:train, tiny:dev or tiny:test, or one with a count, "
            "e.g. tiny:dev:12"
        )
    split = SPLITS[name]
    count = counted[0] if counted else str(counts[split])
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ValueError(f"{source!r}: the count {count!r} must be a whole number above 0")
    return split, int(count)
