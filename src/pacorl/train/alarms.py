"""The stop that the monitor of reward hacking may order, and the log that it goes on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pacorl.engine.monitor import Alarm
from pacorl.io.documents import read_jsonl


class HackingSuspectedError(ValueError):
    """A sign of reward hacking went beyond a limit that stops the run; the state is saved."""

    def __init__(self, stops: Sequence[Alarm], *, epoch: int) -> None:
        super().__init__(
            f"stopped after epoch {epoch}, and saved: {'; '.join(map(str, stops))}. Look at the samples; reward what "
            "is lost as well, or lower optimizer.lr, or go on with monitor.<sign>.action=warn"
        )


def logged_lines(path: Path) -> list[dict[str, float]]:
    """The lines of a run's log, for `HackingMonitor.restore`; none if there is no log."""
    return read_jsonl(path) if path.exists() else []
