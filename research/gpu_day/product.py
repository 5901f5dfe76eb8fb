"""The product itself: `pacorl train-policy` on checkpoints of random weights in the published shapes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import mkdtemp

from .parts import Record
from .runner import ROOT, end_with_parent

RECIPE = ROOT / "configs" / "flux_t2is_24gb.yaml"
SETTINGS = (
    "epochs=1", "save_every=1", "trackers=[]", "prompts_per_epoch=2", "group_size=4", "prompts.train=tiny:train:4",
    "prompts.evaluation=tiny:test:2", "sampling.batch=2", "evaluation.size=[512,512]", "evaluation.steps=4",
    "rewards=[{name: consistency}]",
)  # fmt: skip
"""One short epoch of the recipe on the tiny world's prompts, with the judge as its only reward."""
TINY_SETTINGS = (
    "model.dtype=float32", "model.max_sequence_length=48", "sampling.size=[64,64]",
    "sampling.steps=6", "sampling.suffix.steps=2", "evaluation.size=[64,64]",
)  # fmt: skip


def measure_product(options: argparse.Namespace) -> Iterator[Record]:
    """Seconds of writing both checkpoints, of a run and of its resumption, and all metrics that the run logged.

    Raises:
        RuntimeError: a command failed, or the resumed run has not two epochs.
    """
    folder = Path(mkdtemp(prefix="gpu-day-"))
    try:
        width = ["--width", "tiny" if options.tiny else "published"]
        depth = ["--depth", str(options.depth)] if options.depth else []
        for kind in ("flux", "judge"):
            seconds = run("research.twin", kind, str(folder / kind), *width, *depth)
            size = sum(path.stat().st_size for path in (folder / kind).rglob("*.safetensors"))
            yield {"figure": f"seconds to write {kind}", "value": seconds, "bytes": size}
        settings = [*SETTINGS, *(TINY_SETTINGS if options.tiny else ())]
        settings += [f"model.checkpoint={folder / 'flux'}", f"judge.checkpoint={folder / 'judge'}"]
        settings += [f"out={folder / 'run'}"]
        seconds = run("pacorl", "train-policy", str(RECIPE), *settings)
        yield {"figure": "seconds of train-policy, one epoch", "value": seconds}
        seconds = run("pacorl", "train-policy", str(RECIPE), *settings, "epochs=2", "--resume", "auto")
        yield {"figure": "seconds of train-policy, resumed for a second epoch", "value": seconds}
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        epochs = [line["epoch"] for line in lines if line["kind"] == "epoch"]
        if len(epochs) != 2:
            raise RuntimeError(f"the resumed run logged the epochs {epochs}, and should have logged two")
        for line in lines:
            yield {"run": line}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(*line: str) -> float:
    """Run a module in the root of the repository, and return its seconds. What it prints goes on at once.

    Raises:
        RuntimeError: it failed; the message is the last line that it printed.
    """
    started, last = time.monotonic(), "no message"
    with subprocess.Popen(
        [sys.executable, "-m", *line],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 - there are no threads
    ) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            print(printed, end="", flush=True)
            last = printed.strip() or last
    if process.returncode:
        raise RuntimeError(f"{' '.join(line[:2])} failed: {last}")
    return time.monotonic() - started


def environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
