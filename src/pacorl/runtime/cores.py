"""Number of CPU threads of a process. Apart from `runtime.processes`, whose imports take most of a second."""

import os


def use_cores() -> None:
    """Set one thread per core that this process may use, unless OMP_NUM_THREADS is set."""
    # torch counts the cores of the machine, not of a container or a launcher's share. More threads than cores are up
    # to 100 times slower.
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def available_cores() -> int:
    """Count the cores that this process may use."""
    # macOS and Windows have no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
