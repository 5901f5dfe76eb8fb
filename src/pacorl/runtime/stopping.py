"""Signals to stop, and lost or hung ranks: how a training loop learns that it has to end.

PaCo-GRPO and a character's LoRA use `StopSignals` through `Runtime`, a judge's training by itself.
"""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from types import FrameType, TracebackType
from typing import NamedTuple, Self

from torch.distributed import DistError, distributed_c10d

from pacorl.io.files import is_running

EX_TEMPFAIL = 75
"""Exit code of sysexits.h for a job script or scheduler to start the command again."""
REPEATED_SIGNAL = 3.0
"""Seconds within which a second signal is a launcher passing on the first, which a terminal sent to everyone."""
ENDING = 5.0
"""Seconds that a process may take to end after its connections, or to report that it has lost another one."""


class Interrupted(RuntimeError):
    """The run was told to stop."""

    exit_code = EX_TEMPFAIL
    """The command's."""


def exit_when_uncaught() -> None:
    """End a script whose Interrupted is not caught with its exit code, after the traceback; Python's own is 1."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if isinstance(error, Interrupted):
            sys.exit(error.exit_code)

    sys.excepthook = hook


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

    def __exit__(self, kind: type[BaseException] | None, *fault: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if kind and issubclass(kind, Interrupted):
            exit_when_uncaught()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.told and time.monotonic() - self._told_at > REPEATED_SIGNAL:
            raise KeyboardInterrupt
        if not self.told:
            self.told = True
            self._told_at = time.monotonic()


# --- other ranks -----------------------------------------------------------------------------------------------


class ProcessId(NamedTuple):
    """Process number and machine of a rank."""

    number: int
    machine: str
    """Host name; on Linux with the PID namespace, which differs between containers."""

    def __str__(self) -> str:
        return f"process {self.number} on {self.machine.partition('pid:')[0]}"


def own_process() -> ProcessId:
    """Identify this process for other ranks."""
    machine = platform.node()
    with suppress(OSError):
        machine += os.readlink("/proc/self/ns/pid")
    return ProcessId(os.getpid(), machine)


class LostRankError(RuntimeError):
    """The connection to another rank is cut, or it stands still."""


@contextmanager
def lost_ranks(rank: int, processes: Sequence[ProcessId]) -> Iterator[None]:
    """Replace the backend's error by one line naming the rank that died or hangs.

    Args:
        rank: this process's.
        processes: of all ranks.

    Raises:
        LostRankError: instead of a message of gloo or NCCL, with their files and addresses.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo has no kind of error of its own, and gives the line of its source in every message.
        if len(processes) == 1 or not (isinstance(error, DistError) or "gloo" in str(error)):
            raise
        raise LostRankError(
            f"rank {rank} of {len(processes)} has lost {_lost(rank, processes)}; what it said last, or the launcher, "
            "names the cause. Then start the same command again with --resume auto"
        ) from error


def _lost(rank: int, processes: Sequence[ProcessId]) -> str:
    """Describe the ranks that have ended or stand still."""
    # Until the store answers, which may be rank 0's own: it stands still too.
    silent = [0] if rank else []
    report = Thread(target=_report, args=(rank, len(processes), silent), daemon=True)
    report.start()

    # Only processes of this machine can be looked up.
    here = {other for other, process in enumerate(processes) if process.machine == processes[rank].machine}
    deadline = time.monotonic() + 2 * ENDING
    while not (ended := [other for other in sorted(here) if not is_running(processes[other].number)]):
        if time.monotonic() > deadline or not (silent or report.is_alive()):
            break
        time.sleep(0.1)
    if ended:
        return f"{_ranks(ended, processes)}, which {'has' if len(ended) == 1 else 'have'} ended"
    if not silent:
        return "its connection to the other ranks, whose processes all run"
    state = "stands still" if here.issuperset(silent) else "has ended, stands still or is out of reach"
    return f"{_ranks(silent, processes)}, which {state}"


def _report(rank: int, world: int, silent: list[int]) -> None:
    """Report to the process group's store, and list in `silent` the ranks that do not.

    Ranks that wait for a hung one lose it within moments of each other, since the first cuts its connections.
    """
    with suppress(RuntimeError, ValueError):  # there is no store, or it has ended with its rank
        store = distributed_c10d._get_default_store()
        store.set(f"pacorl/lost/{rank}", "")
        silent[:] = [other for other in range(world) if other != rank]
        deadline = time.monotonic() + ENDING
        while silent and time.monotonic() < deadline:
            time.sleep(0.1)
            silent[:] = [other for other in silent if not store.check([f"pacorl/lost/{other}"])]


def _ranks(numbers: Sequence[int], processes: Sequence[ProcessId]) -> str:
    return ", ".join(f"rank {number} ({processes[number]})" for number in numbers)
