"""Signals to stop, by which a training loop learns that it has to end.

PaCo-GRPO and a character's LoRA use `StopSignals` through `Runtime`, a judge's training by itself.
"""

import signal
import time
from types import FrameType
from typing import Self

EX_TEMPFAIL = 75
"""Exit code of sysexits.h for a job script or scheduler to start the command again."""
REPEATED_SIGNAL = 3.0
"""Seconds within which a second signal is a launcher passing on the first, which a terminal sent to everyone."""


class Interrupted(RuntimeError):
    """A run that stopped early, by a signal or a time limit, and can be resumed."""

    exit_code = EX_TEMPFAIL
    """Exit code of the command."""


class StopSignals:
    """SIGTERM and SIGINT as requests to stop; a second signal, later, kills. A context manager of the main thread."""

    def __init__(self) -> None:
        self.told = False
        """Whether a signal has come."""
        self._told_at = 0.0

    def __enter__(self) -> Self:
        stops = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._handle) for number in stops}
        return self

    def __exit__(self, *fault: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.told:
            self.told = True
            self._told_at = now
        elif now - self._told_at > REPEATED_SIGNAL:
            raise KeyboardInterrupt
