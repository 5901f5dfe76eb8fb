"""Rates of single operations: the roofline that larger figures are compared with."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from pacorl.models.quantize import QUANTIZERS

from .bench import device_of
from .measuring import Work, measured, timed
from .parts import Record

Timer = Callable[[Work, torch.device], float]


def measure_rates(options: argparse.Namespace) -> Iterator[Record]:
    """One record per operation: TFLOP/s of products, attention and convolutions, GB/s of copies and unpacking."""
    device = device_of(options)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    small = 16 if options.tiny else 1
    for rate, unit, amount, work in works(device, dtype, small=small):
        record = measured(work, device, repeats=options.repeats)
        if "seconds" in record:
            record["value"] = amount / record["seconds"]
        yield {"rate": rate, "unit": unit, **record}


def works(device: torch.device, dtype: torch.dtype, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    """(name, unit, amount of one call in that unit's numerator, call); `small` divides every side."""
    yield from _products(device, dtype, small=small)
    yield from _int8_products(device, small=small)
    yield from _copies(device, small=small)
    yield from _attention(device, dtype, small=small)
    yield from _convolutions(device, dtype, small=small)
    yield from _unpacking(device, dtype, small=small)


def _products(device: torch.device, dtype: torch.dtype, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    # A square product, FLUX's MLP on the tokens of 512² at batch 1 and 8, and its adapter's two products.
    for rows, inner, cols in ((8192, 8192, 8192), (1536, 3072, 12288), (12288, 3072, 12288), (1536, 3072, 64)):
        m, k, n = (max(4, side // small) for side in (rows, inner, cols))
        a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
        yield f"product {m}×{k}×{n}", "TFLOP/s", 2 * m * k * n / 1e12, partial(F.linear, a, b)


def _int8_products(device: torch.device, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    # FLUX's MLP on the tokens of 512² at batch 1 and 8, as `sampling.products: w8a8` computes it.
    for rows in (1536, 12288):
        m, k, n = (side // small for side in (rows, 3072, 12288))
        a, b = (torch.randint(-127, 128, shape, dtype=torch.int8, device=device) for shape in ((m, k), (n, k)))
        yield f"int8 product {m}×{k}×{n}", "TFLOP/s", 2 * m * k * n / 1e12, partial(torch._int_mm, a, b.t())


def _copies(device: torch.device, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    size = 2**29 // small**2
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(on_device)
    yield "copy on the device, read and written", "GB/s", 2 * size / 1e9, partial(target.copy_, on_device)
    pageable = torch.zeros(size, dtype=torch.uint8)
    yield "copy from pageable memory", "GB/s", size / 1e9, partial(target.copy_, pageable)
    yield "copy to pageable memory", "GB/s", size / 1e9, partial(pageable.copy_, on_device)
    if device.type == "cuda":
        pinned = pageable.pin_memory()
        yield "copy from pinned memory", "GB/s", size / 1e9, partial(target.copy_, pinned, non_blocking=True)


def _attention(device: torch.device, dtype: torch.dtype, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    # The tokens of 512² and 1024² with 512 of a text.
    for tokens in (1536 // small, 4608 // small):
        heads, width = 24, 128
        q, k, v = (torch.randn(1, heads, tokens, width, device=device, dtype=dtype) for _ in range(3))
        flops = 4 * heads * tokens**2 * width
        yield f"attention over {tokens}", "TFLOP/s", flops / 1e12, partial(F.scaled_dot_product_attention, q, k, v)


def _convolutions(device: torch.device, dtype: torch.dtype, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    channels, side = max(8, 256 // small), max(8, 512 // small)
    x = torch.randn(1, channels, side, side, device=device, dtype=dtype)
    weight = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype)
    flops = 2 * 9 * channels**2 * side**2
    for name, layout in (("NCHW", torch.contiguous_format), ("NHWC", torch.channels_last)):
        inputs = x.to(memory_format=layout), weight.to(memory_format=layout)
        yield (
            f"convolution {channels} × {side}², {name}",
            "TFLOP/s",
            flops / 1e12,
            partial(F.conv2d, *inputs, padding=1),
        )


def _unpacking(device: torch.device, dtype: torch.dtype, *, small: int) -> Iterator[tuple[str, str, float, Work]]:
    weight = torch.randn(12288 // small, 3072 // small, device=device, dtype=dtype)
    for name, quantizer in QUANTIZERS.items():
        if name == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
            continue
        packed = quantizer.pack(weight)
        unpack = partial(quantizer.unpack, *packed, weight.shape, dtype)
        yield f"unpacking {name}, bytes of the unpacked weight", "GB/s", weight.nbytes / 1e9, unpack


def matmul_peak(
    device: torch.device, dtype: torch.dtype, *, side: int, repeats: int = 20, timer: Timer = timed
) -> float:
    """FLOP/s of a large product, the fastest of three trials."""
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))

    def multiply() -> None:
        for _ in range(repeats):
            torch.mm(a, b)

    timer(multiply, device)
    return 2 * side**3 * repeats / min(timer(multiply, device) for _ in range(3))
