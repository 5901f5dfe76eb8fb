"""Calls on daemon threads with a time limit: the code of a user's reward may never return.

The threads of `ThreadPoolExecutor` keep the process from ending until each of their calls has returned.
"""

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, nullcontext
from threading import Lock, Thread, current_thread
from threading import enumerate as enumerate_threads
from typing import Any, NoReturn, TypeVar

from pacorl.runtime.stopping import Interrupted

LOOK_SECONDS = 0.1
"""Polling interval while waiting for a call."""

CLOSE_SECONDS = 2.0
"""Time that running calls have to return when their pool is closed."""
Outcome = TypeVar("Outcome")


class Caller(Thread):
    """A thread of a pool, which `end_process` finds if it was abandoned."""


class CallTimeout(Interrupted):
    """A call has not returned within its time limit; its thread cannot be stopped, so the run has to end."""


class Workers:
    """A pool of daemon threads that take calls in their order, and end when none is queued.

    An idle thread would keep its OpenMP threads, which double the main thread's time for small products on a CPU.
    """

    def __init__(
        self, count: int, *, name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        """
        Args:
            count: most threads; each starts with a call.
            context: makes the context of each thread.
        """
        self.count = count
        self.name = name
        self.context = context
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._threads: list[Thread] = []
        self._lock = Lock()

    def submit(self, act: Callable[[], Outcome]) -> Future[Outcome]:
        """Queue a call."""
        future: Future[Outcome] = Future()
        with self._lock:
            self._queue.append((future, act))
            if len(self._threads) < self.count:
                self._threads.append(Caller(target=self._work, name=self.name, daemon=True))
                self._threads[-1].start()
        return future

    def close(self) -> None:
        """Drop queued calls, and wait a little for running calls, which are abandoned then."""
        with self._lock:
            self._queue.clear()
            threads = [*self._threads]
        until = time.monotonic() + CLOSE_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        with self.context():
            while True:
                with self._lock:
                    if not self._queue:
                        self._threads.remove(current_thread())
                        return
                    future, act = self._queue.popleft()
                try:
                    future.set_result(act())
                except BaseException as error:  # `sys.exit` in a user's code too
                    future.set_exception(error)
                del future, act  # they hold images


def outcome_of(future: Future[Outcome], what: str, *, seconds: float, check_stop: Callable[[], None]) -> Outcome:
    """Wait for a call's outcome, and return or raise it.

    Args:
        what: subject of the message if the limit is reached.
        seconds: time limit from now on. Calls of one thread are waited for in their order.
        check_stop: polled during waiting; may raise to stop.

    Raises:
        CallTimeout: if the limit is reached.
    """
    started = time.monotonic()
    while not wait([future], timeout=LOOK_SECONDS).done:
        check_stop()
        if time.monotonic() - started > seconds:
            raise CallTimeout(f"{what} has not returned for {seconds:g} s; mend it, or raise reward_timeout")
    return future.result()


def end_process(code: int) -> NoReturn:
    """End the process: at once if abandoned calls still run, since one within torch would abort it (exit code 134)."""
    if any(isinstance(thread, Caller) for thread in enumerate_threads()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
