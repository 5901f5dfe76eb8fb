"""A queue of jobs that run one at a time in a thread of their own, report progress, and can be cancelled."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pacorl.web.guard import RefusedError

Status = Literal["queued", "running", "done", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("done", "failed", "cancelled")

MAX_WAITING = 8
MAX_ENDED = 8
"""Ended jobs whose results stay; a result of large images takes tens of megabytes."""


class CancelledError(Exception):
    """Raised inside a job that was cancelled."""


class BusyError(RefusedError):
    """Too many jobs are waiting."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429)


@dataclass(slots=True)
class Job:
    """One piece of work. Its fields are written by the worker and read by anyone."""

    id: str
    kind: str
    status: Status = "queued"
    phase: str = ""
    done: int = 0
    total: int = 0
    error: str = ""
    seconds: float = 0.0
    result: Mapping[str, Any] | None = None
    images: dict[str, bytes] = field(default_factory=dict)
    """PNG bytes by name."""
    is_cancelled: bool = False
    owner: str = ""
    """The browser that asked for it, and that alone may see it."""

    def advance(self, count: int) -> None:
        """So much more is done. Raises CancelledError if the job is cancelled."""
        self.done += count
        self.check()

    def enter(self, phase: str, *, total: int = 0) -> None:
        """A new phase begins; `total` is 0 if nobody knows how long it takes."""
        self.phase, self.done, self.total = phase, 0, total
        self.check()

    def check(self) -> None:
        if self.is_cancelled:
            raise CancelledError

    def to_dict(self) -> dict[str, Any]:
        # Without the images, which the page fetches one by one.
        shown = ("id", "kind", "status", "phase", "done", "total", "error", "result")
        return {name: getattr(self, name) for name in shown} | {"seconds": round(self.seconds, 1)}


Work = Callable[[Job], Mapping[str, Any]]


class JobQueue:
    """The queue. `close` ends the worker after the step that it is in."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Job, Work] | None] = queue.Queue()
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # A daemon: a process that is interrupted must not wait for the end of a set.
        self._worker = threading.Thread(target=self._run, name="studio", daemon=True)
        self._worker.start()

    def submit(self, kind: str, work: Work, *, owner: str = "") -> Job:
        """Put work at the end of the queue. Raises BusyError if too much is waiting."""
        with self._lock:
            if sum(job.status == "queued" for job in self._jobs.values()) >= MAX_WAITING:
                raise BusyError(f"{MAX_WAITING} jobs are waiting already; cancel one, or wait")
            job = Job(str(next(self._numbers)), kind, owner=owner)
            self._jobs[job.id] = job
            ended = [job for job in self._jobs.values() if job.status in ENDED]
            for old in ended[: max(0, len(ended) - MAX_ENDED)]:
                del self._jobs[old.id]
        self._waiting.put((job, work))
        return job

    def find(self, name: str) -> Job | None:
        return self._jobs.get(name)

    def cancel(self, job: Job) -> None:
        """A job that waits ends at once, one that runs at its next step; one that has ended stays as it is."""
        # A running job ends at its next `check`: a thread cannot be stopped from outside.
        job.is_cancelled = True
        if job.status == "queued":
            job.status = "cancelled"

    @property
    def unfinished(self) -> list[Job]:
        # Of a copy, because requests submit jobs from threads of their own.
        return [job for job in list(self._jobs.values()) if job.status not in ENDED]

    def latest(self, kind: str, *, owner: str = "") -> Job | None:
        """The owner's newest job of a kind that is not cancelled or failed."""
        jobs = [job for job in self._jobs.values() if (job.kind, job.owner) == (kind, owner)]
        return next((job for job in reversed(jobs) if job.status not in ("cancelled", "failed")), None)

    def close(self) -> None:
        for job in self.unfinished:
            self.cancel(job)
        self._waiting.put(None)
        self._worker.join(timeout=10)

    def _run(self) -> None:
        while (entry := self._waiting.get()) is not None:
            job, work = entry
            if job.status != "queued":  # cancelled while it waited
                continue
            began = time.monotonic()
            job.status = "running"
            # Whatever a job raises becomes its error: the page shows it, and the next job runs.
            try:
                job.result = work(job)
                job.status = "done"
            except CancelledError:
                job.status = "cancelled"
            except Exception as error:
                # These say in one line what the user can change; anything else is a fault of ours, logged in full.
                if not isinstance(error, ValueError | OSError | RuntimeError):
                    logging.getLogger(__name__).exception("a job of the studio failed")
                job.error = str(error).strip() or type(error).__name__
                job.status = "failed"  # last: whoever sees it reads the error too
            finally:
                job.seconds = time.monotonic() - began
