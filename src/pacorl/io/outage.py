"""Outages of a run's services: questions are asked again until a service answers, up to a deadline."""

from __future__ import annotations

OUTAGE_SECONDS = 900.0
"""Default length of an outage before a run ends: a 7B server restarts in minutes."""


class UnreachableError(ConnectionError):
    """A service is silent, or was for longer than the permitted outage."""

    exit_code = 75
    """Exit code of the command: EX_TEMPFAIL of sysexits.h, at which a scheduler starts it again."""
