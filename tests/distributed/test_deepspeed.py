"""DeepSpeed ZeRO-2 in two processes over gloo: DDP's run, and its own again after a stop (`make test-deepspeed`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launching import launched
from safetensors.torch import load_file

from pacorl.grpo.start import checkpoints

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.slow


def adapter_of(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoints(run / "checkpoints")[-1]
    return load_file(newest / "adapter.safetensors")


def norms_of(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["grad_norm"] for line in lines if line["kind"] == "epoch"]


def test_deepspeed_trains_as_ddp_does_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    runs = {
        "ddp": [("ddp", ["epochs=2"])],
        "deepspeed": [("deepspeed_zero2", ["epochs=2"])],
        "resumed": [("deepspeed_zero2", ["epochs=1"]), ("deepspeed_zero2", ["epochs=2", "--resume", "auto"])],
    }
    for name, lines in runs.items():
        for engine, settings in lines:
            done = launched("accelerate", *settings, engine=engine, out=tmp_path / name)
            assert done.returncode == 0, done.stderr[-3000:]
    sharded = checkpoints(tmp_path / "deepspeed" / "checkpoints")[-1] / "deepspeed"
    assert len(list(sharded.glob("*optim_states.pt"))) == 2, "the optimizer's state lies on both"
    wanted, found, resumed = (adapter_of(tmp_path / name) for name in runs)
    assert all(torch.equal(resumed[name], value) for name, value in found.items())
    moved = sum(value.square().sum() for name, value in wanted.items() if "lora_B" in name).sqrt()
    apart = sum((found[name] - value).square().sum() for name, value in wanted.items()).sqrt()
    assert apart < 1e-4 * moved
    assert norms_of(tmp_path / "deepspeed") == pytest.approx(norms_of(tmp_path / "ddp"), rel=1e-5)
