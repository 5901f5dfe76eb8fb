"""Which sampling steps are stochastic, and trained, in an epoch: one window for all groups and processes.

Windows that differ between the samples of a group would make their rewards differ for that reason alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class NoiseWindow:
    """Chooses an epoch's steps among `steps`, the indices that may be chosen, ascending."""

    steps: tuple[int, ...]
    kind: Literal["fixed", "random", "sliding"] = "fixed"
    """fixed: all of `steps` in every epoch. random: `size` of them, drawn for each epoch. sliding: `size` neighbours
    among them, which move (MixGRPO, arXiv 2507.21802)."""
    size: int = 1
    stride: int = 1
    """Places by which a progressive sliding window moves."""
    interval: int = 1
    """Epochs for which a sliding window stays."""
    order: Literal["progressive", "random"] = "progressive"
    """Whether a sliding window goes from noise to picture and stays at the end, or jumps."""

    def at(self, epoch: int, *, seed: int) -> tuple[int, ...]:
        """The stochastic steps of `epoch` (from 0), ascending; the same for equal seeds."""
        if self.kind == "fixed":
            return self.steps
        if self.kind == "random":
            return tuple(sorted(_generator(seed, epoch).sample(self.steps, self.size)))
        last, move = len(self.steps) - self.size, epoch // self.interval
        if self.order == "progressive":
            first = min(move * self.stride, last)
        else:
            first = _generator(seed, move).randint(0, last)
        return self.steps[first : first + self.size]


def stage_size(curriculum: Sequence[tuple[int, tuple[int, int]]], epoch: int) -> tuple[int, int] | None:
    """The size of a curriculum's newest stage that has begun by `epoch` (from 0); None before its first."""
    begun = [size for start, size in sorted(curriculum) if start <= epoch]
    return begun[-1] if begun else None


def _generator(seed: int, draw: int) -> random.Random:
    return random.Random(f"noise window {seed} {draw}")
