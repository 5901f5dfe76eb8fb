"""The documented launch lines, as a user types them: two processes over gloo, one epoch."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pacorl.engine.runtime import checkpoints

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SETTINGS = [
    "epochs=1",
    "prompts_per_epoch=2",
    "group_size=2",
    "trackers=[]",
    "prompts.train=tiny:train:2",
    "prompts.evaluation=tiny:dev:1",
    "sampling.steps=2",
    "sampling.batch=2",
    "evaluation.size=[64,64]",
    "evaluation.steps=1",
    "optimizer.updates_per_epoch=1",
    "optimizer.ema_interval=1",
]
COMMAND = ["-m", "pacorl.cli", "train-policy", str(ROOT / "configs" / "tiny.yaml"), *SETTINGS]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launched(*line: str, out: Path) -> subprocess.CompletedProcess[str]:
    """A launcher's module with what the documents give it, on this machine's CPU."""
    return subprocess.run(
        [sys.executable, "-m", *line, *COMMAND, f"out={out}"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_two_processes_train_an_epoch(launcher: str, tmp_path: Path) -> None:
    lines = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()],
        "accelerate": [
            *("accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "launch" / "ddp.yaml")),
            *("--num_processes", "2", "--main_process_port", free_port()),
        ],
    }
    out = tmp_path / "run"
    done = launched(*lines[launcher], out=out)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done: ") == 1, "the main process alone speaks"
    (checkpoint,) = checkpoints(out / "checkpoints")
    assert json.loads((checkpoint / "state.json").read_text())["processes"] == 2
    assert len(json.loads((checkpoint / "generators.json").read_text())) == 2
    kinds = [json.loads(line)["kind"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["evaluation", "epoch", "evaluation"]
