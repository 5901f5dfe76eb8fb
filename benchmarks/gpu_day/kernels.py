"""Time by class of kernel, from torch.profiler: products, attention, norms and elementwise, copies, and idle time."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .bench import Bench, device_of, run_of
from .forms import depth, sides
from .measuring import Work, timed
from .parts import Record

STEPS = 3
CLASSES = {
    "attention": r"flash|fmha|attention|sdpa|softmax",
    "gemm": r"gemm|gemv|cutlass|cublas|nvjet|wgmma|xmma|aten::(add)?mm|aten::(ba?d?d?)?bmm|aten::linear|conv",
    "copy": r"memcpy|memset|copy|aten::to\b|aten::clone|cat",
}
"""Class of kernel → pattern of its names. The first match counts; all other kernels are norms and elementwise."""
REST = "norm and elementwise"


def measure_kernels(options: argparse.Namespace) -> Iterator[Record]:
    """Seconds per class for a sampling step and a trained step, batch 1, at one depth in bf16."""
    device, side = device_of(options), sides(options)[0]
    blocks = depth(options)
    bench = Bench(run_of(side, options), options, device, blocks=blocks)
    samples = bench.collect(side, 1)
    works: dict[str, Work] = {
        "sample": partial(bench.sample, side, 1, None),
        "train": partial(bench.train, samples, side),
    }
    for phase, work in works.items():
        work()
        yield {"profile": phase, "blocks": blocks, **by_class(work, device)}


def by_class(work: Work, device: torch.device) -> dict[str, float]:
    """Seconds of one call per class of kernel, and those in which the device is idle."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    seconds = min(timed(work, device) for _ in range(STEPS))
    with profile(activities=activities, acc_events=True) as profiler:  # torch 2.11 warns without
        for _ in range(STEPS):
            work()
    kernels = kernel_seconds(profiler.key_averages(), device)
    table = {name: value / STEPS for name, value in classified(kernels).items()}
    # Measured without the profiler, which makes the host slower.
    table["idle"] = max(0.0, seconds - sum(table.values()))
    return table


def kernel_seconds(events: Any, device: torch.device) -> dict[str, float]:
    """Kernel → seconds; on a CPU its operators stand for kernels."""
    on_card = device.type == "cuda"
    kind = DeviceType.CUDA if on_card else DeviceType.CPU
    microseconds = "self_device_time_total" if on_card else "self_cpu_time_total"
    seconds = {}
    for event in events:
        # An annotation, such as the optimizer's step, is the time of its kernels once more.
        if event.device_type == kind and not event.is_user_annotation:
            seconds[event.key] = getattr(event, microseconds) / 1e6
    return seconds


def classified(kernels: Mapping[str, float]) -> dict[str, float]:
    """Seconds per class."""
    totals = dict.fromkeys([*CLASSES, REST], 0.0)
    for name, seconds in kernels.items():
        matching = (kind for kind, pattern in CLASSES.items() if re.search(pattern, name.lower()))
        totals[next(matching, REST)] += seconds
    return totals
