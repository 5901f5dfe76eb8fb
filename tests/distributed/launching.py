"""The documented launch lines, as a user types them: a short run of the tiny world in two processes on CPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

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


def launched(launcher: str, *settings: str, out: Path, engine: str = "ddp") -> subprocess.CompletedProcess[str]:
    """`torchrun` or `accelerate launch` with what the documents give it; `engine` names a file of configs/launch."""
    port = free_port()
    lines = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", port],
        "accelerate": [
            *("accelerate.commands.launch", "--config_file", str(ROOT / "configs" / "launch" / f"{engine}.yaml")),
            *("--num_processes", "2", "--main_process_port", port),
        ],
    }
    recipe = str(ROOT / "configs" / "tiny.yaml")
    command = ["-m", "pacorl.cli", "train-policy", recipe, *SETTINGS, *settings, f"out={out}"]
    return subprocess.run(
        [sys.executable, "-m", *lines[launcher], *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
