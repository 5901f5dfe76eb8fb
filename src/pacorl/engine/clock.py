"""Where a run's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pacorl.core.metric_names import SECONDS


class PhaseClock:
    """Seconds by phase, since the run began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the block's time to a phase."""
        started = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - started

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """`seconds/PHASE` of each phase, over what was read off `before`."""
        return {f"{SECONDS}{phase}": now - before.get(phase, 0.0) for phase, now in self.seconds.items()}
