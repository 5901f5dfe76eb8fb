"""Plausible bugs, one at a time: which fast test sees each?

    python research/mutants/mutants.py                      # all bugs of mutants.yaml, and the table mutants.csv
    python research/mutants/mutants.py --only kl_without_weight
    python research/mutants/mutants.py --then tests/cli     # this folder's tests too, before a bug is not seen

A bug is written into its file, in a copy of the repository. The test that saw it last (mutants.csv) runs first, then
the fast tests of the package's own folder, beginning with those named after the file. Every trial is a fork of one
process that has imported the libraries, but no line of the package.
"""

from __future__ import annotations

import argparse
import compileall
import csv
import importlib
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAST = "not slow and not nightly"
HEAVY = (
    "PIL",
    "accelerate",
    "diffusers",
    "fastapi",
    "numpy",
    "peft",
    "pydantic",
    "scipy",
    "torch",
    "transformers",
    "yaml",
)
NO_SESSION = "no session"
HOMES = {"judge/calibration.py": "gate", "dataset/answer_log.py": "annotate"}
"""Module → the package that has its tests, if that is not its own."""
LIMIT = 300.0
"""Seconds after which tests with a bug hang, beyond ten times their duration without it."""


@dataclass(frozen=True)
class Mutant:
    """A plausible bug."""

    list: str
    """Which list of mutants.yaml has it."""
    name: str
    file: str
    """Relative to src/pacorl."""
    old: str
    """Text that occurs once in the file."""
    new: str
    why: str
    """Plausible cause of the bug."""
    survives: str = ""
    """Reason why no fast test can see it; empty if one can."""

    @property
    def tests(self) -> list[str]:
        """Tests of the file's package, or of its home in HOMES: a folder, a file, or both."""
        package = HOMES.get(self.file) or self.file.partition("/")[0].removesuffix(".py")
        return [f"tests/{package}", f"tests/test_{package}.py"]

    def apply(self, source: str) -> str:
        """Put the bug into the file's text.

        Raises:
            ValueError: if the old text does not occur exactly once, or the result is no Python.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its old text occurs {count} times in {self.file}; write it anew")
        changed = source.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} is no Python with it: {error}") from None
        return changed


def read_mutants(path: Path = HERE / "mutants.yaml") -> list[Mutant]:
    """Read the bugs of a YAML file: list → entries.

    Raises:
        ValueError: if two have one name.
    """
    mutants = [Mutant(name, **entry) for name, entries in yaml.safe_load(path.read_text()).items() for entry in entries]
    names = [mutant.name for mutant in mutants]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{path}: {', '.join(sorted(repeated))} occurs twice")
    return mutants


def copy_repository(folder: Path) -> None:
    """Copy what git does not ignore, and compile the package."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    # By hash: timestamps do not tell a bug of the same length from the code that it replaces.
    mode = py_compile.PycInvalidationMode.CHECKED_HASH
    compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=mode)


# --- trials --------------------------------------------------------------------------------------------------------


class Recorder:
    """Pytest plugin of a fork that writes the failed tests to a pipe."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            os.write(self._pipe, f"{report.nodeid}\n".encode())

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        # Files that cannot be collected see the bug as well.
        if exitstatus in (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
            os.write(self._pipe, b"collection\n")
        if "LIBRARIES" in os.environ:
            Path(os.environ["LIBRARIES"]).write_text("\n".join(sys.modules))


def run_tests(tests: Sequence[str], *options: str, limit: float = 3600) -> tuple[list[str], float]:
    """Run tests in a fork; return the failed ones, with `hangs` if they do not end, and the seconds.

    Raises:
        RuntimeError: the session does not begin.
    """
    reading, writing = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if not child:
        try:
            os.setsid()  # a process group of its own, by which servers that a test leaves behind are found
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            base = ["-o", "addopts=--import-mode=importlib", "-m", FAST, "-p", "no:xdist", "-p", "no:cacheprovider"]
            base += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported already
            pytest.main([*base, *options, *tests], plugins=[Recorder(writing)])
        except BaseException as error:
            os.write(writing, f"{NO_SESSION}: {error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < started + limit:
        time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if not ended:
        os.waitpid(child, 0)
    with os.fdopen(reading) as lines:
        failed = lines.read().splitlines()
    # A session that does not begin would see every bug.
    if faults := [line for line in failed if line.startswith(NO_SESSION)]:
        raise RuntimeError(faults[0])
    return failed if ended else [*failed, "hangs"], time.monotonic() - started


class Trials:
    """Trials of bugs in a copy of the repository."""

    def __init__(self, folder: Path, hints: dict[str, str]) -> None:
        """
        Args:
            folder: the copy, in which this process stands.
            hints: bug → the test that saw it last.
        """
        self._folder = folder
        self._without: dict[str, tuple[list[str], float]] = {}
        """Folder of tests → those that fail without a bug, and the seconds of all."""
        known = sorted({test for test in hints.values() if exists(test)})
        self._hints = {name: test for name, test in hints.items() if test in known}
        if known:
            os.environ["LIBRARIES"] = str(folder.parent / "libraries")
            failed, seconds = run_tests(known)
            print(f"{len(known)} tests of the table run in {seconds:.0f} s; without a bug fail: {failed}", flush=True)
            self._hints = {name: test for name, test in self._hints.items() if not self._fails(test, failed)}
            import_libraries(Path(os.environ.pop("LIBRARIES")))
            # A control with a known answer: no trial may fail without a bug.
            sound = next(test for test in known if not self._fails(test, failed))
            if faults := run_tests([sound])[0]:
                raise RuntimeError(f"{sound} fails in a trial without a bug: {faults}")

    @staticmethod
    def _fails(test: str, failed: Sequence[str]) -> bool:
        return any(name.partition("[")[0] == test for name in failed)

    def seen_by(self, mutant: Mutant, then: Sequence[str]) -> str:
        """Return the first test that sees a bug, without its parameters; empty if none does."""
        path = self._folder / "src" / "pacorl" / mutant.file
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            if hint := self._hints.get(mutant.name):
                failed, _ = run_tests([hint], "-x", limit=LIMIT)
                if failed:
                    return hint
            for tests in (*mutant.tests, *then):
                if found := self._seen_in(tests, mutant, path, source):
                    return found
            return ""
        finally:
            path.write_text(source)

    def _seen_in(self, tests: str, mutant: Mutant, path: Path, source: str) -> str:
        if not Path(tests).exists():
            return ""
        if tests not in self._without:
            path.write_text(source)
            self._without[tests] = run_tests([tests])
            path.write_text(mutant.apply(source))
        failing, seconds = self._without[tests]
        options = [option for test in failing for option in ("--deselect", test)]
        named = sorted(map(str, Path(tests).rglob(f"test_{path.stem}.py"))) if Path(tests).is_dir() else []
        for chosen in filter(None, (named, [tests])):
            failed, _ = run_tests(chosen, "-x", *options, limit=LIMIT + 10 * seconds)
            if failed:
                return failed[0].partition("[")[0]
        return ""


def exists(test: str) -> bool:
    """Check whether a file still has a test."""
    file, _, name = test.partition("::")
    return Path(file).is_file() and f"def {name.rpartition('::')[2]}(" in Path(file).read_text()


def import_libraries(names: Path) -> None:
    """Import what the tests loaded of the heavy libraries."""
    for name in names.read_text().splitlines():
        if name.partition(".")[0] in HEAVY:
            with suppress(Exception):
                importlib.import_module(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="try these alone")
    parser.add_argument("--then", nargs="+", default=[], metavar="TESTS", help="further tests before `none`")
    options = parser.parse_args()
    table = HERE / "mutants.csv"
    mutants = read_mutants()
    with table.open(newline="") as file:
        seen = {row["bug"]: row["seen_by"] for row in csv.DictReader(file)}
    chosen = [mutant for mutant in mutants if not options.only or mutant.name in options.only]

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "copy"
        copy_repository(folder)
        os.environ["PYTHONPATH"] = f"{folder / 'src'}:{folder}"
        sys.path[:0] = [str(folder / "src"), str(folder)]
        os.chdir(folder)
        trials = Trials(folder, {mutant.name: seen[mutant.name] for mutant in chosen if seen.get(mutant.name)})
        for mutant in chosen:
            seen[mutant.name] = trials.seen_by(mutant, options.then)
            print(f"{mutant.name}: {seen[mutant.name] or 'NOT SEEN'}", flush=True)
        os.chdir(ROOT)

    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["bug", "list", "file", "seen_by"])
        writer.writerows([mutant.name, mutant.list, mutant.file, seen.get(mutant.name, "")] for mutant in mutants)
    for name in dict.fromkeys(mutant.list for mutant in chosen):
        members = [mutant for mutant in chosen if mutant.list == name]
        print(f"{name}: {sum(bool(seen[mutant.name]) for mutant in members)} of {len(members)} are seen")
    if wrong := [mutant.name for mutant in chosen if bool(seen[mutant.name]) == bool(mutant.survives)]:
        sys.exit(f"survives without a reason, or is seen and has one: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
