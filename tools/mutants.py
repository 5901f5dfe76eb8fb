"""Which fast test sees each plausible bug? Tries the bugs of tools/mutants.yaml one at a time on a copy of the code.

    python -m tools.mutants                              # all, and the table of docs/mutants.md
    python -m tools.mutants --only kl_without_weight     # one

Tools that change operators (mutmut, cosmic-ray) make thousands of mutants, most of which nobody would write, and take
no list. These bugs are chosen: each is one that somebody writes.

All of it is one pytest session, which collects the fast tests and runs none itself. A bug is put into the functions
that it changes, in a fork of that session, which then runs the test that the table names; another fork has shown that
this test passes without a bug. Only a bug that its test sees no more, or that has none yet, is tried on every test that
calls one of its functions: those of its own room first, and quick ones before slow ones. What each test calls is noted
once, with no bug; to find that out takes twice as long as the tests themselves.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import hashlib
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path("src/pacorl")
FAST = "not slow and not campaign and not vllm"
MARK = "<!-- What follows is written by tools/mutants.py. -->"
ROW = re.compile(r"\| (\w+) \| .* \| `([^`]+)`: `([^`]+)`[^|]*\| [\d.]+ \|")
"""Of the table, with the bug, and the file and name of the test that sees it."""
PATIENCE = 60.0
"""Seconds beyond ten times what a test takes without a bug, after which it hangs."""


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
    """Why somebody would write it."""
    survives: str = ""
    """Why no fast test can see it, if none can."""

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]

    @property
    def module(self) -> str:
        return f"pacorl.{self.file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")

    def apply(self, source: str) -> str:
        """The file's text with the bug.

        Raises:
            ValueError: if the old text is not there exactly once.
        """
        if (count := source.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: its old text occurs {count} times in {SOURCE / self.file}; write it anew"
            )
        return source.replace(self.old, self.new)

    def changes(self, source: str) -> list[tuple[CodeType, CodeType]]:
        """Each function that the bug changes, as it is and with the bug.

        Raises:
            ValueError: if the old text is not there exactly once, or no function changes.
            SyntaxError: if the bug is no Python.
        """
        before, after = (compile(text, self.file, "exec") for text in (source, self.apply(source)))
        pairs = zip(functions_of(before), functions_of(after), strict=True)
        changed = [(old, new) for old, new in pairs if _content(old) != _content(new)]
        if not changed:
            raise ValueError(f"mutant {self.name} changes no function of {SOURCE / self.file}; write it anew")
        return changed


def read_mutants(path: Path) -> list[Mutant]:
    """The bugs of a YAML file.

    Raises:
        ValueError: if an entry has another form, or two have one name.
    """
    from pacorl.io.documents import read_yaml, typed

    mutants = typed(read_yaml(path), list[Mutant])
    names = [mutant.name for mutant in mutants]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{path}: {', '.join(repeated)} stands twice; give each mutant a name of its own")
    return mutants


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module's or class's code, but for those within functions."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if inner.co_flags & inspect.CO_OPTIMIZED:  # a class's body is none
                yield inner
            else:
                yield from functions_of(inner)


def _content(code: CodeType) -> tuple[Any, ...]:
    """What a function does, whatever lines it stands on."""
    constants = [_content(const) if isinstance(const, CodeType) else repr(const) for const in code.co_consts]
    return code.co_code, code.co_names, code.co_varnames, constants


# --- forks -----------------------------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin of a fork: writes `start`, `failed` and `done` of each test as lines of JSON."""

    def __init__(self, path: Path, *, seconds: Mapping[str, float], source: Path | None = None) -> None:
        """
        Args:
            path: outlives a fork that is killed.
            seconds: what a test takes; one that takes far longer ends the fork.
            source: the folder whose functions' calls are noted, if any.
        """
        self.failed = False
        self._events = path.open("w")
        self._seconds = seconds
        self._source = source
        self._nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - as long as the fork lives
        self._codes: dict[int, CodeType] = {}
        self._started = 0.0

    def _write(self, event: str, test: str, **facts: Any) -> None:
        self._events.write(json.dumps({"event": event, "test": test, **facts}) + "\n")
        self._events.flush()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> None:
        self._codes[id(frame.f_code)] = frame.f_code

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", nodeid)
        self._codes = {}
        self._started = time.perf_counter()
        if self._source:
            threading.settrace(self._trace)
            sys.settrace(self._trace)
        else:
            # Not by a signal, whose handler would wait for ever for a loop in a library.
            limit = PATIENCE + 10 * self._seconds.get(nodeid, 0.0)
            faulthandler.dump_traceback_later(limit, exit=True, file=self._nowhere)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = True
            self._write("failed", report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        self._write("done", nodeid, seconds=time.perf_counter() - self._started, calls=sorted(self._calls()))

    def _calls(self) -> set[str]:
        prefix = f"{self._source}/"
        ours = [code for code in self._codes.values() if code.co_filename.startswith(prefix)]
        return {f"{code.co_filename.removeprefix(prefix)}:{code.co_qualname}" for code in ours}


def in_fork(
    items: Sequence[pytest.Item], recorder: Callable[[], Recorder], prepare: Callable[[], None] | None = None
) -> None:
    """Run tests in a fork: all of them, or with `prepare` before them until the first that fails."""
    if child := os.fork():
        os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # servers that a failed test left behind
        return
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


# --- what tests call -------------------------------------------------------------------------------------------


@dataclass
class Calls:
    """What each test calls, in a JSON file."""

    path: Path
    functions: list[str] = field(default_factory=list)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Test file → the `sources` that it calls, a digest of it and them, and of each of its tests the seconds and the
    numbers of the `functions` that it calls."""

    @classmethod
    def load(cls, path: Path) -> Calls:
        return cls(path, **json.loads(path.read_text())) if path.is_file() else cls(path)

    def save(self) -> None:
        facts = {name: value for name, value in vars(self).items() if name != "path"}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".partial")
        aside.write_text(json.dumps(facts))
        aside.replace(self.path)

    @property
    def seconds(self) -> dict[str, float]:
        """What each test takes."""
        return {name: test["seconds"] for entry in self.files.values() for name, test in entry["tests"].items()}

    def knows(self, name: str, folder: Path) -> bool:
        """Whether what a test file's tests call is known, and neither it nor they have changed since."""
        entry = self.files.get(name)
        return entry is not None and entry["digest"] == _digest_of(name, entry["sources"], folder)

    def note(self, name: str, events: Sequence[Mapping[str, Any]], folder: Path) -> None:
        """Take in what a test file's tests call."""
        numbers = {function: number for number, function in enumerate(self.functions)}
        failed = {event["test"] for event in events if event["event"] == "failed"}
        for test in sorted(failed):
            print(f"  {test} fails without a bug, and is left out", flush=True)
        tests = {}
        for event in events:
            if event["event"] == "done" and event["test"] not in failed:
                tests[event["test"]] = {
                    "seconds": round(event["seconds"], 3),
                    "calls": [numbers.setdefault(function, len(numbers)) for function in event["calls"]],
                }

        sources = sorted({call.partition(":")[0] for event in events for call in event.get("calls", ())})
        digest = _digest_of(name, sources, folder)
        self.functions = list(numbers)
        self.files[name] = {"digest": digest, "sources": sources, "tests": tests}
        self.save()

    def callers(self, functions: set[str]) -> dict[str, float]:
        """Seconds of each test that calls one of these functions."""
        wanted = {number for number, function in enumerate(self.functions) if function in functions}
        return {
            name: test["seconds"]
            for entry in self.files.values()
            for name, test in entry["tests"].items()
            if wanted.intersection(test["calls"])
        }


# --- the session -----------------------------------------------------------------------------------------------


@dataclass
class Result:
    """What became of a bug."""

    seen_by: str = ""
    """The test that sees it; empty if none does."""
    seconds: float = 0.0
    hangs: bool = False
    """Whether that test does not end."""


class Trials:
    """A pytest plugin: where a session would run its tests, it tries the bugs."""

    def __init__(self, folder: Path, mutants: Sequence[Mutant], calls: Calls, hints: Mapping[str, str]) -> None:
        """
        Args:
            folder: the copy of the repository.
            mutants: to be tried.
            calls: what tests call, as far as that is known.
            hints: mutant → the test that saw it last.
        """
        self.folder = folder
        self.mutants = mutants
        self.calls = calls
        self.hints = hints
        self.results = {mutant.name: Result() for mutant in mutants}
        self._events = folder.parent / "events.jsonl"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for mutant in self.mutants:
            importlib.import_module(mutant.module)
        functions = _live_functions(self.folder / SOURCE)
        hinted = self._hinted(items)
        unseen = [mutant for mutant in self.mutants if not self._sees(mutant, hinted[mutant.name], items, functions)]
        self._measure({name: item for name, item in items.items() if _room(name) in {mutant.room for mutant in unseen}})
        unseen = [mutant for mutant in unseen if not self._sees(mutant, self._callers(mutant), items, functions)]
        unseen = [mutant for mutant in unseen if not mutant.survives]  # no test elsewhere can see it either
        self._measure(items if unseen else {})
        for mutant in unseen:
            self._sees(mutant, self._callers(mutant, elsewhere=True), items, functions)
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        print(excrepr, file=sys.stderr)  # there is no terminal plugin that would

    def _run(self, items: Sequence[pytest.Item], *, traced: bool = False, **bug: Any) -> list[dict[str, Any]]:
        source = self.folder / SOURCE if traced else None
        in_fork(items, lambda: Recorder(self._events, seconds=self.calls.seconds, source=source), **bug)
        return [json.loads(line) for line in self._events.read_text().splitlines()]

    def _hinted(self, items: Mapping[str, pytest.Item]) -> dict[str, dict[str, float]]:
        """Mutant → the tests, with the seconds of each, that saw it last, and that pass without it, each by itself."""
        variants = {}
        for name, hint in self.hints.items():
            variants[name] = [t for t in items if t.partition("[")[0] == hint]

        distinct = sorted({test for tests in variants.values() for test in tests})
        sound = dict[str, float]()
        for test in distinct:
            # In a fork of its own, as with the bug: one that needs an earlier test would else fail by that alone.
            events = self._run([items[test]])
            if [event["event"] for event in events] == ["start", "done"]:
                sound[test] = events[-1]["seconds"]
        print(f"{len(sound)} of the {len(distinct)} tests that the table names pass without a bug", flush=True)
        return {
            mutant.name: {test: sound[test] for test in variants.get(mutant.name, []) if test in sound}
            for mutant in self.mutants
        }

    def _measure(self, items: Mapping[str, pytest.Item]) -> None:
        by_file: dict[str, list[pytest.Item]] = {}
        for name, item in items.items():
            by_file.setdefault(name.partition("::")[0], []).append(item)
        for name, own in by_file.items():
            if not self.calls.knows(name, self.folder):
                print(f"what do the tests of {name} call?", flush=True)
                self.calls.note(name, self._run(own, traced=True), self.folder)

    def _callers(self, mutant: Mutant, *, elsewhere: bool = False) -> dict[str, float]:
        """The tests, with the seconds of each, that call what a bug changes, of its own room or of all others."""
        changes = mutant.changes((self.folder / SOURCE / mutant.file).read_text())
        callers = self.calls.callers({f"{mutant.file}:{old.co_qualname}" for old, _ in changes})
        return {test: seconds for test, seconds in callers.items() if (_room(test) != mutant.room) == elsewhere}

    def _sees(
        self,
        mutant: Mutant,
        tests: Mapping[str, float],
        items: Mapping[str, pytest.Item],
        functions: Mapping[tuple[str, str, int], list[FunctionType]],
    ) -> bool:
        """Whether one of the tests sees a bug; quick ones are run first."""
        path = self.folder / SOURCE / mutant.file
        source = path.read_text()
        keyed = [((mutant.file, old.co_qualname, old.co_firstlineno), new) for old, new in mutant.changes(source)]
        live = [(function, new) for key, new in keyed for function in functions[key]]

        def bug() -> None:
            for function, new in live:
                function.__code__ = new

        started = time.perf_counter()
        ordered = [items[test] for test in sorted(tests, key=tests.__getitem__) if test in items]
        with _written(path, mutant.apply(source)):  # for processes that a test starts
            events = self._run(ordered, prepare=bug) if ordered else []
        ended = sum(event["event"] == "done" for event in events)
        failed = [event["test"] for event in events if event["event"] == "failed"]
        hanging = [event["test"] for event in events[-1:] if event["event"] == "start"]
        assert failed or hanging or ended == len(ordered), f"the fork of mutant {mutant.name} ended by itself"
        result = self.results[mutant.name]
        result.seen_by = next(iter(failed + hanging), "")
        result.hangs = bool(hanging) and not failed
        result.seconds += time.perf_counter() - started
        outcome = f"seen by {result.seen_by}" if result.seen_by else f"none of {len(ordered)} tests sees it"
        print(f"{mutant.name}: {outcome} ({result.seconds:.1f} s)", flush=True)
        return bool(result.seen_by)


def _room(test: str) -> str:
    return test.split("/")[1]


def _live_functions(source: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Every function of the package that is loaded, by file, name and first line."""
    functions: dict[tuple[str, str, int], list[FunctionType]] = {}
    for function in (each for each in gc.get_objects() if type(each) is FunctionType):
        code = function.__code__
        if code.co_filename.startswith(f"{source}/"):
            key = (code.co_filename.removeprefix(f"{source}/"), code.co_qualname, code.co_firstlineno)
            functions.setdefault(key, []).append(function)
    return functions


def _digest_of(test_file: str, sources: Sequence[str], folder: Path) -> str:
    paths = [folder / test_file, *(folder / SOURCE / source for source in sources)]
    return _digest(*(path.read_text() if path.is_file() else "" for path in paths))


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    """Within the block a file holds another text."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


# --- the command -----------------------------------------------------------------------------------------------


def copy_repository(root: Path, folder: Path) -> None:
    """Copy what git does not ignore, the package compiled."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / name, folder / name)
    for path in (folder / SOURCE).rglob("*.py"):
        # By its hash: a bug of the same length, written within the same second, would else go unnoticed.
        py_compile.compile(str(path), invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)


def enter(folder: Path) -> None:
    """Make a copy of the repository the one that this process and those that it starts import."""
    paths = [str(folder / "src"), str(folder)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    sys.path[:0] = paths
    for name in [name for name in sys.modules if name.partition(".")[0] in ("pacorl", "tools")]:
        del sys.modules[name]
    os.chdir(folder)


def try_all(
    mutants: Sequence[Mutant], calls: Calls, tests: Sequence[str], hints: Mapping[str, str], *, root: Path
) -> dict[str, Result]:
    """Try bugs on a copy of a repository."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "copy"
        copy_repository(root, folder)
        enter(folder)
        options = ["-o", "addopts=--import-mode=importlib", "-m", FAST]  # not -q, which the terminal takes
        options += [part for plugin in ("terminal", "cacheprovider", "xdist") for part in ("-p", f"no:{plugin}")]
        options += ["--basetemp", str(folder.parent / "tmp"), *tests]
        trials = Trials(folder, mutants, calls, hints)
        code = pytest.main(options, plugins=[trials])
        os.chdir(root)
    if code:
        raise SystemExit(f"pytest ended with code {int(code)}: some test cannot be collected; run it by itself")
    return trials.results


def table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """The results, in Markdown."""
    lines = ["| Bug | File | Why somebody writes it | Seen by | Seconds |", "|---|---|---|---|---|"]
    for mutant in mutants:
        result = results[mutant.name]
        file, _, test = result.seen_by.removeprefix("tests/").partition("::")
        seen = f"`{file}`: `{test.partition('[')[0]}`{', which hangs' * result.hangs}" if test else "none"
        where = f"`{mutant.file}`"
        lines.append(f"| {mutant.name} | {where} | {mutant.why} | {seen} | {result.seconds:.1f} |")
    survivors = [f"- {mutant.name}: {mutant.survives}." for mutant in mutants if mutant.survives]
    count = sum(bool(results[mutant.name].seen_by) for mutant in mutants)
    head = [f"{count} of {len(mutants)} bugs are seen." + (" The others:" if survivors else ""), "", *survivors]
    return "\n".join([*head, *([""] if survivors else []), *lines]) + "\n"


def main(arguments: Sequence[str] | None = None, *, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description="Which fast test sees each bug?")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files or folders of tests")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="try these alone")
    parser.add_argument("--json", type=Path, default=Path("runs/mutants.json"), help="keeps what each test calls")
    parser.add_argument("--page", type=Path, default=Path("docs/mutants.md"), help="ends with the table of results")
    options = parser.parse_args(arguments)
    mutants = read_mutants(root / "tools" / "mutants.yaml")
    calls = Calls.load(root / options.json)
    if unknown := sorted(set(options.only) - {mutant.name for mutant in mutants}):
        parser.error(f"there is no mutant {', '.join(unknown)}")
    chosen = [mutant for mutant in mutants if not options.only or mutant.name in options.only]
    page = root / options.page
    text, _, before = page.read_text().partition(MARK)
    rows = (ROW.fullmatch(line) for line in before.splitlines())

    hints = {}
    for row in rows:
        if row:
            hints[row[1]] = f"tests/{row[2]}::{row[3]}"

    started = time.perf_counter()
    hints = {mutant.name: hints[mutant.name] for mutant in chosen if mutant.name in hints}
    results = try_all(chosen, calls, options.tests, hints, root=root)
    if not options.only:
        page.write_text(f"{text}{MARK}\n\n{table(mutants, results)}")
    seen = sum(bool(result.seen_by) for result in results.values())
    print(f"{seen} of {len(chosen)} are seen, in {(time.perf_counter() - started) / 60:.1f} minutes")
    if wrong := [m.name for m in chosen if bool(results[m.name].seen_by) == bool(m.survives)]:
        sys.exit(f"survives without a reason, or is seen and has one: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
