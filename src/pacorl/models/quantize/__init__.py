"""Frozen weights in 8 or 4 bits: a layer keeps its weight packed and unpacks it for each product.

Sampling and training unpack the same numbers, so the ratio before the first update stays exactly 1, and gradients are
those of a model that has the unpacked weights. What a layer keeps for its backward is the packed weight: torchao's
weight-only layers keep the unpacked one, which for FLUX.1-dev is the whole bf16 model again.

To add a form, write its `Quantizer` in a file here, and one line of `QUANTIZERS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from pacorl.config.table import Table

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NONE = "none"


@dataclass(frozen=True, slots=True)
class Quantizer:
    """Packing of a weight; both functions also work on meta tensors."""

    pack: Callable[[Tensor], tuple[Tensor, Tensor]]
    """A weight (out, in) in its own dtype → (codes, scales)."""
    unpack: Callable[[Tensor, Tensor, torch.Size, torch.dtype], Tensor]
    """(codes, scales, shape, dtype) → the weight that products are computed with."""
    check: Callable[[], None] = lambda: None
    """Raises ValueError with the installation command of a missing package."""


QUANTIZERS: Table[Quantizer] = Table(
    "quantisation",
    {
        "int8": "pacorl.models.quantize.int8:INT8",
        "fp8": "pacorl.models.quantize.fp8:FP8",
        "nf4": "pacorl.models.quantize.nf4:NF4",
    },
)


def _checked(name: str) -> str:
    if name != NONE:
        QUANTIZERS.named(name)
    return name


Quantization = Annotated[str, AfterValidator(_checked)]
"""A config's choice: `none`, or one of `QUANTIZERS`."""
