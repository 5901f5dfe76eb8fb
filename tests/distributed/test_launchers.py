"""The documented launch lines take a run of the tiny world through an epoch, in two processes on CPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import metrics

from pacorl.grpo.start import checkpoints

ROOT = Path(__file__).parents[2]
SETTINGS = [
    *("epochs=1", "prompts_per_epoch=2", "group_size=2", "trackers=[]", "prompts.train=tiny:train:2"),
    *("prompts.evaluation=tiny:dev:1", "sampling.steps=2", "sampling.suffix={}", "sampling.batch=2"),
    *("evaluation.size=[64,64]", "evaluation.steps=1", "optimizer.updates_per_epoch=1"),
]
ACCELERATE = ["accelerate.commands.launch", "--config_file", f"{ROOT}/configs/launch/ddp.yaml", "--num_processes", "2"]
MACHINE = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"]
LAUNCHES = {
    "accelerate": [[*ACCELERATE, "--main_process_port", "{port}"]],
    "torchrun": [["torch.distributed.run", "--nproc_per_node", "2", "--master_port", "{port}"]],
    "two machines": [[*MACHINE, "--rdzv_endpoint", "127.0.0.1:{port}", "--node_rank", rank] for rank in ("0", "1")],
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "accelerate" else pytest.mark.nightly) for name in LAUNCHES],
)
def test_two_processes_train_an_epoch(name: str, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = ["-m", "pacorl", "train-policy", f"{ROOT}/configs/tiny.yaml", *SETTINGS, f"out={tmp_path / 'run'}"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *(word.replace("{port}", port) for word in line), *command],
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for line in LAUNCHES[name]
    ]
    try:
        said = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), [errors[-3000:] for _, errors in said]
    assert sum(output.count("done: ") for output, _ in said) == 1, "the main process alone speaks"
    (checkpoint,) = checkpoints(tmp_path / "run" / "checkpoints")
    assert json.loads((checkpoint / "state.json").read_text())["epoch"] == 1
    assert [line["kind"] for line in metrics(tmp_path / "run")] == ["evaluation", "epoch", "evaluation"]
