"""DDP and FSDP2 in two processes give one process's gradients, steps, averages and outputs, state put back included."""

from __future__ import annotations

from pathlib import Path

import pytest
import small
import torch
import worlds

pytestmark = pytest.mark.slow


def test_two_processes_and_two_shards_are_one(tmp_path: Path) -> None:
    found = {}
    for name, world, extra in (("one", 1, {}), ("two", 2, {}), ("sharded", 2, worlds.fsdp2())):
        worlds.run(small.train, tmp_path / name, world=world, extra=extra)
        found[name] = torch.load(tmp_path / name, weights_only=True)
    assert all(value.any() for value in found["one"]["gradients"].values())
    for name in ("two", "sharded"):
        torch.testing.assert_close(found[name], found["one"], rtol=1e-5, atol=1e-6)
