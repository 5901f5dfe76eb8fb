"""The documented launch lines, as a user types them: a short run of the tiny world in two processes on CPUs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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
    "sampling.suffix={}",
    "sampling.batch=2",
    "evaluation.size=[64,64]",
    "evaluation.steps=1",
    "optimizer.updates_per_epoch=1",
]


def launched(launcher: str, *settings: str, out: Path, engine: str = "ddp") -> subprocess.CompletedProcess[str]:
    """`torchrun` or `accelerate launch` with what the documents give it; `engine` names a file of configs/launch."""
    lines = {
        "torchrun": ["torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port()],
        "accelerate": accelerate_line(engine),
    }
    with started(*lines[launcher], settings=settings, out=out) as process:
        return finished(process)


def accelerate_line(engine: str) -> list[str]:
    """`accelerate launch` of two processes, by a file of configs/launch."""
    config = ROOT / "configs" / "launch" / f"{engine}.yaml"
    options = ["--config_file", str(config), "--num_processes", "2", "--main_process_port", free_port()]
    return ["accelerate.commands.launch", *options]


def launched_on_two_machines(*settings: str, out: Path) -> list[subprocess.CompletedProcess[str]]:
    """Two launchers that meet, as on two machines, with a process each."""
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--nproc_per_node", "1"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                started(
                    *("torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank), *meeting),
                    settings=settings,
                    out=out,
                )
            )
            for rank in range(2)
        ]
        return [finished(process) for process in processes]


def started(*line: str, settings: Sequence[str], out: Path) -> subprocess.Popen[str]:
    """A launcher's module with what the documents give it, on this machine's CPU."""
    recipe = str(ROOT / "configs" / "tiny.yaml")
    command = ["-m", "pacorl.cli", "train-policy", recipe, *SETTINGS, *settings, f"out={out}"]
    return subprocess.Popen(
        [sys.executable, "-m", *line, *command],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
