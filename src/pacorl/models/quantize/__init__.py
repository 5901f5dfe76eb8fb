"""Frozen weights in int8: a layer keeps its weight packed and unpacks it for each product.

Sampling and training unpack the same numbers, so the ratio before the first update stays exactly 1, and gradients are
those of a model that has the unpacked weights. What a layer keeps for its backward is the packed weight: torchao's
weight-only layers keep the unpacked one, which for FLUX.1-dev is the whole bf16 model again.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

NONE: Final = "none"
INT8: Final = "int8"
Quantization = Literal["none", "int8"]
"""Form of a model's frozen weights."""


def check_quantization(name: str) -> None:
    """Raise ValueError for an unknown form."""
    if name not in get_args(Quantization):
        raise ValueError(f"there is no quantisation {name!r}, only {' and '.join(get_args(Quantization))}")
