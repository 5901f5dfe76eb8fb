"""Processes have the rows and faults of all, and wait for each other."""

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


@pytest.mark.slow
def test_processes_wait_for_each_other_by_the_longest_phase_so_far(tmp_path: Path) -> None:
    worlds.run(small.wait, tmp_path / "out", world=2)
    limits = torch.load(tmp_path / "out", weights_only=True)
    assert limits == [7200 + 1234.5, 300 + 1234.5, 3 * 1000 + 60 + 1234.5, 3 * 1000 + 60 + 1234.5]


def test_ranks_stop_together_though_one_is_told(tmp_path: Path) -> None:
    worlds.run(small.stop, tmp_path / "out", world=2)
    assert torch.load(tmp_path / "out", weights_only=True) == {"met": ["told to stop"] * 2, "threads": []}
