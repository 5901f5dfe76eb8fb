"""Watcher thread: reports hung ranks, and ends a process whose main thread ignores a signal.

Python runs signal handlers on the main thread, between two of its instructions, so that one that waits in a collective,
in a kernel or for a frozen disk runs none. This thread learns of a signal by the file descriptor that Python's handler
in C writes to, and of other ranks by their heartbeats.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from threading import Lock, Thread

from pacorl.io.files import is_running
from pacorl.runtime.clock import Position
from pacorl.runtime.heartbeat import Beat, Heartbeats, ProcessId

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
"""Between two heartbeats."""
HUNG_SECONDS = 50.0
"""Without a heartbeat, or behind the other ranks without a move, after which a rank is reported."""
GRACE_SECONDS = 20.0
"""That the main thread has to meet a signal. Launchers kill 30 seconds after theirs."""
QUIET_BEATS = 4
"""Heartbeats that a rank may miss before another saves in its place."""
HANDOVER_SECONDS = 5.0
"""Extra time of ranks without a copy of the state, whose exit would break the saving rank's collectives."""
SAVE_SECONDS = 300.0
RELEASE_SECONDS = 3.0
SAY_SECONDS = 2.0
"""Time limits of the last save, of closing, and of a log line: each may block on a frozen disk."""
EX_TEMPFAIL = 75
"""Exit code of sysexits.h for a job script or scheduler to start the command again."""
UNSAVED = "what came after the newest checkpoint is lost; go on from it with --resume auto"
STOPS = frozenset({int(signal.SIGTERM), int(signal.SIGINT)})


@dataclass(slots=True)
class Member:
    """State of a rank as seen by this rank. Seconds exclude suspensions of this process."""

    beat: Beat
    """Newest beat."""
    silent: float = 0.0
    """Seconds since its newest beat."""
    behind: float = 0.0
    """Seconds without a move, while another rank waits for it."""
    reported: bool = False
    """Whether it is reported as hung."""

    @property
    def hung(self) -> bool:
        """Whether it has stood still for HUNG_SECONDS."""
        return not self.beat.left and max(self.silent, self.behind) >= HUNG_SECONDS

    def hear(self, beat: Beat) -> None:
        """Take a new beat."""
        if beat.position != self.beat.position:
            self.behind = 0.0
        self.beat = beat
        self.silent = 0.0


class Watch:
    """The watching thread of a rank. Use as a context manager, on the main thread, around the run.

    If the main thread ignores a signal for GRACE_SECONDS, it saves the state and ends the process with exit code 75.
    """

    def __init__(
        self,
        *,
        rank: int,
        processes: Sequence[ProcessId],
        position: Position,
        heartbeats: Heartbeats | None,
        save: Callable[[], str],
        release: Callable[[], None],
    ) -> None:
        """
        Args:
            rank: this process's.
            processes: processes of all ranks.
            position: this rank's.
            heartbeats: None for a single process.
            save: saves the last finished state on a rank of `savers`, and returns a message.
            release: closes child processes and locks.
        """
        # This process and its peers.
        self.rank = rank
        self.processes = processes
        self.position = position
        self.heartbeats = heartbeats
        self.told_at: float | None = None
        """When this rank learned of a signal to stop, which any rank may have had."""
        self._save = save
        self._release = release
        # Members by rank; other ranks join with their first heartbeat.
        self._members = {rank: Member(Beat(rank, copy(position)))}
        self._lost = ""
        """Why the main thread gave up, if it was told to stop and has lost another rank."""
        self._left = False
        # Times and locks of the thread.
        self._stepped = time.monotonic()
        self._beaten = -math.inf
        self._ending = Lock()
        """Held while the process ends; the main thread must not leave meanwhile."""
        self._thread = Thread(target=self._run, name="pacorl-watch", daemon=True)

    def __enter__(self) -> Watch:
        # Python's handler in C writes a signal's number here, whatever the main thread does.
        self._wakeup, self._writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._writer.setblocking(False)
        self._earlier = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *fault: object) -> None:
        with self._ending:
            self._left = True
        signal.set_wakeup_fd(self._earlier)
        self._wake()
        self._thread.join()
        if self.heartbeats:
            self.heartbeats.send(Beat(self.rank, copy(self.position), left=True))
        self._wakeup.close()
        self._writer.close()

    @property
    def told(self) -> bool:
        """Whether a stop signal of any rank has reached this rank."""
        return self.told_at is not None

    def end(self, reason: str) -> None:
        """End the process now, saved, as if the signal had not been met: the main thread has lost another rank."""
        self.told_at = self.told_at or time.monotonic()  # the thread may not have read it yet
        self._lost = reason
        self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the thread has enough to read
            self._writer.send(b"\0")

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        with DefaultSelector() as sources:
            sources.register(self._wakeup, EVENT_READ)
            if self.heartbeats:
                sources.register(self.heartbeats.socket, EVENT_READ)
            while not self._left:
                sources.select(BEAT_SECONDS / 2)
                with suppress(BlockingIOError):
                    if STOPS & set(self._wakeup.recv(64)):
                        self._tell()
                self._read_beats()
                self._step(time.monotonic())

    def _step(self, now: float) -> None:
        if now - self._beaten >= BEAT_SECONDS:
            self._beat()
            self._beaten = now
        # Bounded, since a suspension of this process is no sign of a hung rank.
        self._age(min(now - self._stepped, BEAT_SECONDS))
        self._stepped = now
        self._report()
        if self._is_overdue(now):
            self._end_process()

    def _tell(self) -> None:
        if self.told_at is None:
            self.told_at = time.monotonic()
            self._beat()  # at once, so that all ranks count alike
            if self.rank == min(self._members):
                _say("told to stop: the run ends after this batch, and saves")

    def _beat(self) -> None:
        beat = Beat(self.rank, copy(self.position), told=self.told)
        self._members[self.rank].hear(beat)
        if self.heartbeats:
            self.heartbeats.send(beat)

    def _read_beats(self) -> None:
        for beat in self.heartbeats.received() if self.heartbeats else ():
            # Watched from the first beat, so that a network blocking all beats makes no hung rank.
            self._members.setdefault(beat.rank, Member(beat)).hear(beat)
            if beat.told:
                self._tell()

    def _age(self, seconds: float) -> None:
        """Count seconds that have passed for this process."""
        furthest = max(member.beat.position.meetings for member in self._members.values())
        for rank, member in self._members.items():
            waited_for = member.beat.position.meetings < furthest
            member.behind = member.behind + seconds if waited_for else 0.0
            member.silent = member.silent + seconds if rank != self.rank else 0.0

    # --- reports -----------------------------------------------------------------------------------------------

    def _report(self) -> None:
        """Log a line for each hung rank, and for each that goes on again; only the lowest living rank logs."""
        living = [rank for rank, member in self._members.items() if member.silent < HUNG_SECONDS]
        if self.rank != min(living):
            return
        for rank, member in sorted(self._members.items()):
            if member.hung != member.reported:
                member.reported = member.hung
                _say(self._state_of(rank) if member.hung else f"{self._name(rank)} goes on")

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self.processes)} ({self.processes[rank]})"

    def _state_of(self, rank: int) -> str:
        member = self._members[rank]
        if member.silent >= QUIET_BEATS * BEAT_SECONDS:
            state = f"has sent no heartbeat for {member.silent:.0f} s: its process or machine stands still; it was in"
        elif member.behind:
            state = f"has not moved for {member.behind:.0f} s, and other ranks wait for it; it is in"
        else:
            state = "is still in"
        return f"{self._name(rank)} {state} {member.beat.position}"

    # --- the end -----------------------------------------------------------------------------------------------

    def _saver(self) -> int | None:
        """Find the first live rank that stores the state."""
        return next((rank for rank in savers(self.processes) if self._lives(rank)), None)

    def _lives(self, rank: int) -> bool:
        process = self.processes[rank]
        ended = process.machine == self.processes[self.rank].machine and not is_running(process.number)
        # A rank without any beat may live behind a blocking network, and two ranks must not save.
        silent = self._members[rank].silent if rank in self._members else 0.0
        return not ended and silent < QUIET_BEATS * BEAT_SECONDS

    def _is_overdue(self, now: float) -> bool:
        if self.told_at is None:
            return False
        seconds = GRACE_SECONDS + (HANDOVER_SECONDS if self._saver() != self.rank else 0.0)
        return bool(self._lost) or now - self.told_at >= seconds

    def _end_process(self) -> None:
        with self._ending:
            if self._left or self.told_at is None:
                return
            waited = time.monotonic() - self.told_at
            saver = self._saver()
            # The ranks that other ranks wait for, or else this rank.
            quiet = QUIET_BEATS * BEAT_SECONDS
            still = {rank: max(m.silent, m.behind) for rank, m in sorted(self._members.items()) if not m.beat.left}
            culprits = [rank for rank in still if still[rank] >= quiet] or [self.rank]
            states = self._lost or "; ".join(self._state_of(rank) for rank in culprits)
            if saver == self.rank:
                _say(f"told to stop {waited:.0f} s ago, and {states}; {self._saved()}")
            elif saver is None and self.rank == min(rank for rank in self._members if self._lives(rank)):
                _say(f"told to stop {waited:.0f} s ago, and {states}; {UNSAVED}")
            _bounded(self._release, RELEASE_SECONDS)
            os._exit(EX_TEMPFAIL)

    def _saved(self) -> str:
        outcomes: list[str] = []

        def save() -> None:
            try:
                outcomes.append(self._save())
            except Exception as error:  # whatever it is, the process has to end
                outcomes.append(f"the state could not be saved ({error}); {UNSAVED}")

        _bounded(save, SAVE_SECONDS)
        return next(iter(outcomes), f"the disk has not taken the state within {SAVE_SECONDS:g} s; {UNSAVED}")


def savers(processes: Sequence[ProcessId]) -> list[int]:
    """Ranks that keep the last finished state: rank 0 and a deputy on its machine, which has the run's folder."""
    return [rank for rank, process in enumerate(processes) if process.machine == processes[0].machine][:2]


def _bounded(act: Callable[[], object], seconds: float) -> None:
    """Run on a thread of its own, and wait no longer than `seconds`."""
    thread = Thread(target=act, daemon=True)
    thread.start()
    thread.join(seconds)


def _say(line: str) -> None:
    # The main thread may hold the locks of log and terminal, or their pipe may be full.
    _bounded(lambda: logger.warning(line), SAY_SECONDS)
