"""Importing large libraries without looking for garbage."""

from __future__ import annotations

import gc
import weakref

import pytest

from pacorl.io.imports import frozen_imports


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_what_is_imported_is_kept_and_what_was_garbage_goes() -> None:
    before, garbage = gc.get_freeze_count(), weakref.ref(Cycle())
    try:
        with frozen_imports():
            assert garbage() is None
            assert not gc.isenabled()
            imported = [[number] for number in range(1000)]
        assert gc.isenabled()
        assert gc.get_freeze_count() >= before + len(imported)
    finally:
        gc.unfreeze()
        gc.freeze()  # as the suite does after its imports


def test_garbage_is_looked_for_again_after_an_import_that_fails() -> None:
    with pytest.raises(ModuleNotFoundError), frozen_imports():
        __import__("no_such_library")
    assert gc.isenabled()
