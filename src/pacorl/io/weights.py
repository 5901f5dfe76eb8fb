"""Readable errors of weights: safetensors' own names no file, and is no ValueError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from safetensors import SafetensorError


@contextmanager
def safetensors_errors(name: object) -> Iterator[None]:
    """Within the block, a damaged file of weights is a ValueError that names what was read."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"{name}: its weights are damaged or cut off ({error}); fetch or copy them again") from None
