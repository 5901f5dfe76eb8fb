"""Time per phase of a run."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class PhaseClock:
    """Seconds by phase since the start of the run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the time of the block to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started
