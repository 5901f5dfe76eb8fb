"""Outages of a run's services: retries until a deadline.

outage = Outage("judge at http://127.0.0.1:8000/v1", circuits, seconds=900)
await retried(attempt, tries=7, outage=outage)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from pacorl.io.net import MAX_BACKOFF_SECONDS, UNAVAILABLE, Answer, Circuit, SilentError, TransientError, exchange

T = TypeVar("T")

logger = logging.getLogger(__name__)

BACKOFF_SECONDS = 0.5
"""Longest wait before the second attempt; it doubles with each further one."""
OUTAGE_SECONDS = 900.0
"""Default length of an outage before a run ends: a 7B server restarts in minutes."""
MAX_PROBE_SECONDS = 5.0
"""Longest time between two probes, so that a restarted service is used within seconds."""
GROWTH = 0.25
"""Time between two probes, as a share of the outage so far."""
POLL_SECONDS = 0.2
"""Interval at which a waiting question checks for its turn, without a request."""
ANNOUNCED_SECONDS = 1.0
"""Length from which an outage is announced: a single broken connection is not worth a line."""


class UnreachableError(ConnectionError):
    """A service is silent, or was for longer than the permitted outage."""

    exit_code = 75
    """Exit code of the command: EX_TEMPFAIL of sysexits.h, at which a scheduler starts it again."""


class Outage:
    """The silence of all endpoints of a service: one question at a time probes them, the rest waits."""

    def __init__(self, name: str, circuits: Sequence[Circuit], *, seconds: float) -> None:
        """
        Args:
            name: the service with its addresses, for messages.
            circuits: one per endpoint.
            seconds: the length after which waiting ends.
        """
        self.name = name
        self.seconds = seconds
        self._circuits = circuits
        self._next_probe = 0.0
        self._reason = ""
        """Fault of the last probe, after which waiting ended; empty before."""
        self._announced_since: float | None = None
        """Begin of the announced outage; None without an announcement."""

    @property
    def lasts(self) -> float:
        """Seconds for which no endpoint has answered; 0 if one does."""
        return min(circuit.silent_seconds for circuit in self._circuits)

    def check(self) -> None:
        """Raise SilentError during an outage, unless it is this question's turn to probe."""
        lasts = self.lasts
        if not lasts:
            return
        now = time.monotonic()
        if now < self._next_probe:
            raise SilentError(f"nobody has answered for {lasts:.0f} s")
        # Probes are rarer the longer the outage lasts.
        interval = min(MAX_PROBE_SECONDS, max(BACKOFF_SECONDS, GROWTH * lasts))
        self._next_probe = now + interval / len(self._circuits)

    async def pause(self, fault: TransientError) -> None:
        """Wait a moment before the next attempt of an unanswered question.

        Raises:
            UnreachableError: the outage has lasted for `seconds`.
        """
        lasts = self.lasts
        if not isinstance(fault, SilentError):
            # Most silences last a moment, and a line for each would hide the long ones.
            if self._announced_since is None and lasts >= ANNOUNCED_SECONDS:
                self._announced_since = time.monotonic() - lasts
                logger.warning("%s does not answer (%s); it is retried for up to %g s", self.name, fault, self.seconds)
            self._reason = str(fault) if lasts >= self.seconds else ""
        if self._reason:
            raise UnreachableError(f"{self.name} has not answered for {lasts:.0f} s ({self._reason}); start it again")
        await asyncio.sleep(random.uniform(POLL_SECONDS / 2, POLL_SECONDS))

    def note_end(self) -> None:
        """Announce the end of an announced outage."""
        self._reason = ""
        if self._announced_since is not None:
            logger.warning("%s answers again after %.0f s", self.name, time.monotonic() - self._announced_since)
            self._announced_since = None


async def retried(attempt: Callable[[int], Awaitable[T]], *, tries: int, outage: Outage | None = None) -> T:
    """Return the result of the first of `tries` attempts (numbered from 0) without a TransientError.

    Attempts during an outage do not count as tries. Without an `outage` a SilentError is raised at once.

    Raises:
        UnreachableError: the outage lasts too long.
    """
    # `number` counts attempts that reached the service, `failed` those that count as tries.
    failed = number = 0
    while True:
        try:
            outcome = await attempt(number)
        except TransientError as fault:
            gated = isinstance(fault, SilentError)
            number += not gated
            if outage and (gated or outage.lasts):
                await outage.pause(fault)
                continue
            if gated:
                raise
            failed += 1
            if failed >= tries:
                raise TransientError(f"{fault} (attempt {tries}, the last)", unreachable=fault.unreachable) from None
            # Exponential backoff with jitter, so that ranks do not retry at the same time.
            longest = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (failed - 1))
            await asyncio.sleep(max(fault.wait, random.uniform(longest / 2, longest)))
        else:
            if outage:
                outage.note_end()
            return outcome


async def ask(
    url: str,
    document: Any,
    read: Callable[[Answer], T],
    *,
    tries: int,
    circuit: Circuit,
    outage: Outage | None = None,
    **options: Any,
) -> T:
    """Return `read` of the first answer that it accepts with a final status; `options` are `exchange`'s."""

    async def attempt(_: int) -> T:
        (outage or circuit).check()
        with circuit.noting():
            answer = await exchange(url, document, **options)
            if answer.status in UNAVAILABLE:
                raise answer.fault(unreachable=True)
        if answer.passing:
            raise answer.fault()
        return read(answer)

    return await retried(attempt, tries=tries, outage=outage)


@runtime_checkable
class WaitsForOutages(Protocol):
    """A remote judge or reward that can wait for its servers."""

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry questions that no server answers, for up to `seconds`; then raise UnreachableError.

        Args:
            seconds: None for its own setting; 0 to leave the questions unanswered.
        """
