"""The code blocks of a page, and a way to run them as a reader would: in order, in one folder.

bash      each line is run: `pacorl` by the command line's own entry point in this process, all else by bash
          a line that ends in ` &` runs beside the others until the page is done
python    is run, all of a page's blocks in one namespace
sh        is for real models, a machine's set-up, servers that stay or minutes of work, and is not run
any language with title="NAME" is a file of that name
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path

import pytest
from ports import free_port

from pacorl import cli

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One code block: its language, its file's name if it is one, and its text."""

    language: str
    title: str
    text: str

    @property
    def lines(self) -> list[str]:
        """The command lines, continued ones joined; empty ones and comments aside."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page, of some languages or of all."""
    found = [Block(*match) for match in FENCE.findall(page.read_text("utf-8"))]
    return [block for block in found if not languages or block.language in languages]


def run_command(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `pacorl …` in this process; any exit code but 0 is a failure."""
    monkeypatch.setattr(sys, "argv", list(words))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code, words


def run_page(
    page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *, more: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Runs every block of a page in a folder that has the repository's `configs` and `examples`.

    Args:
        more: the beginning of a command → arguments that the test adds, to make it small.
    """
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(folder)]))
    monkeypatch.setenv("PATH", os.pathsep.join([str(_commands(folder)), os.environ["PATH"]]))
    ports = {port: str(free_port()) for port in set(re.findall(r"\b8[07]\d\d\b", page.read_text("utf-8")))}
    names: dict[str, object] = {"__name__": "page"}
    with ExitStack() as beside:
        for number, block in enumerate(blocks(page), 1):
            text = re.sub(r"\b8[07]\d\d\b", lambda port: ports[port[0]], block.text)
            if block.title:
                (folder / block.title).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.title).write_text(text, encoding="utf-8")
            elif block.language == "python":
                exec(compile(text, f"{page.name}, block {number}", "exec"), names)
            elif block.language == "bash":
                for line in Block("bash", "", text).lines:
                    _run_line(line, beside, monkeypatch, more or {})


def _run_line(line: str, beside: ExitStack, monkeypatch: pytest.MonkeyPatch, more: Mapping[str, Sequence[str]]) -> None:
    added = [word for start, words in more.items() if line.startswith(start) for word in words]
    if line.rstrip().endswith("&"):
        beside.enter_context(_beside(line.rstrip().removesuffix("&")))
    elif re.match(r"pacorl [^|><$]*$", line):
        words = [path for word in shlex.split(line, comments=True) for path in _expanded(word)]
        run_command([*words, *added], monkeypatch)
    else:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def _expanded(word: str) -> list[str]:
    """The files that a shell would put in the place of a pattern."""
    return (sorted(glob(word)) if "*" in word else []) or [word]


@contextmanager
def _beside(line: str) -> Iterator[None]:
    with subprocess.Popen(["bash", "-c", f"exec env {line}"]) as process:
        try:
            yield
        finally:
            process.terminate()


def _commands(folder: Path) -> Path:
    """A folder of `pacorl`, `python` and `torchrun` of this interpreter and of the sources under test."""
    (folder / "bin").mkdir()
    modules = {"pacorl": "-m pacorl", "python": "", "torchrun": "-m torch.distributed.run"}
    for name, module in modules.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder / "bin"
