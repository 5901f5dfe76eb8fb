"""Processes have the rows and faults of all, and stop together."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
import torch
import worlds


@pytest.mark.slow
@pytest.mark.parametrize(("world", "met"), [(1, "Worded: code 7"), (2, "RuntimeError: Worded: code 7")])
def test_every_rank_has_the_rows_of_all_and_meets_the_fault_of_any(tmp_path: Path, world: int, met: str) -> None:
    """Alone a fault stays what it is."""
    worlds.run(small.gather, tmp_path / "out", world=world)
    found = torch.load(tmp_path / "out", weights_only=True)
    assert found["rows"] == [(1, "row of rank 1"), (2, "row of rank 0")][-world:]
    assert found["met"] == [met] * world


def test_ranks_stop_together_though_one_is_told(tmp_path: Path) -> None:
    worlds.run(small.stop, tmp_path / "out", world=2)
    assert torch.load(tmp_path / "out", weights_only=True) == {"met": ["told to stop"] * 2, "threads": []}
