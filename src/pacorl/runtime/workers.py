"""Calls on daemon threads with a time limit: the code of a user's reward may never return.

The threads of `ThreadPoolExecutor` keep the process from ending until each of their calls has returned.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from threading import Lock, Thread, current_thread
from typing import Any, Generic, TypeVar

from pacorl.runtime.stopping import Interrupted

LOOK_SECONDS = 0.1
"""Polling interval of a call that is waited for."""

Outcome = TypeVar("Outcome")


class CallTimeout(Interrupted):
    """A call has not returned within its time limit; its thread cannot be stopped, so the run has to end."""


@dataclass(eq=False)
class Call(Generic[Outcome]):
    """A call for a thread of a pool."""

    act: Callable[[], Outcome]
    what: str
    """Subject of the message if the limit is reached."""
    seconds: float = math.inf
    """Time limit, from the moment at which a thread takes the call."""
    future: Future[Outcome] = field(default_factory=Future)
    started: float = math.inf

    def result(self, check_stop: Callable[[], None] = lambda: None) -> Outcome:
        """Wait for the outcome, and return or raise it.

        Args:
            check_stop: polled during waiting; may raise to stop.

        Raises:
            CallTimeout: if the limit is reached.
        """
        while not wait([self.future], timeout=LOOK_SECONDS).done:
            check_stop()
            if time.monotonic() - self.started > self.seconds:
                raise CallTimeout(
                    f"{self.what} has not returned for {self.seconds:g} s; mend it, or raise reward_timeout"
                )
        return self.future.result()


class Workers:
    """A pool of daemon threads that take calls in their order, and end when none is queued.

    A thread that waited would keep its OpenMP threads, beside which those of the main thread take twice as long for
    small products on a CPU.
    """

    def __init__(
        self, count: int, *, name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """
        Args:
            count: most threads; each starts with a call.
            name: of the threads.
            context: makes the context of each thread.
        """
        self.count = count
        self.name = name
        self.context = context
        self._queue: deque[Call[Any]] = deque()
        self._threads: list[Thread] = []
        self._lock = Lock()

    def add(self, call: Call[Any]) -> None:
        """Queue a call."""
        with self._lock:
            self._queue.append(call)
            if len(self._threads) < self.count:
                self._threads.append(Thread(target=self._work, name=self.name, daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Drop queued calls, and abandon those that are running."""
        with self._lock:
            self._queue.clear()
            threads = [*self._threads]
        # A thread that is still within torch when the interpreter ends aborts the process.
        for thread in threads:
            thread.join(LOOK_SECONDS)

    def _next(self) -> Call[Any] | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._threads.remove(current_thread())
            return None

    def _work(self) -> None:
        with self.context():
            while call := self._next():
                call.started = time.monotonic()
                try:
                    call.future.set_result(call.act())
                except BaseException as error:  # `sys.exit` in a user's code too
                    call.future.set_exception(error)
                del call  # it holds images


def call_in_time(act: Callable[[], Outcome], what: str, *, seconds: float) -> Outcome:
    """Call a function on a thread, which is abandoned at the time limit; see `Call`."""
    call = Call(act, what, seconds)
    with closing(Workers(1, name="pacorl-call")) as workers:
        workers.add(call)
        return call.result()
