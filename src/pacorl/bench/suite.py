"""The seam of a benchmark and its runner: item by item, resumable, never counted twice.

A run's folder holds `settings.json` (what the results depend on), `results.jsonl` (one line per item; with --shard one
file per process), `table.md`, `table.html` and `summary.json`. Raw judgements are stored and figures are computed from
them at the end, so a table can be made again without asking anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pacorl.bench.tables import Line, Table, as_dict, html_rows, markdown
from pacorl.core.ranking import Interval
from pacorl.engine.image_queue import Shard
from pacorl.io.documents import Journal, as_read_back, blamed_on, parse_json, read_object, write_json
from pacorl.io.files import LockedError, sole_holder, write_atomic
from pacorl.report import render

Row = dict[str, Any]
"""One item's raw result: `key`, and what was judged, or `error` with the reason why nothing was."""

SHOWN_FAULTS = 10


class BadItemError(ValueError):
    """An item of the benchmark's own data that cannot be used: a missing image, a damaged one."""


class Benchmark(Protocol):
    """Items with keys, a measurement per item, and the figures of many."""

    @property
    def title(self) -> str:
        """The heading of the tables."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the figures."""

    @property
    def source(self) -> str:
        """Where the published rows stand, e.g. `arXiv 2512.04784, Tab. 2`."""

    @property
    def published(self) -> Mapping[str, Sequence[float | None]]:
        """The paper's rows: one figure per column, or fewer if the last columns are ours alone."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Items of the data that were left out on request, and why."""

    @property
    def digits(self) -> int:
        """Behind the point, in tables."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines under the main table."""

    def settings(self) -> Mapping[str, Any]:
        """What the results depend on, as JSON: the data, who judges, what is asked."""

    def keys(self) -> Sequence[str]:
        """Every wanted item, in order."""

    def texts(self) -> Mapping[str, Sequence[str]]:
        """Item → the texts and ids that make it known to a generator or judge that was trained on it."""

    def measure(self, keys: Sequence[str]) -> list[Row]:
        """One row per item, in order. Raises BadItemError where the data of one cannot be used."""

    def figures(self, rows: Sequence[Row]) -> list[Interval]:
        """The columns from the rows of measured items."""

    def breakdowns(self, rows: Sequence[Row]) -> list[Table]:
        """Tables by category, task or language."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has found so far, over all of its processes."""

    folder: Path
    wanted: int
    measured: int
    missing: Mapping[str, str]
    """Items without a judgement, and why; another run tries them again."""
    skipped: Mapping[str, str]
    """Items whose data cannot be used, left out on request."""
    trained_on: Mapping[str, str]
    """Items that the named run was trained on, and what they share."""
    tables: tuple[Table, ...]

    @property
    def complete(self) -> bool:
        return self.measured + len(self.skipped) == self.wanted


def run(
    benchmark: Benchmark,
    out: Path,
    *,
    name: str,
    batch: int = 16,
    shard: Shard = Shard(),
    trained_on: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
    notice: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Measures what is not measured yet and writes the tables.

    name: the measured row's. trained_on: item → what it shares with the training data (see `data.leaks`); such items
    get a second row without them. skip_bad: leave out items whose data cannot be used instead of stopping.

    Raises ValueError where `out` holds results of other settings, or another process writes this shard.
    """
    claim(out, benchmark.settings())
    with _sole_writer(out / f".{shard.file}.lock"):
        journal = Journal(out / shard.file)
        if journal.torn:
            notice(f"{journal.path}: its last line was half-written and is dropped: {journal.torn[:60]!r}")
        _measure(benchmark, journal, _to_do(benchmark, out, shard), batch, skip_bad=skip_bad, progress=progress)
    outcome = gather(benchmark, out, name=name, trained_on=trained_on or {})
    write_tables(outcome, title=benchmark.title)
    return outcome


def claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Makes `out` the folder of these settings. Raises ValueError where it is another's, naming what differs."""
    path = out / "settings.json"
    requested = as_read_back(settings)
    if not path.is_file():
        write_json(path, requested)
        return
    stored = read_object(path, fix="name another folder with --out")
    differing = sorted(key for key in {*stored, *requested} if stored.get(key) != requested.get(key))
    if differing:
        first = differing[0]
        raise ValueError(
            f"{out} holds results of other settings: {', '.join(differing)} differ "
            f"({first} was {stored.get(first)!r} and is {requested.get(first)!r}); name another folder with --out"
        )


def gather(benchmark: Benchmark, out: Path, *, name: str, trained_on: Mapping[str, str]) -> Outcome:
    """The figures of everything that all processes have measured; each item counts once."""
    keys = benchmark.keys()
    row_of = read_results(out)
    rows = [row_of[key] for key in keys if key in row_of]
    good = [row for row in rows if "error" not in row]
    bad = {row["key"]: str(row["error"]) for row in rows if "error" in row}
    skipped = {key: why for key, why in bad.items() if row_of[key].get("skipped")}
    leaked = {key: what for key, what in trained_on.items() if key in {row["key"] for row in good}}
    lines = [Line(name, tuple(benchmark.figures(good)))] if good else []
    if leaked:
        rest = [row for row in good if row["key"] not in leaked]
        lines += [Line(f"{name}, without what it was trained on", tuple(benchmark.figures(rest)))] if rest else []
    return Outcome(
        folder=out,
        wanted=len(keys) + len(benchmark.refused),
        measured=len(good),
        missing={key: why for key, why in bad.items() if key not in skipped},
        skipped=dict(benchmark.refused) | skipped,
        trained_on=leaked,
        tables=(_main_table(benchmark, lines), *(benchmark.breakdowns(good) if good else ())),
    )


def _main_table(benchmark: Benchmark, lines: Sequence[Line]) -> Table:
    width = len(benchmark.columns)
    copied = [
        Line(name, (*values, *(None,) * (width - len(values))), published=True)
        for name, values in benchmark.published.items()
    ]
    return Table(
        benchmark.title,
        benchmark.columns,
        (*lines, *copied),
        source=benchmark.source,
        notes=benchmark.notes,
        digits=benchmark.digits,
    )


# --- measuring ---------------------------------------------------------------------------------------------------


def _to_do(benchmark: Benchmark, out: Path, shard: Shard) -> list[str]:
    """This shard's items without a judgement in any process's file; failures are tried again."""
    row_of = read_results(out)
    mine = benchmark.keys()[shard.index :: shard.count]
    return [key for key in mine if key not in row_of or "error" in row_of[key]]


def _measure(
    benchmark: Benchmark,
    journal: Journal,
    keys: Sequence[str],
    batch: int,
    *,
    skip_bad: bool,
    progress: Callable[[int, int], None],
) -> None:
    for start in range(0, len(keys), batch):
        chunk = keys[start : start + batch]
        for row in _rows(benchmark, chunk, skip_bad=skip_bad):
            journal.add(row)
        progress(start + len(chunk), len(keys))


def _rows(benchmark: Benchmark, keys: Sequence[str], *, skip_bad: bool) -> list[Row]:
    try:
        rows = benchmark.measure(keys)
    except BadItemError as error:
        if not skip_bad:
            raise BadItemError(f"{error}; --skip-bad leaves such items out") from None
        if len(keys) == 1:
            return [{"key": keys[0], "error": str(error), "skipped": True}]
        return [row for key in keys for row in _rows(benchmark, [key], skip_bad=True)]
    assert [row["key"] for row in rows] == list(keys), "a benchmark must return one row per item, in order"
    return rows


@contextmanager
def _sole_writer(lock: Path) -> Iterator[None]:
    """Keeps two processes from writing one results file. Raises ValueError where another one does."""
    try:
        with sole_holder(lock):
            yield
    except LockedError:
        raise ValueError(
            f"another process writes results in {lock.parent}; give each a --shard of its own, e.g. 0/2 and 1/2"
        ) from None


# --- the folder --------------------------------------------------------------------------------------------------


def read_results(out: Path) -> dict[str, Row]:
    """Item → row over the files of all processes; a judgement wins over a failure, a later line over an earlier one.

    A last line that is half-written is another process at work, and passed over. Raises ValueError with file and line
    for any other line that is no result.
    """
    rows: dict[str, Row] = {}
    for path in sorted(out.glob("results*.jsonl")):
        content = path.read_bytes()
        for number, line in enumerate(content[: content.rfind(b"\n") + 1].split(b"\n")[:-1], start=1):
            row = _row_of(line, where=f"{path}:{number}")
            if "error" not in row or row["key"] not in rows:
                rows[row["key"]] = row
    return rows


def _row_of(line: bytes, *, where: str) -> Row:
    with blamed_on(where):
        row = parse_json(line, fix="delete the line, and its item is measured again")
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise ValueError(f"{where}: no result (it has no 'key'); delete the line, and its item is measured again")
    return row


def write_tables(outcome: Outcome, *, title: str) -> None:
    """table.md, table.html and summary.json."""
    remarks = remarks_of(outcome)
    text = "\n\n".join([*(markdown(table) for table in outcome.tables), *remarks])
    write_atomic(outcome.folder / "table.md", f"# {title}\n\n{text}\n")
    page = render(
        "benchmark.html",
        title=title,
        name=outcome.folder.resolve().name,
        remarks=remarks,
        tables=[(table, html_rows(table)) for table in outcome.tables],
        facts=[(f"{outcome.measured}", "measured"), (f"{outcome.wanted}", "wanted")],
    )
    write_atomic(outcome.folder / "table.html", page)
    write_json(outcome.folder / "summary.json", summary(outcome))


def summary(outcome: Outcome) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "wanted": outcome.wanted,
        "measured": outcome.measured,
        "complete": outcome.complete,
        "missing": dict(outcome.missing),
        "skipped": dict(outcome.skipped),
        "trained_on": dict(outcome.trained_on),
        "tables": [as_dict(table) for table in outcome.tables],
    }


def remarks_of(outcome: Outcome) -> list[str]:
    """What a reader of the tables must know."""
    lines = []
    if not outcome.complete:
        lines.append(f"Incomplete: {outcome.measured} of {outcome.wanted} items are measured.")
    for items, what in ((outcome.missing, "without a judgement"), (outcome.skipped, "left out, unusable")):
        if items:
            lines.append(f"{len(items)} items {what}, such as {_first(items)}.")
    if outcome.trained_on:
        lines.append(
            f"Leak: {len(outcome.trained_on)} of {outcome.measured} items are among the training data, "
            f"such as {_first(outcome.trained_on)}."
        )
    return lines


def _first(items: Mapping[str, str]) -> str:
    key, why = next(iter(items.items()))
    return f"{key} ({why.removesuffix('.')})"


def check_faults(faults: Mapping[str, str], *, skip_bad: bool) -> Mapping[str, str]:
    """The faults of a benchmark's data, to be left out.

    Raises:
        ValueError: if there are any and they may not be; it lists them.
    """
    if not faults or skip_bad:
        return faults
    lines = list(faults.values())
    more = [f"… and {len(lines) - SHOWN_FAULTS} more"] if len(lines) > SHOWN_FAULTS else []
    raise ValueError("\n".join([*lines[:SHOWN_FAULTS], *more, "--skip-bad leaves such items out"]))
