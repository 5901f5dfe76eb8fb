"""What processes agree on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toy_world import toy_config, toy_world

from pacorl.engine.runtime import Runtime
from pacorl.train.trainer import PolicyTrainer


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


def test_sampling_and_training_attend_by_the_same_kernels() -> None:
    """cuDNN's have another graph where gradients are wanted."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    Runtime()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    ("settings", "precision"),
    [("tf32=true model.dtype=bfloat16", "tf32"), ("tf32=true", "ieee"), ("tf32=false model.dtype=bfloat16", "ieee")],
)
def test_tf32_is_for_what_stays_fp32_beside_a_bf16_generator(tmp_path: Path, settings: str, precision: str) -> None:
    with toy_world():
        PolicyTrainer(toy_config(tmp_path, *settings.split())).close()
    assert torch.backends.cuda.matmul.fp32_precision == precision
