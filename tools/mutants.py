"""Mutation tests: try the plausible bugs of tools/mutants.yaml, one at a time, on a copy of the code.

    python -m tools.mutants                              # all, and the table of docs/mutants.md
    python -m tools.mutants --only kl_without_weight     # one

Tools that change operators (mutmut, cosmic-ray) make thousands of unlikely mutants, and accept no list. These bugs are
chosen by hand, as plausible mistakes.

One pytest session collects the fast tests, and runs none itself. A bug is put into the functions that it changes, in a
fork of that session, which then runs the test in the table; another fork has shown that this test passes without the
bug. If the test passes with the bug, or the table has none, the bug is tried on the tests of its own package, first
those named after its file, and then on all others.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import inspect
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/pacorl")
FAST = "not slow and not campaign and not vllm"
MARK = "<!-- What follows is written by tools/mutants.py. -->"
ROW = re.compile(r"\| (\w+) \| .* \| `([^`]+)`: `([^`]+)`[^|]*\| [\d.]+ \|")
"""Row of the table: the bug, and the file and name of the test that detects it."""
Functions = dict[tuple[str, str, int], list[FunctionType]]
"""File, name and first line → the loaded functions."""
PATIENCE = 60.0
"""Timeout of a test with a bug, in seconds beyond ten times its duration without the bug."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A plausible bug."""

    name: str
    file: str
    """Relative to src/pacorl."""
    old: str
    """Text that occurs once in the file."""
    new: str
    why: str
    """Plausible cause of the bug."""
    survives: str = ""
    """Reason why no fast test can detect it; empty if one can."""

    @property
    def room(self) -> str:
        """Package of the file."""
        return self.file.partition("/")[0]

    @property
    def module(self) -> str:
        """Import name of the file."""
        return f"pacorl.{self.file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")

    def apply(self, source: str) -> str:
        """Put the bug into the file's text.

        Raises:
            ValueError: if the old text does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant {self.name}: its old text occurs {count} times in {SOURCE / self.file}; write it anew"
            )
        return source.replace(self.old, self.new)

    def changes(self, source: str) -> list[tuple[CodeType, CodeType]]:
        """Return each function that the bug changes, without and with the bug.

        Raises:
            ValueError: if the old text does not occur exactly once, or no function changes.
            SyntaxError: if the bug is not valid Python.
        """
        # Compiled both ways and compared function by function: only these are exchanged in memory.
        before = compile(source, self.file, "exec")
        after = compile(self.apply(source), self.file, "exec")
        changed = []
        for old, new in zip(functions_of(before), functions_of(after), strict=True):
            if _content(old) != _content(new):
                changed.append((old, new))
        if not changed:
            raise ValueError(f"mutant {self.name} changes no function of {SOURCE / self.file}; write it anew")
        return changed


def read_mutants(path: Path) -> list[Mutant]:
    """Read the bugs of a YAML file.

    Raises:
        ValueError: if an entry has another form, or two have one name.
    """
    from pacorl.io.documents import read_yaml, typed

    mutants = typed(read_yaml(path), list[Mutant])
    repeated = []
    for name, count in Counter(mutant.name for mutant in mutants).items():
        if count > 1:
            repeated.append(name)

    if repeated:
        raise ValueError(f"{path}: {', '.join(sorted(repeated))} occurs twice; give each mutant a name of its own")
    return mutants


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module's or class's code, except nested functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            # The body of a class is code, but no function.
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield inner
            else:
                yield from functions_of(inner)


def _content(code: CodeType) -> tuple[Any, ...]:
    """Return the content of a function's code, without its line numbers."""
    constants: list[Any] = []
    for constant in code.co_consts:
        constants.append(_content(constant) if isinstance(constant, CodeType) else repr(constant))
    return code.co_code, code.co_names, code.co_varnames, constants


# --- forks -----------------------------------------------------------------------------------------------------


class Recorder:
    """Pytest plugin of a fork, which writes `start`, `failed` and `done` of each test as lines of JSON."""

    def __init__(self, path: Path, *, seconds: Mapping[str, float]) -> None:
        """
        Args:
            path: the log, which remains if the fork is killed.
            seconds: duration of each known test; far longer ends the fork.
        """
        self.failed = False
        self._events = path.open("w")
        self._seconds = seconds
        self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the fork lives
        self._started = 0.0

    def _write(self, event: str, test: str, **facts: Any) -> None:
        self._events.write(json.dumps({"event": event, "test": test, **facts}) + "\n")
        self._events.flush()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", nodeid)
        self._started = time.perf_counter()
        if nodeid in self._seconds:
            # Not by a signal, whose handler would wait for ever for a loop in a library.
            limit = PATIENCE + 10 * self._seconds[nodeid]
            faulthandler.dump_traceback_later(limit, exit=True, file=self._nowhere)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True
            self._write("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write("done", nodeid, seconds=time.perf_counter() - self._started)


def in_fork(
    items: Sequence[pytest.Item], recorder: Callable[[], Recorder], prepare: Callable[[], None] | None = None
) -> None:
    """Run tests in a fork: all of them, or after `prepare` until the first failure."""
    child = os.fork()
    # The parent waits, and ends whatever the test has started.
    if child:
        os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # servers that a failed test left behind
        return
    # A process group of its own, by which the parent finds servers that remain.
    try:
        os.setsid()
        if prepare:
            prepare()
        plugin = recorder()
        items[0].config.pluginmanager.register(plugin)
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if plugin.failed and prepare:
                break
    finally:
        os._exit(0)


# --- the session -----------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Outcome of a bug."""

    seen_by: str = ""
    """Test that detects the bug; empty if there is none."""
    seconds: float = 0.0
    hangs: bool = False
    """Whether that test does not end."""


class Trials:
    """Pytest plugin that tries the bugs instead of running the session's tests."""

    def __init__(self, folder: Path, mutants: Sequence[Mutant], hints: Mapping[str, str]) -> None:
        """
        Args:
            folder: copy of the repository.
            mutants: the bugs.
            hints: mutant → the test that detected it last.
        """
        self.folder = folder
        self.mutants = mutants
        self.hints = hints
        self.results = {mutant.name: Result() for mutant in mutants}
        self.items: dict[str, pytest.Item] = {}
        self.functions: Functions = {}
        self.seconds: dict[str, float] = {}
        """Duration of each test that passes without a bug."""
        self._events = folder.parent / "events.jsonl"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        for mutant in self.mutants:
            importlib.import_module(mutant.module)
        self.functions = live_functions(self.folder / SOURCE)

        # The tests of the table.
        hinted = self._hinted()
        unseen = [mutant for mutant in self.mutants if not self._sees(mutant, hinted[mutant.name])]

        # The tests of the bug's own package.
        by_room: dict[str, list[str]] = {}
        for test in self.items:
            by_room.setdefault(test.split("/")[1], []).append(test)
        rooms = {}
        for room in {mutant.room for mutant in unseen}:
            rooms[room] = self._passing(by_room.get(room, []))
        unseen = [mutant for mutant in unseen if not self._sees(mutant, rooms[mutant.room])]

        # All other tests, unless the bug is known to survive.
        unseen = [mutant for mutant in unseen if not mutant.survives]
        if unseen:
            for room in by_room.keys() - rooms.keys():
                rooms[room] = self._passing(by_room[room])
        for mutant in unseen:
            others = [tests for room, tests in rooms.items() if room != mutant.room]
            self._sees(mutant, [*chain.from_iterable(others)])
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        # The terminal plugin, which is off, would print it.
        print(excrepr, file=sys.stderr)

    def _run(self, tests: Sequence[str], prepare: Callable[[], None] | None = None) -> list[dict[str, Any]]:
        items = [self.items[test] for test in tests]
        in_fork(items, lambda: Recorder(self._events, seconds=self.seconds), prepare)
        return [json.loads(line) for line in self._events.read_text().splitlines()]

    def _passing(self, tests: Sequence[str]) -> list[str]:
        """Run tests without a bug, and return those that pass."""
        events = self._run(tests)
        failed = {event["test"] for event in events if event["event"] == "failed"}
        for test in sorted(failed):
            print(f"  {test} fails without a bug, and is left out", flush=True)
        passing = {}
        for event in events:
            if event["event"] == "done" and event["test"] not in failed:
                passing[event["test"]] = event["seconds"]
        self.seconds |= passing
        return list(passing)

    def _hinted(self) -> dict[str, list[str]]:
        """Map each mutant to the tests that detected it last and pass without it."""
        # The table names a parametrised test without its parameters.
        variants: dict[str, list[str]] = {}
        for test in self.items:
            variants.setdefault(test.partition("[")[0], []).append(test)

        # Each test by itself: a dependent test would fail with every bug.
        passing: dict[str, list[str]] = {}
        for hint in sorted(set(self.hints.values())):
            passing[hint] = []
            for test in variants.get(hint, []):
                passing[hint] += self._passing([test])
        print(f"{sum(map(len, passing.values()))} tests of the table pass without a bug", flush=True)
        return {mutant.name: passing.get(self.hints.get(mutant.name, ""), []) for mutant in self.mutants}

    def _sees(self, mutant: Mutant, tests: Collection[str]) -> bool:
        """Check whether one of the tests detects a bug; those named after its file run first, then quick files."""
        seconds: dict[str, float] = {}
        for test in tests:
            seconds[_file(test)] = seconds.get(_file(test), 0.0) + self.seconds[test]
        own = f"test_{Path(mutant.file).stem}.py"
        # File by file, since the tests of a file share fixtures.
        ordered = sorted(tests, key=lambda test: (not _file(test).endswith(own), seconds[_file(test)], _file(test)))

        # The functions that are loaded now, each with the code of the bug.
        path = self.folder / SOURCE / mutant.file
        source = path.read_text()
        live = []
        for old, new in mutant.changes(source):
            for function in self.functions[mutant.file, old.co_qualname, old.co_firstlineno]:
                live.append((function, new))

        def bug() -> None:
            for function, new in live:
                function.__code__ = new

        # Run the tests with the bug in memory, and in the file for processes that a test starts.
        started = time.perf_counter()
        events: list[dict[str, Any]] = []
        if ordered:
            path.write_text(mutant.apply(source))
            try:
                events = self._run(ordered, bug)
            finally:
                path.write_text(source)

        # The first failure, else a test without an end.
        result = self.results[mutant.name]
        result.seconds += time.perf_counter() - started
        ended = sum(event["event"] == "done" for event in events)
        failed = [event["test"] for event in events if event["event"] == "failed"]
        if failed:
            result.seen_by = failed[0]
        elif events and events[-1]["event"] == "start":
            result.seen_by = events[-1]["test"]
            result.hangs = True
        else:
            assert ended == len(ordered), f"the fork of mutant {mutant.name} ended by itself"

        outcome = f"seen by {result.seen_by}" if result.seen_by else f"none of {len(ordered)} tests sees it"
        print(f"{mutant.name}: {outcome} ({result.seconds:.1f} s)", flush=True)
        return bool(result.seen_by)


def _file(test: str) -> str:
    return test.partition("::")[0]


def live_functions(source: Path) -> Functions:
    """Find every loaded function of the package."""
    functions: Functions = {}
    # Without this the list lacks frozen objects, and conftest.py freezes everything that was collected.
    gc.unfreeze()
    objects = gc.get_objects()
    gc.freeze()
    for function in objects:
        if type(function) is not FunctionType:
            continue
        code = function.__code__
        if code.co_filename.startswith(f"{source}/"):
            key = (code.co_filename.removeprefix(f"{source}/"), code.co_qualname, code.co_firstlineno)
            functions.setdefault(key, []).append(function)
    return functions


# --- the command -----------------------------------------------------------------------------------------------


def copy_repository(root: Path, folder: Path) -> None:
    """Copy the files that git does not ignore, and compile the package."""
    # Untracked files too: a bug is tried on the code as it is.
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in names:
        if name:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, folder / name)
    for path in (folder / SOURCE).rglob("*.py"):
        # By hash: timestamps do not distinguish a bug of the same length, written within the same second.
        py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def enter(folder: Path) -> None:
    """Let this process and its children import a copy of the repository."""
    paths = [str(folder / "src"), str(folder)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:0] = paths
    # Modules of the original, loaded to read the bugs, must not be taken for the copy's.
    for name in list(sys.modules):
        if name.partition(".")[0] in ("pacorl", "tools"):
            del sys.modules[name]
    os.chdir(folder)


def try_all(
    mutants: Sequence[Mutant], tests: Sequence[str], hints: Mapping[str, str], *, root: Path
) -> dict[str, Result]:
    """Try bugs on a copy of a repository."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "copy"
        copy_repository(root, folder)
        enter(folder)
        # Without -q, an option of the terminal plugin.
        options = ["-o", "addopts=--import-mode=importlib", "-m", FAST]
        options += ["-p", "no:terminal", "-p", "no:cacheprovider", "-p", "no:xdist"]
        options += ["--basetemp", str(folder.parent / "tmp"), *tests]
        trials = Trials(folder, mutants, hints)
        code = pytest.main(options, plugins=[trials])
        os.chdir(root)
    if code:
        raise SystemExit(f"pytest ended with code {int(code)}: some test cannot be collected; run it by itself")
    return trials.results


def table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """Format the results in Markdown."""
    count = 0
    survivors = []
    rows = ["| Bug | File | Why somebody writes it | Seen by | Seconds |", "|---|---|---|---|---|"]
    for mutant in mutants:
        if mutant.survives:
            survivors.append(f"- {mutant.name}: {mutant.survives}.")
        result = results[mutant.name]
        seen = "none"
        if result.seen_by:
            count += 1
            file, _, test = result.seen_by.removeprefix("tests/").partition("::")
            seen = f"`{file}`: `{test.partition('[')[0]}`{', which hangs' * result.hangs}"
        rows.append(f"| {mutant.name} | `{mutant.file}` | {mutant.why} | {seen} | {result.seconds:.1f} |")

    # Survivors first, each with its reason.
    lines = [f"{count} of {len(mutants)} bugs are seen.", ""]
    if survivors:
        lines = [f"{lines[0]} The others:", "", *survivors, ""]
    return "\n".join([*lines, *rows]) + "\n"


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Which fast test sees each bug?")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="try these alone")
    parser.add_argument("--page", type=Path, default=Path("docs/mutants.md"), help="page with the table of results")
    options = parser.parse_args(arguments)

    # The chosen bugs.
    mutants = read_mutants(root / "tools" / "mutants.yaml")
    unknown = set(options.only) - {mutant.name for mutant in mutants}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    selected = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    names = {mutant.name for mutant in selected}

    # The tests of the last table.
    page = root / options.page
    text, _, before = page.read_text().partition(MARK)
    hints = {}
    for line in before.splitlines():
        row = ROW.fullmatch(line)
        if row and row[1] in names:
            hints[row[1]] = f"tests/{row[2]}::{row[3]}"

    # The new table.
    started = time.perf_counter()
    results = try_all(selected, options.tests, hints, root=root)
    if not options.only:
        page.write_text(f"{text}{MARK}\n\n{table(mutants, results)}")
    seen = sum(bool(result.seen_by) for result in results.values())
    print(f"{seen} of {len(selected)} are seen, in {(time.perf_counter() - started) / 60:.1f} minutes")
    wrong = [mutant.name for mutant in selected if bool(results[mutant.name].seen_by) == bool(mutant.survives)]
    if wrong:
        sys.exit(f"survives without a reason, or is seen and has one: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
