"""Two processes are killed after a checkpoint and started again: the weights are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import worlds
from runs import train, train_judge
from safetensors.torch import load_file
from tiny_runs import JPEG_SIZE

pytestmark = pytest.mark.nightly

POLICY = [
    "epochs=3", "prompts_per_epoch=2", "group_size=4", "save_every=1", "trackers=[]", "judge=none",
    "prompts={train: 'tiny:train:2', evaluation: 'tiny:dev:1'}", "evaluation={every: 0, steps: 1, rewards: []}",
    "sampling={steps: 2, batch: 2, suffix: {}}", "optimizer.updates_per_epoch=2", f"rewards=[{{name: '{JPEG_SIZE}'}}]",
]  # fmt: skip
JUDGE = [
    "data={train: ['tiny:train:24'], evaluation: [], workers: 0}", "optimizer.batch=4", "log_every=1", "save_every=2",
    "trackers=[]",
]  # fmt: skip
RUNS = {
    "policy": (train, POLICY, "step-000002/state.json", "checkpoints/step-000006/state.safetensors"),
    "judge": (train_judge, JUDGE, "checkpoint-2/digests.json", "adapter/adapter_model.safetensors"),
}
"""Of a kind of run: settings, the file that ends its first checkpoint, and the trained weights."""


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_goes_on_bit_for_bit(kind: str, mode: str, tmp_path: Path) -> None:
    function, settings, mark, final = RUNS[kind]
    extra = worlds.fsdp2() if mode == "fsdp2" else {}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    worlds.run(function, [*settings, f"out={whole}"], world=2, extra=extra)
    killed = worlds.start(function, [*settings, f"out={cut}"], world=2, extra=extra)
    worlds.wait_for((cut / "checkpoints" / mark).exists, killed)
    for process in killed:
        process.kill()
        process.join()
    worlds.run(function, [*settings, f"out={cut}"], True, world=2, extra=extra)
    expected, resumed = load_file(whole / final), load_file(cut / final)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())
    assert any(value.any() for name, value in resumed.items() if "lora_B" in name)
