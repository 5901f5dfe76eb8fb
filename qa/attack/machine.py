"""What a server has used of the machine, and how long it would have waited on a machine with nothing else to do."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Ready:
    """Seconds without a processor of all threads that were ever seen.

    The system forgets a thread that has ended, such as that of a decoder that was replaced. What it has waited would be
    taken for the server's own time.
    """

    total: float = 0.0
    seen: dict[str, float] = field(default_factory=dict)

    def of(self, tasks: Sequence[str]) -> float:
        for task in tasks:
            ready, before = _schedule(task)[1], self.seen.get(task, 0.0)
            self.total += ready - before if ready >= before else ready  # else another thread has its number
            self.seen[task] = ready
        return self.total


READY: dict[int, Ready] = {}
"""Server → its threads and ours."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What a server, its children and the machine have used up, in seconds."""

    clock: float
    computed: float
    """By the server and its children, those that are gone included."""
    loop: float
    """By the thread that the event loop runs in."""
    ready: float
    """Of all threads, without a processor, those that have ended included."""
    machine: float
    """By all processes."""
    stolen: float
    """By machines beside this one."""

    @classmethod
    def of(cls, pid: int) -> Moment:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _, _, irq, softirq, stolen = (int(number) / TICKS for number in fields[:8])
        family = [pid, *children(pid)]
        return cls(
            clock=time.monotonic(),
            computed=sum(_times(member, whole=True) for member in family),
            loop=_schedule(f"/proc/{pid}/task/{pid}")[0],
            ready=READY.setdefault(pid, Ready()).of(
                [task for member in [*family, os.getpid()] for task in _tasks(member)]
            ),
            machine=user + nice + system + irq + softirq,
            stolen=stolen,
        )

    def waited(self, since: Moment) -> float:
        """Seconds that a wait since then would have taken on a machine with nothing else to do, or fewer."""
        others = max(0.0, self.machine - since.machine - (self.computed - since.computed))
        taken = min(max(0.0, self.ready - since.ready), others) + self.stolen - since.stolen
        return max(self.clock - since.clock - taken, self.loop - since.loop)


def children(pid: int) -> list[int]:
    """The running children of a process: a server's are its decoders."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it is gone by now
                if int((entry / "stat").read_text().rpartition(") ")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def _tasks(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return [f"/proc/{pid}/task/{task}" for task in os.listdir(f"/proc/{pid}/task")]
    return []


def _schedule(task: str) -> tuple[float, float]:
    """(seconds of a processor, seconds ready without one) of a thread."""
    with contextlib.suppress(OSError, ValueError):
        ran, ready, *_ = map(int, Path(task, "schedstat").read_text().split())
        return ran / 1e9, ready / 1e9
    return 0.0, 0.0


def _times(pid: int, *, whole: bool) -> float:
    with contextlib.suppress(OSError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
        return sum(map(int, fields[11 : 15 if whole else 13])) / TICKS
    return 0.0


def memory(pid: int, name: str) -> int:
    """Bytes of a process: VmRSS now, VmHWM at most since `forget_peak`; 0 if it is gone."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
        found = re.search(rf"{name}:\s+(\d+)", status)
        return int(found[1]) * 1024 if found else 0
    return 0


def forget_peak(pid: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")
