"""The day's schedule: each part in a process with a time limit, its outcome in the results.

The standard library alone is imported here, so that the schedule holds no memory of the card and outlives whatever
the libraries do. A part's process writes its records itself. The schedule adds one record per part with its outcome.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any

from .parts import PARTS, Part, Record, SkipPart, UnusableMachine

ROOT = Path(__file__).parents[2]
SKIPPED, UNUSABLE = 5, 6
"""Exit codes of a part that this machine cannot run, and of one without which no part can."""
FINISHED = ("done", "skipped")
"""Outcomes after which a part is not run again."""
LEAST = 10.0
"""Seconds of a slice in which no part is begun any more."""


def main(line: Sequence[str] | None = None) -> int:
    options = arguments(line)
    use_sources(options)
    if options.run:
        return run_part(PARTS[options.run], options)
    return run_day(options)


def arguments(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line, by default this process's own."""
    parser = argparse.ArgumentParser(prog="python -m research.gpu_day", description="Measure a card in parts.")
    parser.add_argument("--out", type=Path, default=Path("gpu-day.jsonl"), help="a new JSONL file of results")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="go on with the parts that FILE lacks")
    parser.add_argument("--minutes", type=float, default=30, help="in all, over all slices")
    parser.add_argument("--slice", type=float, default=9, metavar="MINUTES", help="end cleanly after so many")
    parser.add_argument("--parts", nargs="+", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--depth", type=depth, help="two depths, the larger as DOUBLE+SINGLE blocks, such as 4+8")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8], help="images per forward")
    parser.add_argument("--steps", type=int, default=4, help="sampling steps that are timed")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest is recorded")
    parser.add_argument("--rank", type=int, default=64, help="of the adapter")
    parser.add_argument("--tiny", action="store_true", help="the tiny shapes in fp32 on the CPU")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="upper bound of every part's time limit")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    return parser.parse_args(line)


def depth(text: str) -> int:
    """The number of double blocks of `4+8`, which has twice as many single ones, as the published depth has."""
    double, _, single = text.partition("+")
    if not (double.isdigit() and single == str(2 * int(double)) and int(double) >= 2):
        raise argparse.ArgumentTypeError(f"{text!r}: write N+2N with N at least 2, such as 4+8 or 8+16")
    return int(double)


def use_sources(options: argparse.Namespace) -> None:
    """Put the source tree before installed packages, in this process and in all that it starts."""
    folders = [str(ROOT / "src"), str(ROOT)]
    sys.path[:0] = folders
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])
    import pacorl  # noqa: F401 - configures torch's allocator, which must precede torch's import

    if options.tiny:  # more threads than the tiny shapes need make torch many times slower
        os.environ.setdefault("OMP_NUM_THREADS", "1")


# --- the day ---------------------------------------------------------------------------------------------------


def run_day(options: argparse.Namespace) -> int:
    """Run parts until all are done or the time is over; 1 if a part was lost, 2 if none can run, else 0."""
    path = options.resume or options.out
    if not options.resume and path.exists():
        print(f"gpu_day: {path} exists; go on with --resume {path}, or name another --out", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the running part ends too
    results, started = Results(path), time.monotonic()
    ends = min(60 * options.minutes - results.spent(), 60 * options.slice)
    waiting = left_over(options, results)
    while waiting:
        left = ends - (time.monotonic() - started)
        part = next((part for part in waiting if fits(part, left, options)), None)
        if part is None:
            break
        waiting.remove(part)
        record = outcome(part, options, results, limit=min(time_limit(part, options), left))
        results.add(record)
        print(f"{part.name}: {record['outcome']}, {record['seconds']:.0f} s {record['reason']}", flush=True)
        if record["outcome"] == "unusable":
            return 2
    if waiting:
        print(f"left: {', '.join(part.name for part in waiting)}; go on with --resume {path}")
    return int(any(record["outcome"] not in FINISHED for record in results.outcomes().values()))


def left_over(options: argparse.Namespace, results: Results) -> list[Part]:
    """The parts to run: those without an outcome first, then those that were lost."""
    outcomes = results.outcomes()
    parts = [part for name, part in PARTS.items() if not options.parts or name in options.parts]
    lost = [part for part in parts if part.name in outcomes and outcomes[part.name]["outcome"] not in FINISHED]
    return [part for part in parts if part.name not in outcomes] + lost


def time_limit(part: Part, options: argparse.Namespace) -> float:
    """Seconds after which a part is killed; a CPU compiles for longer than a card."""
    longest = 60 * options.slice if options.tiny else part.limit
    return min(longest, options.limit or longest)


def fits(part: Part, left: float, options: argparse.Namespace) -> bool:
    """Whether a part's expected seconds are left."""
    expected = 0 if options.tiny else part.seconds
    return left >= max(LEAST, expected)


def end_with_parent(number: signal.Signals) -> None:
    """Let the kernel signal this process when its parent is gone, which cannot if it was killed; for `preexec_fn`."""
    with suppress(OSError, AttributeError):  # not on Linux: there a killed parent leaves its children to the user
        ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG of linux/prctl.h


def outcome(part: Part, options: argparse.Namespace, results: Results, *, limit: float) -> Record:
    """Run a part in a process of its own; its outcome, with the last line of its errors as the reason."""
    started = time.monotonic()
    with (
        NamedTemporaryFile("w+", prefix="gpu-day-", suffix=".log") as log,
        # A killed compiler leaves half a file in torch's cache, which would fail this part in every later slice.
        TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as cache,
    ):
        process = subprocess.Popen(
            command(part, options, results),
            cwd=ROOT,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache},
            stdout=log,
            stderr=log,
            process_group=0,
            preexec_fn=partial(end_with_parent, signal.SIGKILL),  # noqa: PLW1509 - there are no threads
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
        log.seek(0)
        lines = [line for line in log.read().splitlines() if line.strip()]
    last = lines[-1][:500] if lines else ""
    names = {0: "done", SKIPPED: "skipped", UNUSABLE: "unusable", None: "timeout"}
    record = {"part": part.name, "outcome": names.get(code, "failed"), "seconds": time.monotonic() - started}
    if code is None:
        return record | {"reason": f"killed after {limit:.0f} s; its last line: {last}"}
    if code < 0:
        return record | {"reason": f"ended by signal {-code}"}
    return record | {"reason": last if code else "", "log": lines[-20:] if code else []}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def command(part: Part, options: argparse.Namespace, results: Results) -> list[str]:
    """The command line of a part's process."""
    line = [sys.executable, "-m", __package__, "--run", part.name, "--out", str(results.path.resolve())]
    line += ["--steps", str(options.steps), "--repeats", str(options.repeats), "--rank", str(options.rank)]
    line += ["--batches", *map(str, options.batches)]
    line += ["--tiny"] if options.tiny else []
    line += ["--depth", f"{options.depth}+{2 * options.depth}"] if options.depth else []
    return line


# --- a part ----------------------------------------------------------------------------------------------------


def run_part(part: Part, options: argparse.Namespace) -> int:
    """Run a part in this process, and append its records as they come."""
    results = Results(options.out)
    try:
        for record in part.load()(options):
            results.add({"part": part.name, **record})
    except (SkipPart, UnusableMachine) as reason:
        print(reason, file=sys.stderr)
        return SKIPPED if isinstance(reason, SkipPart) else UNUSABLE
    return 0


# --- results ---------------------------------------------------------------------------------------------------


class Results:
    """The JSONL file of a day. Several processes may append to it, one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, record: Mapping[str, Any]) -> None:
        """Append a record, on a line of its own, and sync it to disk."""
        with open(self.path, "a+b") as handle:
            handle.write(b"" if self._is_whole() else b"\n")
            handle.write(json.dumps(record).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())

    def _is_whole(self) -> bool:
        """Whether the last line is complete; a killed process may leave part of one."""
        content = self.path.read_bytes()
        return not content or content.endswith(b"\n")

    def records(self) -> Iterator[dict[str, Any]]:
        """All complete records, in their order."""
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Part → its last outcome."""
        return {record["part"]: record for record in self.records() if "outcome" in record}

    def spent(self) -> float:
        """Seconds of all parts that have ended, whatever their outcome."""
        return sum(float(record["seconds"]) for record in self.records() if "outcome" in record)
