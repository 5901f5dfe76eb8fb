"""Child processes: Python is started in one module, without the working directory on the module path."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pacorl
from pacorl.io.children import SAFE_PATH, start_python

SOURCE = Path(pacorl.__file__).parent
HOME = "io/children.py"
PROGRAMS = {"core/devices.py", "serve/vllm.py"}
"""Modules that start programs, vLLM and nvidia-smi, which are no Python of this package."""
STARTERS = re.compile(
    r"subprocess\.\w+|os\.(system|popen|startfile|posix_spawnp?|fork|forkpty|exec\w+|spawn\w+)"
    r"|(concurrent\.futures\.)?ProcessPoolExecutor|(torch\.)?multiprocessing\..+|asyncio\.create_subprocess_\w+|pty\.\w+"
)
MENTIONS = re.compile(r"subprocess|multiprocessing|ProcessPool|executable|python|\b(os|pty)\.|asyncio")
MODULES = {"subprocess", "multiprocessing", "pty"}


def starts(source: str, *, is_program: bool = False) -> list[str]:
    """Every start of a process in a module, and every mention of the interpreter."""
    faults: list[str] = []
    if not MENTIONS.search(source):  # writing every name of a tree takes longer than reading its text
        return faults
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and STARTERS.fullmatch(name := ast.unparse(node.func)) and not is_program:
            faults.append(f"line {node.lineno}: {name}")
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable":
            faults.append(f"line {node.lineno}: sys.executable")
        if isinstance(node, ast.List) and node.elts and re.fullmatch(r"'python[\d.]*'", ast.unparse(node.elts[0])):
            faults.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.ImportFrom) and (
            str(node.module).split(".")[0] in MODULES or "ProcessPoolExecutor" in {alias.name for alias in node.names}
        ):
            faults.append(f"line {node.lineno}: from {node.module} import …")
    return faults


@pytest.mark.slow
def test_python_is_started_in_one_module() -> None:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name != HOME:
            found += [f"{name}: {s}" for s in starts(path.read_text(encoding="utf-8"), is_program=name in PROGRAMS)]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "subprocess.Popen([program])",
        "command = [sys.executable, '-m', 'pacorl']",
        "run(['python3', 'x.py'])",
        "from subprocess import run",
        "def later():\n    os.execv(program, arguments)",
        "os.system('x')",
        "from concurrent.futures import ProcessPoolExecutor",
        "multiprocessing.Process(target=f).start()",
        "torch.multiprocessing.spawn(f)",
        "await asyncio.create_subprocess_exec(program)",
    ],
)
def test_a_start_elsewhere_is_seen(source: str) -> None:
    assert starts(source)


def test_types_and_exceptions_of_subprocess_are_allowed() -> None:
    assert starts("process: subprocess.Popen[bytes]\ntry: pass\nexcept subprocess.TimeoutExpired: pass") == []
    assert starts("subprocess.run([program])", is_program=True) == []
    assert starts("subprocess.run([sys.executable])", is_program=True)


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


@pytest.mark.slow
def test_neither_does_the_console_script(trap: Path) -> None:
    script = Path(sys.executable).with_name("pacorl")
    if not script.is_file():
        pytest.skip("the package is not installed as a program")
    done = subprocess.run([script, "score", "--help"], capture_output=True, check=True)
    assert b"Usage" in done.stdout
    assert not trap.exists()
