"""Calls on threads that may be abandoned."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pacorl.runtime.workers import Workers


def test_what_has_not_begun_is_cancelled_and_what_runs_is_abandoned() -> None:
    begun, over, workers = threading.Event(), threading.Event(), Workers(1, name="one")
    going = workers.submit(lambda: begun.set() or over.wait())  # type: ignore[func-returns-value]
    waiting = workers.submit(lambda: None)
    assert begun.wait(60)
    workers.close()
    over.set()
    assert going.result()
    assert not waiting.done()


@pytest.mark.slow
def test_a_call_that_never_returns_does_not_keep_the_process() -> None:
    code = (
        "import threading; from pacorl.runtime.workers import Workers; "
        "Workers(1, name='hung').submit(threading.Event().wait); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n")


@pytest.mark.slow
def test_a_process_ends_with_its_code_while_an_abandoned_call_computes() -> None:
    script = """
import torch
from pacorl.runtime import workers

def compute():
    while True:
        torch.randn(1000, 1000) @ torch.randn(1000, 1000)

pool = workers.Workers(1, name="test")
pool.submit(compute)
pool.close()
workers.end_process(75)
"""
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 75
