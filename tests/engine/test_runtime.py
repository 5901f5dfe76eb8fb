"""What processes agree on."""

from __future__ import annotations

import pytest

from pacorl.engine.runtime import Runtime


def test_batches_are_sharded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Runtime()
    assert machine.shard("abc") == [(0, "a"), (1, "b"), (2, "c")]
    for rank, share in enumerate(([(0, "a"), (2, "c")], [(1, "b")])):
        with monkeypatch.context() as patch:
            patch.setattr(machine, "world", 2)
            patch.setattr(machine, "rank", rank)
            assert machine.shard("abc") == share
            assert machine.rounds(3) == 2
            # Sharded weights need all ranks in every forward.
            patch.setattr(machine, "sharded", True)
            assert len(machine.shard("abc")) == 2
