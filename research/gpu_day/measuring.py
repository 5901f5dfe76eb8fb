"""Seconds, memory, FLOPs and kernels of some work on the device."""

from __future__ import annotations

import gc
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from .day import Record

REST = "elementwise and norm"
CLASSES = {
    REST: r"^triton_(poi|red|per)|^cpp_fused",  # first: their names list the operators that they fuse
    "attention": r"flash|fmha|attention|sdpa|softmax",
    "copy": r"memcpy|memset|copy|catarray|nchwtonhwc|nhwctonchw|aten::(cat|clone|to)$",
    "products": r"gemm|gemv|cutlass|cublas|nvjet|wgmma|xmma|conv|aten::(addmm|mm|bmm|baddbmm|linear)$",
}
"""Class of kernels → pattern of their names in lower case. The first match counts; all others are of REST."""


def measured(work: Callable[[], Any]) -> Record:
    """Measure some work on the card; on a CPU operators stand for kernels, and its memory is 0.

    Returns:
        `seconds` of the fastest repeat, and `first_seconds` of the warm-up; peaks of `allocated` and `reserved` bytes;
        `flops`, recomputation included; seconds by `classes` of kernels, and their number; `idle` seconds; `launches`
        by the host; and the `largest` kernels.
    """
    gc.collect()
    record: Record = {"first_seconds": timed(work)}
    on_card = torch.cuda.is_available()
    if on_card:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    record["seconds"] = min(timed(work) for _ in range(3))
    record["allocated"] = torch.cuda.max_memory_allocated()
    record["reserved"] = torch.cuda.max_memory_reserved()
    # Compiled code that once meets a counter of FLOPs would stay uncompiled from then on.
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
        work()
    record["flops"] = counter.get_total_flops()

    # Kernels. Idle time is by the seconds from above: the profiler slows the host, and no kernel.
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_card else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        timed(work)
    events = profiler.key_averages()
    device = DeviceType.CUDA if on_card else DeviceType.CPU
    seconds, kernels, seconds_of_class = Counter[str](), Counter[str](), Counter[str]()
    for event in events:
        # An annotation, such as the optimizer's step, is the time of its kernels once more.
        if event.device_type == device and not event.is_user_annotation:
            seconds[event.key] = (event.self_device_time_total if on_card else event.self_cpu_time_total) / 1e6
            matching = (name for name, pattern in CLASSES.items() if re.search(pattern, event.key.lower()))
            name = next(matching, REST)
            seconds_of_class[name] += seconds[event.key]
            kernels[name] += event.count
    record |= {"classes": seconds_of_class, "kernels": kernels}
    record["idle"] = max(0.0, record["seconds"] - seconds.total())
    record["launches"] = sum(event.count for event in events if re.match(r"cu(da)?(Graph)?Launch", event.key))
    record["largest"] = seconds.most_common(20)
    return record


def timed(work: Callable[[], Any]) -> float:
    """Return the seconds until the device has finished."""
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
