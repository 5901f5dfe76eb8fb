"""Sampling and training of the generator: in every form at two depths, and at full depth against the plan."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from pacorl.plan.memory import Phase
from pacorl.types import Samples

from .bench import FORMS, Bench, device_of, planned, run_of
from .measuring import Work, counted, matmul_peak, measured, release
from .parts import Record

SIDES, TINY_SIDES = (512, 1024), (32, 64)
DEPTH, TINY_DEPTH = 8, 2
"""Double blocks of the larger of the two depths, unless `--depth` sets it."""


def sides(options: argparse.Namespace) -> tuple[int, ...]:
    """Sides of the images in pixels: of training, and of evaluation."""
    return TINY_SIDES if options.tiny else SIDES


def depth(options: argparse.Namespace) -> int:
    """Double blocks of the larger of the two depths; of the only one for parts that measure one."""
    return options.depth or (TINY_DEPTH if options.tiny else DEPTH)


def measure_form(name: str, options: argparse.Namespace) -> Iterator[Record]:
    """Sampling and training at two depths and each batch, with and without checkpointing, and the ratio's deviation."""
    form = FORMS[name]
    device, side = device_of(options), sides(options)[0]
    for blocks in (depth(options) // 2, depth(options)):
        bench = Bench(run_of(side, options), options, device, form=form, blocks=blocks)
        for batch in options.batches:
            about = {"form": name, "blocks": blocks, "batch": batch, "side": side}
            for record in phases_of(bench, side, batch):
                yield {**about, **record}
        del bench
        release()


def phases_of(bench: Bench, side: int, batch: int) -> Iterator[Record]:
    """Records of one form at one depth and batch. Seconds of sampling are those of one forward."""
    repeats, device, steps = bench.options.repeats, bench.device, bench.options.steps
    record = measured(partial(bench.sample, side, batch), device, repeats=repeats)
    if "seconds" in record:
        record["seconds"] /= steps
    yield {"phase": "sample", **record}
    for checkpointing in (True, False):
        bench.checkpoint_gradients(enabled=checkpointing)
        yield {"phase": "train", "checkpointing": checkpointing, **trained(bench, side, batch)}


def trained(bench: Bench, side: int, batch: int) -> Record:
    """A trained step on new samples: the ratio's deviation before it, and its seconds and memory."""
    try:
        deviation = bench.ratio_deviation(side, batch)
        samples = bench.collect(side, batch)
    except torch.OutOfMemoryError as error:
        return {"error": f"out of memory: {str(error).splitlines()[0]}"}
    work = partial(bench.train, samples, side)
    return {"ratio_deviation": deviation, **measured(work, bench.device, repeats=bench.options.repeats)}


# --- full depth ------------------------------------------------------------------------------------------------


def measure_full(options: argparse.Namespace) -> Iterator[Record]:
    """The published depth in bf16, an image at a time, at both sizes."""
    yield from full_depth("bf16", 1, sides(options), options)


def measure_recipe(options: argparse.Namespace) -> Iterator[Record]:
    """The published depth as `flux_t2is` trains it: compiled, four images a forward."""
    yield from full_depth("compiled", 4, sides(options)[:1], options)


def full_depth(form: str, batch: int, sizes: Sequence[int], options: argparse.Namespace) -> Iterator[Record]:
    """Seconds, FLOPs, share of the products' peak, memory and its plan, by phase."""
    device = device_of(options)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    peak = matmul_peak(device, dtype, side=512 if options.tiny else 8192)
    yield {"figure": "products in the model's dtype, TFLOP/s", "value": peak / 1e12}
    bench = Bench(run_of(sizes[0], options, batch=batch), options, device, form=FORMS[form])
    for side in sizes:
        about = {"full_form": form, "batch": batch, "side": side}
        samples = bench.collect(side, batch)
        bench.checkpoint_gradients(enabled=True)
        bench.train(samples, side)  # the optimizer's moments exist from its first step on
        plan = planned(run_of(side, options, batch=batch))
        for phase, work in works(bench, samples, side, batch).items():
            yield {"full": phase, **about, **costs(work, bench, peak), "planned": plan.memory.phases[phase]}
        bench.checkpoint_gradients(enabled=False)
        work = partial(bench.train, samples, side)
        yield {"full": "train without checkpointing", **about, **costs(work, bench, peak)}


def works(bench: Bench, samples: Samples, side: int, batch: int) -> dict[Phase, Work]:
    """All steps of sampling, a decode, and a trained step."""
    return {
        "sample": partial(bench.sample, side, batch, None),
        "decode": partial(bench.decode, samples, side),
        "train": partial(bench.train, samples, side),
    }


def costs(work: Work, bench: Bench, peak: float) -> Record:
    """What `measured` returns, with `flops` and `share` of the peak."""
    record = measured(work, bench.device, repeats=bench.options.repeats)
    if "seconds" not in record:
        return record
    flops = counted(work)
    return {**record, "flops": flops, "share": flops / record["seconds"] / peak}
