"""Outages of a run's services: questions are asked again until a service answers, up to a deadline."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

OUTAGE_SECONDS = 900.0
"""Default length of an outage before a run ends: a 7B server restarts in minutes."""


class UnreachableError(ConnectionError):
    """A service is silent, or was for longer than the permitted outage."""

    exit_code = 75
    """Exit code of the command: EX_TEMPFAIL of sysexits.h, at which a scheduler starts it again."""


@runtime_checkable
class WaitsForOutages(Protocol):
    """A remote judge that can wait for its server."""

    def wait_for_outages(self, seconds: float = OUTAGE_SECONDS) -> None:
        """From now on retry questions that no server answers, for up to `seconds`; then raise UnreachableError."""
