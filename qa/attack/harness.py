"""One property for every input: it is fine, or refused in one line that names the file, with exit code 1.

Nothing may take more than SECONDS of a processor or BYTES more than the good input takes, or stand still for PATIENCE
by the clock. Inputs follow from a seed and
their number alone, so one that was found can be made again. They run through `cli.exit_code`, which is how every
command ends, in processes that are watched from outside; one that dies or hangs costs its input alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

SECONDS, BYTES = 20.0, 2**30
MOST_SECONDS = 8 * SECONDS
"""Of a processor, after which an input is given up."""
PATIENCE = 60.0
"""By the clock: who has computed for less than STILL seconds by then hangs, since no machine is that busy."""
STILL = 0.1
LONGEST_LINE = 2100
FAULTS = ("traceback", "nameless", "silent", "wrong", "lost", "slow", "memory", "died", "broken")
"""Outcomes that no input may have. `silent`: taken, though not all of it was read; `lost`: missing, though answered
well; `broken`: the attack itself failed to make the input."""


class WrongError(BaseException):
    """The outcome is not what it should be; `kind` is one of FAULTS. No handler of the program catches it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class Target:
    """Something that reads files which somebody else wrote."""

    name: str
    """FAMILY/NAME."""
    prepare: Callable[[Path], None]
    """Writes the good files into an empty folder."""
    mutate: Callable[[Path, random.Random], str]
    """Damages them, and says how; a word `must` in front says that nobody may take the result."""
    run: Callable[[Path], Any]
    """Reads them as a command does; returns its exit code, if any. Raises WrongError."""
    names: tuple[str, ...]
    """A message holds one of these."""
    codes: tuple[int, ...] = (1,)
    """Exit codes of a refusal."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one input."""

    number: int
    kind: str
    """fine, refused, or one of FAULTS."""
    seconds: float
    detail: str = ""


@dataclass
class Tally:
    """What became of all inputs of a target."""

    name: str
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    faults: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        self.seconds += outcome.seconds
        if outcome.kind in FAULTS:
            self.faults.append(outcome)


# --- one input -------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """What an input took, the making of it aside."""

    seconds: float = 0.0
    """Of a processor."""
    grown: int = 0
    """Bytes of memory, at most."""

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        base, started = _peak(reset=True), _processor_seconds()
        yield
        self.seconds, self.grown = _processor_seconds() - started, _peak() - base


def attempt(
    target: Target, good: Path, work: Path, *, seed: int, number: int, usage: Usage | None = None
) -> tuple[str, str]:
    """(kind, detail) of one input; number −1 is the good one. Time and memory are the caller's."""
    try:
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(good, work, symlinks=True)
        what = target.mutate(work, random.Random(f"{seed}/{target.name}/{number}")) if number >= 0 else "good"
    except Exception:
        return "broken", traceback.format_exc(limit=-6)
    with (usage or Usage()).measured():
        return _tried(target, work, what)


def _tried(target: Target, work: Path, what: str) -> tuple[str, str]:
    try:
        code, said = _ended(target, work)
    except WrongError as wrong:
        return wrong.kind, f"{what}: {wrong}"
    except BaseException:
        return "traceback", f"{what}: {traceback.format_exc(limit=-6)}"
    if code == 0:
        return ("silent", f"{what}: taken") if what.startswith("must") else ("fine", what)
    fault = _fault_of(said, code, target)
    return ("nameless", f"{what}: {fault}: {said[:600]!r}") if fault else ("refused", f"{what}: {said[:300]}")


def _ended(target: Target, work: Path) -> tuple[int, str]:
    """Exit code and standard error of a command."""
    from pacorl.cli import exit_code

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = exit_code(lambda: target.run(work))
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 1
    return code, said.getvalue().strip()


def _fault_of(said: str, code: int, target: Target) -> str:
    """What is wrong with a refusal; empty if nothing is.

    Warnings stand before the line, lists are indented below it, and each further fault of a config names the file anew.
    """
    lines = [line for line in said.split("\n") if not line.startswith(("  ", "/"))]
    if code not in target.codes:
        return f"exit code {code}"
    if "Traceback" in said or not lines or not lines[-1].startswith("pacorl: "):
        return "no line"
    if sum(line.startswith("pacorl: ") for line in lines) > 3:
        return "many lines"
    if len(lines[-1]) > LONGEST_LINE:
        return f"a line of {len(lines[-1])} characters"
    return "" if any(name in said for name in target.names) else "no file is named"


# --- many inputs, in a process that is watched -----------------------------------------------------------------


def attack(target: Target, count: int, *, seed: int, first: int = 0) -> Tally:
    """Tries the inputs of these numbers."""
    tally = Tally(target.name)
    with tempfile.TemporaryDirectory(prefix="attack-") as folder:
        good = Path(folder, "good")
        good.mkdir()
        number, last = first, first + count
        while number < last:
            for outcome in _watched(target, range(number, last), good, seed=seed):
                if outcome.number >= 0:
                    tally.add(outcome)
                elif outcome.kind != "fine":
                    raise AssertionError(f"{target.name}: the good input is not fine: {outcome}")
                number = outcome.number + 1
    return tally


def _watched(target: Target, numbers: range, good: Path, *, seed: int) -> Iterator[Outcome]:
    """Outcomes of a child process, the good input's first, until all are there or it is gone."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        _work(target, numbers, good, writer, seed=seed)
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as lines:
            for number in [-1, *numbers]:
                if (seconds := _hangs(child, lines)) is not None:
                    yield Outcome(number, "slow", seconds, f"given up after {seconds:.0f} s of a processor")
                    return
                if not (line := lines.readline()):
                    yield Outcome(number, "died", 0.0, "died without a word")
                    return
                yield Outcome(**json.loads(line))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _hangs(session: int, lines: TextIO) -> float | None:
    """Wait for a line; None if there is one, else the seconds that were computed in vain.

    By seconds of a processor and by standing still, neither of which grows on a busy machine.
    """
    began = computed = _session_seconds(session)
    moved = time.monotonic()
    while not select.select([lines], [], [], 0.5)[0]:
        now = _session_seconds(session)
        if now - computed > STILL:
            computed, moved = now, time.monotonic()
        if time.monotonic() - moved > PATIENCE or now - began > MOST_SECONDS:
            return now - began
    return None


def _session_seconds(session: int) -> float:
    """What the processes of a session have computed, and those that they have waited for."""
    ticks = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it is gone by now
                fields = Path("/proc", entry, "stat").read_text(errors="replace").rpartition(") ")[2].split()
                ticks += sum(map(int, fields[11:15])) if int(fields[3]) == session else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _work(target: Target, numbers: range, good: Path, writer: int, *, seed: int) -> None:
    """The child: never returns."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what libraries of C say is nobody's line
            os.dup2(null, stream)
        sys.stdout = sys.stderr = io.StringIO()
        if not any(good.iterdir()):
            target.prepare(good)
        work = good.with_name("work")
        os.chdir(good.parent)
        attempt(target, good, work, seed=seed, number=-1)  # imports, and caches that are filled once
        most = BYTES
        for number in [-1, *numbers]:
            usage = Usage()
            kind, detail = attempt(target, good, work, seed=seed, number=number, usage=usage)
            seconds, grown = usage.seconds, usage.grown
            if number < 0:
                most = grown + BYTES
            elif kind in ("fine", "refused"):
                slow, large = seconds > SECONDS, grown > most
                kind = "slow" if slow else "memory" if large else kind
                detail = f"{detail} ({seconds:.1f} s, {grown:,} bytes)" if slow or large else detail
            outcome = {"number": number, "kind": kind, "seconds": round(seconds, 4), "detail": detail[:4000]}
            os.write(writer, json.dumps(outcome).encode() + b"\n")
        code = 0
    except BaseException:
        report = {"number": -1, "kind": "died", "seconds": 0, "detail": traceback.format_exc()}
        os.write(writer, json.dumps(report).encode() + b"\n")
    finally:
        os._exit(code)


def _processor_seconds() -> float:
    """What this process and those that it has waited for have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _peak(*, reset: bool = False) -> int:
    """Bytes of memory that this process has had at most, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    found = re.search(r"VmHWM:\s+(\d+)", status)
    return int(found[1]) * 1024 if found else 0
