"""How many threads a process computes with; not in `runtime.processes`, whose imports cost most of a second."""

from __future__ import annotations

import os


def use_cores() -> None:
    """Set one thread per core that this process may use, unless OMP_NUM_THREADS says otherwise."""
    # torch counts the machine's cores, not those that a container or a launcher leaves to this process: more threads
    # than cores cost up to a hundredfold.
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def available_cores() -> int:
    """Cores that this process may use."""
    # macOS and Windows have no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
