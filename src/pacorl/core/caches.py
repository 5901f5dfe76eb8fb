"""Caches of a transformer's features between the deterministic steps of a suffix, as diffusers' own hooks keep them.

Neighbouring steps of a trajectory compute nearly the same features, so that a step may reuse or extrapolate those of
the steps before it. That is lossy, and a stochastic step must be replayed exactly: caches are for steps without noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from pacorl.config.base import Section
from pacorl.config.one_of import OneOf
from pacorl.core.table import Table

if TYPE_CHECKING:
    import torch


LEAST_STEPS = 2
"""The first step of a suffix has nothing to reuse."""


class CacheOptions(Section):
    """The settings of a cache: `sampling.suffix.cache`."""

    name: str


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A cache, by the hooks that diffusers puts on a transformer with a `CacheMixin`."""

    options: type[CacheOptions]
    hooks: Callable[[Any, torch.dtype], Any]
    """From its options and the transformer's dtype to what `enable_cache` takes."""
    between_blocks: bool = False
    """Whether its hooks keep what the blocks between the first and the last one add."""
    shardable: bool = True
    """Whether the hooks know the classes that FSDP2 makes of a transformer's blocks."""

    def check(self, steps: int) -> None:
        """
        Raises:
            ValueError: if so few steps leave none to skip.
        """
        if steps < LEAST_STEPS:
            name = self.options.model_fields["name"].default
            raise ValueError(
                f"sampling.suffix.cache {name} computes the first step, and the suffix has {steps}; give it "
                f"{LEAST_STEPS} steps, or leave the cache out"
            )


class FirstBlockOptions(CacheOptions):
    """A step whose first block changes little computes no other block and adds what the others added before."""

    name: Literal["first_block"] = "first_block"
    # On the tiny generator .2 skips less and agrees no better, and at .4 a group's advantages correlate below .9.
    threshold: float = Field(0.3, gt=0)
    """The relative change of the first block's residual, as a mean over the batch, below which a step is skipped."""


def first_block(options: FirstBlockOptions, dtype: torch.dtype) -> Any:
    from diffusers import FirstBlockCacheConfig

    return FirstBlockCacheConfig(threshold=options.threshold)


class TaylorOptions(CacheOptions):
    """A skipped step extrapolates the transformer's output by the computed ones (TaylorSeer, arXiv 2503.06923)."""

    name: Literal["taylor"] = "taylor"
    # On the tiny generator half the forwards then keep a correlation of .975 (docs/measurements.md).
    interval: int = Field(2, ge=2)
    """One in so many steps is computed, the first and the third among them."""


def taylor(options: TaylorOptions, dtype: torch.dtype) -> Any:
    import torch
    from diffusers import TaylorSeerCacheConfig

    return TaylorSeerCacheConfig(
        cache_interval=options.interval,
        disable_cache_before_step=1,
        # diffusers' own default rounds to bf16 whatever the model's.
        taylor_factors_dtype=torch.promote_types(dtype, torch.float32),
        use_lite_mode=True,
    )


FIRST_BLOCK = CacheSpec(FirstBlockOptions, first_block, between_blocks=True, shardable=False)
TAYLOR = CacheSpec(TaylorOptions, taylor)

CACHES: Table[CacheSpec] = Table(
    "cache", {"first_block": "pacorl.core.caches:FIRST_BLOCK", "taylor": "pacorl.core.caches:TAYLOR"}
)


def _section(value: Any) -> Any:
    """A cache by its name alone, or `none`."""
    section = {"name": value} if isinstance(value, str) else value
    return None if value == "none" else section


CacheSection = Annotated[
    Annotated[CacheOptions, OneOf(CACHES, key="name", default="taylor")] | None, BeforeValidator(_section)
]
"""The options of one cache, its name alone for its defaults, or `none`."""
