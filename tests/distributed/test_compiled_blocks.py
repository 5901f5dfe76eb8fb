"""Blocks that are compiled, under DDP and FSDP2: the policy that samples is the one that is trained."""

from __future__ import annotations

from pathlib import Path

import compiled
import pytest
import torch
import worlds

from pacorl.core.objectives import RATIO_DEVIATION

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("extra", [pytest.param({}, id="ddp"), pytest.param(worlds.fsdp2(), id="fsdp2")])
def test_the_ratio_before_the_first_update_is_one(tmp_path: Path, extra: dict[str, str]) -> None:
    worlds.run(compiled.sample_and_train, tmp_path / "out", world=2, extra=extra)
    ranks = torch.load(tmp_path / "out", weights_only=True)
    assert len(ranks) == 2
    for rank in ranks:
        assert rank["metrics"][RATIO_DEVIATION] == 0.0
        assert rank["gradients"] == 3 * 2  # of two matrices in each of three layers
        assert rank["frames"]["ok"] > 0
