"""Where a run's time goes, and where the run is."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from pacorl.core.metric_names import SECONDS


@dataclass(slots=True)
class Position:
    """Position of a rank's main thread in the run. Only that thread writes it; others read it at any time."""

    epoch: int = 0
    """Number of the newest epoch that has begun, from 1."""
    phase: str = "start"
    """Phase of the epoch, as in the names of `seconds/…`."""
    batches: int = 0
    """Finished batches of the phase."""
    meetings: int = 0
    """Collectives that the rank has reached. Ranks pass them in one order, so a rank with fewer is waited for."""

    def enter(self, phase: str) -> None:
        """Begin a phase; a phase that goes on keeps its count of batches."""
        if phase != self.phase:
            self.phase, self.batches = phase, 0

    def advance(self) -> None:
        """Count a batch of the phase."""
        self.batches += 1

    def __str__(self) -> str:
        return f"phase {self.phase}, batch {self.batches + 1}, epoch {self.epoch}"


class PhaseClock:
    """Seconds by phase, since the run began."""

    def __init__(self, position: Position | None = None) -> None:
        """
        Args:
            position: is moved to each phase that is timed.
        """
        self.seconds: dict[str, float] = defaultdict(float)
        self.position = position or Position()

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's time to a phase."""
        self.position.enter(phase)
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """`seconds/PHASE` of each phase, over what was read off `before`."""
        return {f"{SECONDS}{phase}": now - before.get(phase, 0.0) for phase, now in self.seconds.items()}
