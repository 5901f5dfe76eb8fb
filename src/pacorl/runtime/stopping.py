"""Signals to stop, of any rank, and lost ranks: how a training loop learns that it has to end.

Every training uses the same `StopSignals`: PaCo-GRPO and a character's LoRA through `Runtime`, the judge's by itself.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import DistError

from pacorl.io.files import is_running
from pacorl.runtime.clock import Position
from pacorl.runtime.heartbeat import Heartbeats, ProcessId
from pacorl.runtime.watch import EX_TEMPFAIL, UNSAVED, Watch

REPEATED_SIGNAL = 3.0
"""Seconds within which a second signal is a launcher passing on the first, which a terminal sent to everyone."""
ENDING = 5.0
"""Seconds that a process may take to end after its connections: it gives its memory back in between."""


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


class LostRankError(RuntimeError):
    """The connection to another rank is cut."""


@contextmanager
def lost_ranks(rank: int, processes: Sequence[ProcessId]) -> Iterator[None]:
    """Replace the backend's error by one line naming the rank that died.

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
    """Describe the ranks that have ended, or the candidates on other machines."""
    # Only processes of this machine can be looked up.
    here = [other for other, process in enumerate(processes) if process.machine == processes[rank].machine]
    deadline = time.monotonic() + ENDING
    while not (ended := [other for other in here if not is_running(processes[other].number)]):
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    elsewhere = [other for other in range(len(processes)) if other not in here]
    if ended:
        return f"{_ranks(ended)}, which {'has' if len(ended) == 1 else 'have'} ended"
    if elsewhere:
        one_of = "one of " if len(elsewhere) > 1 else ""
        return f"{one_of}{_ranks(elsewhere)}, which has ended or whose machine is out of reach"
    return "its connection to the other ranks, whose processes all run"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


class StopSignals:
    """SIGTERM and SIGINT of all ranks as requests to stop, with heartbeats and the watch over hung ranks."""

    def __init__(
        self,
        rank: int,
        processes: Sequence[ProcessId],
        *,
        position: Position,
        gather: Callable[[Any], Sequence[Any]],
    ) -> None:
        """
        Args:
            rank: this process's.
            processes: processes of all ranks.
            position: of this rank's main thread, which keeps it up to date.
            gather: collective from a value to all ranks' values.
        """
        self.rank = rank
        self.processes = processes
        self.position = position
        self._gather = gather
        self._told_at: float | None = None
        self._watch: Watch | None = None

    @property
    def told(self) -> bool:
        """Whether a stop signal of any rank has reached this rank."""
        return self._told_at is not None or (self._watch is not None and self._watch.told)

    @contextmanager
    def handled(
        self, *, save: Callable[[], str] = lambda: UNSAVED, release: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Handle SIGTERM and SIGINT during the block as a request to stop; a second signal, later, kills.

        A hung rank is reported. If the main thread ignores a signal beyond the watch's grace, the process ends with
        exit code 75. All ranks enter.

        Args:
            save: saves the last finished state without the main thread, and returns a message.
            release: closes child processes and locks.
        """

        # The second signal ends the process at once, unless a launcher has repeated the first.
        def handle(number: int, frame: FrameType | None) -> None:
            if self._told_at is None:
                self._told_at = time.monotonic()
            elif time.monotonic() - self._told_at > REPEATED_SIGNAL:
                raise KeyboardInterrupt

        with ExitStack() as stack:
            # 1. Heartbeats among several ranks, and the watch over them.
            heartbeats = None
            if len(self.processes) > 1:
                one_machine = len({process.machine for process in self.processes}) == 1
                stack.enter_context(lost_ranks(self.rank, self.processes))
                heartbeats = Heartbeats(self.rank, one_machine=one_machine, gather=self._gather)
                stack.enter_context(closing(heartbeats))
            self._watch = watch = stack.enter_context(
                Watch(
                    rank=self.rank,
                    processes=self.processes,
                    position=self.position,
                    heartbeats=heartbeats,
                    save=save,
                    release=release,
                )
            )

            # 2. The signals.
            try:
                before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
                try:
                    yield
                finally:
                    for number, handler in before.items():
                        signal.signal(number, handler)
            except LostRankError as error:
                if self.told:
                    watch.end(str(error))
                raise
            except Interrupted:
                exit_when_uncaught()
                raise
            finally:
                self._watch = None
