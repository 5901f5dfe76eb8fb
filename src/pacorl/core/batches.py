"""Items in batches, and in groups that hang together."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut a sequence into batches of `size`; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def grouped(entries: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """Collect the items of each key, in their order; keys are in the order of their first items."""
    groups: dict[Key, list[Item]] = {}
    for key, item in entries:
        groups.setdefault(key, []).append(item)
    return groups


def components(ties: Iterable[tuple[Item, Hashable]]) -> list[list[Item]]:
    """Group items that share a value, directly or through further items.

    Args:
        ties: (item, something that it has).

    Returns:
        The groups in the order of their first items; the items of a group are in their own order.
    """
    parent: dict[Item, Item] = {}
    first: dict[Hashable, Item] = {}

    def root(item: Item) -> Item:
        while parent[item] != item:
            # Halving the path keeps later searches short.
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for item, shared in ties:
        parent.setdefault(item, item)
        parent[root(item)] = root(first.setdefault(shared, item))
    return list(grouped((root(item), item) for item in parent).values())
