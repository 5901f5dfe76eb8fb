"""What holds for every test."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_waiting_for_the_disk() -> Iterator[None]:
    """Files of tests need not survive a power failure; a suite syncs thousands, at some milliseconds each.

    What is written in which order is tested in `tests/io`, and what a killed process leaves in processes of their own,
    which do sync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # a closed file still raises OSError
        yield
