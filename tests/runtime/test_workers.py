"""Calls on threads that may be abandoned."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from pacorl.runtime.workers import LimitedCall, Workers


def test_calls_are_taken_in_order_by_so_many_threads() -> None:
    names: list[tuple[int, str]] = []
    workers = Workers(1, name="one")
    calls = [workers.submit(lambda n=n: names.append((n, threading.current_thread().name))) for n in range(20)]  # type: ignore[misc]
    for call in calls:
        call.result(60)
    assert names == [(n, "one_0") for n in range(20)]
    both = Workers(2, name="two")
    meeting = threading.Barrier(2)
    for call in [both.submit(meeting.wait) for _ in range(2)]:  # type: ignore[assignment]
        call.result(60)
    for pool in (workers, both):
        pool.close()


def test_what_a_call_raises_comes_through() -> None:
    workers = Workers(1, name="one")
    with pytest.raises(SystemExit):
        LimitedCall(workers, sys.exit, name="a reward that ends").result()
    assert LimitedCall(workers, lambda: 3, name="the next").result() == 3
    workers.close()


def test_a_call_that_waits_for_its_turn_is_not_late() -> None:
    workers = Workers(1, name="one")
    first = LimitedCall(workers, lambda: time.sleep(0.8), name="first")
    second = LimitedCall(workers, lambda: 2, name="second", seconds=0.5)
    first.start()
    assert second.result() == 2
    workers.close()


def test_what_has_not_begun_is_cancelled() -> None:
    over, workers = threading.Event(), Workers(1, name="one")
    going = workers.submit(over.wait)
    waiting = workers.submit(lambda: None)
    workers.close()
    with pytest.raises(CancelledError):
        waiting.result(60)
    over.set()
    assert going.result(60)


@pytest.mark.slow
def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    code = (
        "import threading; from pacorl.runtime.workers import Workers; "
        "Workers(1, name='hung').submit(threading.Event().wait); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n")
