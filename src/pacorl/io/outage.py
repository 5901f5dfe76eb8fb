"""Outages of a run's services: questions are asked again until a service answers, up to a deadline."""

from __future__ import annotations

import logging
import math
import random
import time
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)

OUTAGE_SECONDS = 900.0
"""Default length of an outage before a run ends: a 7B server restarts in minutes."""
BACKOFF_SECONDS = 0.5
"""Longest wait before the second attempt; it doubles with each further one."""
MAX_BACKOFF_SECONDS = 20.0
MAX_PROBE_SECONDS = 5.0
"""Longest time between two attempts in an outage, so that a restarted service is used within seconds."""
ANNOUNCED_SECONDS = 1.0
"""Length from which an outage is announced: a single broken connection is not worth a line."""


class UnreachableError(ConnectionError):
    """A service is silent, or was for longer than the permitted outage."""

    exit_code = 75
    """Exit code of the command: EX_TEMPFAIL of sysexits.h, at which a scheduler starts it again."""


def backoff(failed: int) -> float:
    """Draw the seconds before the next attempt, exponentially longer after each failed one."""
    # With jitter, so that ranks do not retry at the same time.
    longest = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (failed - 1))
    return random.uniform(longest / 2, longest)


class Outage:
    """Silence of all servers of a service."""

    def __init__(self, name: str, *, seconds: float) -> None:
        """
        Args:
            name: The service with its addresses, for messages.
            seconds: The length after which waiting ends.
        """
        self.name = name
        self.seconds = seconds
        self._answered_at = -math.inf
        self._since: float | None = None
        """Begin of the silence; None if the last request was answered."""
        self._announced = False

    @property
    def lasts(self) -> float:
        """Seconds for which no server has answered; 0 if one does."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def note_answer(self) -> None:
        """Note that a server has answered, whatever its answer is."""
        self._answered_at = time.monotonic()
        if self._announced and self._since is not None:
            logger.warning("%s answers again after %.0f s", self.name, self._answered_at - self._since)
        self._since = None
        self._announced = False

    def wait(self, fault: Exception, *, sent_at: float) -> float | None:
        """Note a request without an answer.

        Args:
            sent_at: Time of the request, by `time.monotonic`.

        Returns:
            The seconds before the next attempt; None if other requests were answered meanwhile, which is no outage.

        Raises:
            UnreachableError: the outage has lasted for `seconds`.
        """
        if self._since is None:
            if sent_at < self._answered_at:
                return None
            self._since = sent_at
        lasts = self.lasts
        if lasts >= self.seconds:
            raise UnreachableError(f"{self.name} has not answered for {lasts:.0f} s ({fault}); start it again")
        if not self._announced and lasts >= ANNOUNCED_SECONDS:
            self._announced = True
            logger.warning("%s does not answer (%s); it is retried for up to %g s", self.name, fault, self.seconds)
        # Rarer the longer the outage lasts.
        return min(MAX_PROBE_SECONDS, max(BACKOFF_SECONDS, lasts / 4)) * random.uniform(0.5, 1)


@runtime_checkable
class WaitsForOutages(Protocol):
    """A remote judge or reward that can wait for its servers."""

    def wait_for_outages(self, seconds: float | None = None) -> None:
        """From now on retry questions that no server answers, for up to `seconds`; then raise UnreachableError.

        Args:
            seconds: None for its own setting; 0 to leave the questions unanswered.
        """
