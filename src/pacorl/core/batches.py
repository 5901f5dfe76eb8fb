"""Cutting of sequences into batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut a sequence into batches of `size`; the last may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]
