"""Seconds, memory and FLOPs of some work on a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from .parts import Record

Work = Callable[[], Any]


def measured(work: Work, device: torch.device, *, repeats: int) -> Record:
    """Seconds of the fastest repeat after a warm-up, and the peaks of the card's memory in bytes.

    Returns:
        `seconds`, `first_seconds` of the warm-up and, on a card, `allocated`, `reserved` and `retries` of the
        allocator. If the card's memory does not suffice: `error` alone.
    """
    release()
    try:
        first = timed(work, device)
        before = _reset_memory(device)
        seconds = min(timed(work, device) for _ in range(repeats))
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
    return {"seconds": seconds, "first_seconds": first, **_memory(device, retries_before=before)}


def timed(work: Work, device: torch.device) -> float:
    """Seconds until the device has finished."""
    synchronize(device)
    started = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    """Return unused memory to the card: after an error, its traceback held tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _reset_memory(device: torch.device) -> int:
    """Begin new peaks; the allocator's retries until now."""
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return _retries()


def _memory(device: torch.device, *, retries_before: int) -> Record:
    if device.type != "cuda":
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": _retries() - retries_before,
    }


def counted(work: Work) -> float:
    """FLOPs that torch executes, recomputation included."""
    with FlopCounterMode(display=False) as flops:
        work()
    return float(flops.get_total_flops())


def matmul_peak(device: torch.device, dtype: torch.dtype, *, side: int, repeats: int = 20) -> float:
    """FLOP/s of a large product, the fastest of three trials."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    timed(multiply, device)
    return 2 * side**3 * repeats / min(timed(multiply, device) for _ in range(3))
