"""Calls on daemon threads, which may be abandoned: of rewards and judges, whose code may never return.

The threads of `ThreadPoolExecutor` keep the process from ending until each of their calls has returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from pacorl.runtime.stopping import Interrupted

LOOK_SECONDS = 0.1
"""Polling interval of running calls."""

Outcome = TypeVar("Outcome")


class CallTimeout(Interrupted):
    """A call has not returned within its time limit; its thread cannot be stopped, so the run has to end."""


class Workers:
    """A pool of daemon threads that take calls in the order of submission."""

    def __init__(
        self, count: int, *, name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """
        Args:
            count: most threads; each starts with a submission.
            name: prefix of the threads' names.
            context: makes the context that each thread works in.
        """
        self.count = count
        self.name = name
        self.context = context
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads: list[Thread] = []

    def submit(self, act: Callable[[], Outcome]) -> Future[Outcome]:
        """Queue a call."""
        future: Future[Outcome] = Future()
        self._calls.put((future, act))
        if len(self._threads) < self.count:
            self._threads.append(Thread(target=self._work, name=f"{self.name}_{len(self._threads)}", daemon=True))
            self._threads[-1].start()
        return future

    def close(self) -> None:
        """Cancel queued calls, and abandon running calls."""
        with suppress(Empty):
            while call := self._calls.get_nowait():
                call[0].cancel()
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        with self.context():
            while call := self._calls.get():
                future, act = call
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(act())
                    except BaseException as error:  # `sys.exit` in a user's code too
                        future.set_exception(error)
                del call, future, act  # they hold images


@dataclass(slots=True)
class LimitedCall(Generic[Outcome]):
    """A call with a time limit."""

    workers: Workers
    """The pool that takes the call."""
    act: Callable[[], Outcome]
    name: str
    """Subject of the message if the limit is reached."""
    seconds: float = math.inf
    """The limit, from the moment at which a thread takes the call."""
    check_stop: Callable[[], None] = lambda: None
    """Called again and again while the outcome is waited for; may raise to stop."""
    _future: Future[Outcome] | None = None
    _started: float = math.inf

    def start(self) -> Future[Outcome]:
        """Queue the call, unless it is queued."""
        if self._future is None:
            self._future = self.workers.submit(self._timed)
        return self._future

    def result(self) -> Outcome:
        """Return or raise the outcome of the call, which starts now if it has not.

        Raises:
            CallTimeout: if the limit is reached.
        """
        future = self.start()
        while not wait([future], timeout=LOOK_SECONDS).done:
            self.check_stop()
            if time.monotonic() - self._started > self.seconds:
                raise CallTimeout(
                    f"{self.name} has not returned for {self.seconds:g} s; mend it, or raise reward_timeout"
                )
        return future.result()

    def _timed(self) -> Outcome:
        self._started = time.monotonic()
        return self.act()
