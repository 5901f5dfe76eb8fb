"""The command itself: its version, both ways to start it, and faults in one line."""

from __future__ import annotations

import subprocess
import sys

import pacorl


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pacorl", *words], capture_output=True, text=True, check=False)


def test_the_version() -> None:
    assert run("--version").stdout == f"pacorl {pacorl.__version__}\n"


def test_a_fault_is_one_line_and_debug_shows_where() -> None:
    words = ("train-policy", "absent.yaml", "--dry-run")
    plain, debug = run(*words), run("--debug", *words)
    assert (plain.returncode, plain.stdout) == (1, "")
    assert plain.stderr.count("\n") == 1
    assert "absent.yaml" in plain.stderr
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
