"""Importing large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Suspend garbage collection, and exempt the block's objects from later collections.

    torch, transformers and diffusers make a million objects that live as long as the process. Collections take a
    quarter of their import time. Use it only in a command's first lines: models that are loaded already would never be
    freed.
    """
    gc.collect()  # or the garbage of today would be kept for ever
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
