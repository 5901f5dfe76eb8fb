"""Child processes: Python is started in one module, without the working directory on the module path."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacorl.io.children import SAFE_PATH, start_python

# --- traps in the working directory --------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, whose modules leave a file `executed`; it is in its parent's folder."""
    for module in ("yaml", "pydantic", "typer", "PIL", "torch", "numpy", "json", "pacorl"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    return tmp_path / "executed"


def test_a_python_child_does_not_search_the_working_directory(trap: Path) -> None:
    child = start_python("-m", "pacorl", "--version", stdout=subprocess.PIPE)
    assert child.communicate(timeout=120)[0].startswith(b"pacorl ")
    assert not trap.exists()


def test_neither_does_a_program_with_the_safe_path(trap: Path) -> None:
    command = [sys.executable, "-c", "import yaml"]
    subprocess.run(command, check=True, env=os.environ | SAFE_PATH)
    assert not trap.exists()
    subprocess.run(command, check=True)
    assert trap.exists()  # the trap works
