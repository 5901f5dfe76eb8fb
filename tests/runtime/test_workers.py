"""Calls on threads that may be abandoned."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from pacorl.runtime.workers import Call, CallTimeout, Workers, call_in_time


def queued(workers: Workers, act: Callable[[], Any], *, seconds: float = math.inf) -> Call[Any]:
    call = Call(act, "it", seconds)
    workers.add(call)
    return call


def test_calls_are_taken_in_order_by_so_many_threads() -> None:
    names: list[tuple[int, str]] = []
    workers = Workers(1, name="one")
    calls = [queued(workers, lambda n=n: names.append((n, threading.current_thread().name))) for n in range(20)]  # type: ignore[misc]
    for call in calls:
        call.result()
    assert names == [(n, "one") for n in range(20)]
    both = Workers(2, name="two")
    meeting = threading.Barrier(2)
    for call in [queued(both, meeting.wait) for _ in range(2)]:  # type: ignore[assignment]
        call.result()
    for pool in (workers, both):
        pool.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("one", "two"))]


def test_what_a_call_raises_comes_through() -> None:
    workers = Workers(1, name="one")
    with pytest.raises(SystemExit):
        queued(workers, sys.exit).result()
    assert queued(workers, lambda: 3).result() == 3
    workers.close()


def test_a_call_that_waits_for_its_turn_is_not_late() -> None:
    workers = Workers(1, name="one")
    queued(workers, lambda: time.sleep(0.8))
    assert queued(workers, lambda: 2, seconds=0.5).result() == 2
    workers.close()


def test_what_has_not_begun_is_cancelled_and_what_runs_is_abandoned() -> None:
    begun, over, workers = threading.Event(), threading.Event(), Workers(1, name="one")
    going = queued(workers, lambda: begun.set() or over.wait())  # type: ignore[func-returns-value]
    waiting = queued(workers, lambda: None)
    assert begun.wait(60)
    workers.close()
    over.set()
    assert going.result()
    assert not waiting.future.done()


def test_a_call_is_given_up_at_its_limit() -> None:
    over = threading.Event()
    with pytest.raises(CallTimeout, match="it has not returned"):
        call_in_time(over.wait, "it", seconds=0.2)
    over.set()


@pytest.mark.slow
def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    code = (
        "import threading; from pacorl.runtime.workers import Call, Workers; "
        "Workers(1, name='hung').add(Call(threading.Event().wait, 'it')); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n")
