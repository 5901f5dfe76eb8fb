"""Queue of jobs: they run one at a time on another thread, report progress, and can be cancelled."""

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
    """Raised inside a cancelled job."""


class BusyError(RefusedError):
    """Too many jobs are waiting."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=429)


@dataclass(slots=True)
class Job:
    """Work of the queue. The worker's thread writes its fields, all threads read them."""

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
    """The browser of its request, and the only one to see it."""

    def advance(self, count: int) -> None:
        """Count progress. Raises CancelledError if the job is cancelled."""
        self.done += count
        self.check()

    def enter(self, phase: str, *, total: int = 0) -> None:
        """Begin a new phase; `total` is 0 if its length is unknown."""
        self.phase = phase
        self.done = 0
        self.total = total
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
    """The queue. `close` ends the worker after its current step."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[Job, Work] | None] = queue.Queue()
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        # A daemon: an interrupted process must not wait for the end of a set.
        self._worker = threading.Thread(target=self._run, name="studio", daemon=True)
        self._worker.start()

    def submit(self, kind: str, work: Work, *, owner: str = "") -> Job:
        """Put work at the end of the queue. Raises BusyError if too much is waiting."""
        with self._lock:
            if sum(job.status == "queued" for job in self._jobs.values()) >= MAX_WAITING:
                raise BusyError(f"{MAX_WAITING} jobs are waiting already; cancel one, or wait")
            job = Job(str(next(self._numbers)), kind, owner=owner)
            self._jobs[job.id] = job
            # The oldest go first, whose results the page has fetched long ago.
            ended = [job for job in self._jobs.values() if job.status in ENDED]
            for old in ended[: max(0, len(ended) - MAX_ENDED)]:
                del self._jobs[old.id]
        self._waiting.put((job, work))
        return job

    def find(self, name: str) -> Job | None:
        return self._jobs.get(name)

    def cancel(self, job: Job) -> None:
        """Cancel a job: a waiting job ends at once, a running job at its next step."""
        # At its next `check`: a thread cannot be stopped from outside.
        job.is_cancelled = True
        if job.status == "queued":
            job.status = "cancelled"

    @property
    def unfinished(self) -> list[Job]:
        # A copy, because requests submit jobs from other threads.
        return [job for job in list(self._jobs.values()) if job.status not in ENDED]

    def latest(self, kind: str, *, owner: str = "") -> Job | None:
        """Return the owner's newest job of a kind, except for cancelled and failed jobs."""
        for job in reversed(self._jobs.values()):
            if (job.kind, job.owner) == (kind, owner) and job.status not in ("cancelled", "failed"):
                return job
        return None

    def close(self) -> None:
        for job in self.unfinished:
            self.cancel(job)
        self._waiting.put(None)
        self._worker.join(timeout=10)

    def _run(self) -> None:
        for job, work in iter(self._waiting.get, None):
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
                # Messages of these classes are for users; anything else is a fault of ours, logged in full.
                if not isinstance(error, ValueError | OSError | RuntimeError):
                    logging.getLogger(__name__).exception("a job of the studio failed")
                job.error = str(error).strip() or type(error).__name__
                job.status = "failed"  # last: readers of the status read the error too
            finally:
                job.seconds = time.monotonic() - began
