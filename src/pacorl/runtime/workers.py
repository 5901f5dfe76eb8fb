"""Calls on daemon threads with a time limit: the code of a user's reward may never return.

The threads of `ThreadPoolExecutor` keep the process from ending until each of their calls has returned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, closing, nullcontext
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from pacorl.runtime.stopping import Interrupted

LOOK_SECONDS = 0.1
"""Polling interval of a call that is waited for."""

Outcome = TypeVar("Outcome")
Context = Callable[[], AbstractContextManager[object]]


class CallTimeout(Interrupted):
    """A call has not returned within its time limit; its thread cannot be stopped, so the run has to end."""


class Call(Generic[Outcome]):
    """A call that a thread will take."""

    def __init__(self, act: Callable[[], Outcome], what: str, seconds: float) -> None:
        self.act = act
        self.what = what
        """Subject of the message if the limit is reached."""
        self.seconds = seconds
        """Time limit, from the moment at which a thread takes the call."""
        self.future: Future[Outcome] = Future()
        self.started = math.inf

    def result(self, check_stop: Callable[[], None] = lambda: None) -> Outcome:
        """Wait for the outcome, and return or raise it; `check_stop` is polled meanwhile and may raise to stop.

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
    """A pool of daemon threads that take calls in the order of submission."""

    def __init__(self, count: int, *, name: str, context: Context = nullcontext) -> None:
        """
        Args:
            count: most threads; each starts with a submission.
            name: prefix of the threads' names.
            context: makes the context of each call.
        """
        self.count = count
        self.name = name
        self.context = context
        self._queue: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._futures: list[Future[Any]] = []
        self._threads: list[Thread] = []

    def submit(self, act: Callable[[], Outcome], what: str, *, seconds: float = math.inf) -> Call[Outcome]:
        """Queue a call."""
        call = Call(act, what, seconds)
        self._futures.append(call.future)
        self._queue.put(call)
        if len(self._threads) < self.count:
            self._threads.append(Thread(target=self._work, name=f"{self.name}_{len(self._threads)}", daemon=True))
            self._threads[-1].start()
        return call

    def close(self) -> None:
        """Cancel queued calls, end the threads, and abandon those whose calls are running."""
        for future in self._futures:
            future.cancel()
        for _ in self._threads:
            self._queue.put(None)
        # A thread that is still within torch when the interpreter ends aborts the process.
        if all(future.done() for future in self._futures):
            for thread in self._threads:
                thread.join()

    def _work(self) -> None:
        while call := self._queue.get():
            if call.future.set_running_or_notify_cancel():
                call.started = time.monotonic()
                try:
                    with self.context():
                        outcome = call.act()
                except BaseException as error:  # `sys.exit` in a user's code too
                    call.future.set_exception(error)
                else:
                    call.future.set_result(outcome)
                    del outcome
            del call  # it holds images


def call_in_time(
    act: Callable[[], Outcome],
    what: str,
    *,
    seconds: float,
    context: Context = nullcontext,
    check_stop: Callable[[], None] = lambda: None,
) -> Outcome:
    """Call a function on a thread, which is abandoned at the time limit; see `Call`."""
    with closing(Workers(1, name="pacorl-call", context=context)) as workers:
        return workers.submit(act, what, seconds=seconds).result(check_stop)
