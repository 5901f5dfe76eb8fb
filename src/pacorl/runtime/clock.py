"""Time per phase, and position, of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Position:
    """Position of a rank's main thread in the run. Only that thread writes it; other threads may read it."""

    epoch: int = 0
    """Number of the current epoch, from 1."""
    phase: str = "start"
    """Phase of the epoch, as in the names of `seconds/…`."""
    batches: int = 0
    """Finished batches of the phase."""
    meetings: int = 0
    """Collectives that the rank has reached. Their order is equal on all ranks, so fewer means that others wait."""

    def enter(self, phase: str) -> None:
        """Begin a phase; a repeated phase keeps its count of batches."""
        if phase != self.phase:
            self.phase = phase
            self.batches = 0

    def advance(self) -> None:
        """Count a batch of the phase."""
        self.batches += 1

    def __str__(self) -> str:
        return f"phase {self.phase}, batch {self.batches + 1}, epoch {self.epoch}"


class PhaseClock:
    """Seconds by phase since the start of the run."""

    def __init__(self, position: Position | None = None) -> None:
        """
        Args:
            position: updated to each timed phase.
        """
        self.seconds: dict[str, float] = defaultdict(float)
        self.position = position or Position()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        self.position.enter(phase)
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
