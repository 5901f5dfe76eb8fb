"""Thread counts: more threads than cores cost up to a hundredfold."""

from __future__ import annotations

import os

import torch


def use_cores() -> None:
    """One thread per core that this process may use, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, cores // local_world))
