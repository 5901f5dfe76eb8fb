"""Importing large libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Within the block garbage is not looked for, and what is there at its end is never looked through again.

    torch, transformers and diffusers make a million objects that live as long as the process. To walk through them
    again and again takes a quarter of the time that their import takes. It is for a command's first lines: models that
    are loaded already would never be freed.
    """
    gc.collect()  # or what is garbage already would be kept for ever
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
