"""The schedule: each part in a process with a time limit, its records and its outcome in a JSONL file.

It imports no torch, so that it holds no memory of the card and outlives whatever the libraries do.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = {
    "card": 40, "recipe": 200, "judge": 90, "bf16": 45, "compiled": 130, "epoch": 220, "resumed": 150, "int8": 45,
    "streamed": 50, "compiled-int8": 150,
}  # fmt: skip
"""Part → expected seconds on an H200, in the order in which they run."""
QUIET = {"HF_HUB_OFFLINE": "1", "KINETO_LOG_LEVEL": "9", "TRANSFORMERS_VERBOSITY": "error"}
Record = dict[str, Any]


def main(line: Sequence[str]) -> int:
    options = arguments(line)
    if not options.run:
        return run_day(options, line)
    import pacorl  # noqa: F401 - configures torch's allocator before torch is imported

    from .parts import RUN

    for record in RUN[options.run](options):
        append(options.out, {"part": options.run, **record})
    return 0


def arguments(line: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m research.gpu_day", description="Measure a card in parts.")
    parser.add_argument("--out", type=Path, default=Path("gpu-day.jsonl"), help="the JSONL file of results")
    parser.add_argument("--resume", action="store_true", help="go on with the parts that the results lack")
    parser.add_argument("--slice", type=float, default=9, metavar="MINUTES", help="end after so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--recipe", default="flux_t2is_1gpu", help="the recipe that is measured")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes in fp32")
    parser.add_argument("--work", type=Path, default=Path("runs/gpu-day"), help="a folder for 50 GB of checkpoints")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(line)


def run_day(options: argparse.Namespace, line: Sequence[str]) -> int:
    """Run parts until all are done or the slice is over; 1 if a part is lost, 2 if the results exist, else 0."""
    if options.out.exists() and not options.resume:
        print(f"gpu_day: {options.out} exists; go on with --resume, or name another --out", file=sys.stderr)
        return 2
    ends = time.monotonic() + 60 * options.slice
    past = outcomes(options.out)
    waiting = [part for part in options.parts if past.get(part) != "done"]
    waiting.sort(key=lambda part: part in past)  # what was lost comes last
    while True:
        left = ends - time.monotonic()
        part = next((part for part in waiting if PARTS[part] <= left), None)
        if part is None:
            break
        waiting.remove(part)
        append(options.out, run_part(part, options, line, limit=min(left, 60 + 2.5 * PARTS[part])))
    if waiting:
        print(f"gpu_day: {', '.join(waiting)} are left; go on with --resume")
    return int(any(outcome != "done" for outcome in outcomes(options.out).values()))


def run_part(part: str, options: argparse.Namespace, line: Sequence[str], *, limit: float) -> Record:
    """Run a part in a process of its own, and return its outcome: done, failed, or killed at its limit."""
    compiled = options.work.resolve() / "compiled"
    command = [sys.executable, "-m", __package__, *line, "--run", part]
    environment = {**os.environ, **QUIET, "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
    started = time.monotonic()
    try:
        # What a part starts ends with it.
        code = subprocess.call(command, env=environment, timeout=limit, preexec_fn=dies_with_parent)
        outcome = "failed" if code else "done"
    except subprocess.TimeoutExpired:
        outcome = "killed"
    if outcome != "done":
        shutil.rmtree(compiled, ignore_errors=True)  # a killed compiler leaves half a file, which others would read
    record = {"part": part, "outcome": outcome, "seconds": round(time.monotonic() - started, 1)}
    print("gpu_day:", *record.values(), flush=True)
    return record


def dies_with_parent() -> None:
    """Let the kernel kill this process when its parent ends, however that does; for `preexec_fn`."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of linux/prctl.h


def append(path: Path, record: Record) -> None:
    """Append a record in one write, which a kill does not tear, and sync it to disk."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(record).encode() + b"\n")
        os.fsync(file.fileno())


def outcomes(path: Path) -> dict[str, str]:
    """Return each part's last outcome."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return {record["part"]: record["outcome"] for record in map(json.loads, lines) if "outcome" in record}
