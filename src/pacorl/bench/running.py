"""`run_benchmark`: read the data, generate what is missing, ask the judge, write the tables.

outcome = run_benchmark("consistency-rank", Path("ConsistencyRank-Bench"), RankOptions(judge="tiny"))
print(outcome.tables[0].markdown)

A run's folder holds `settings.json` (what the results depend on), `results.jsonl` (one line per item; with --shard one
file per process), `table.md`, `table.html` and `summary.json`. Raw judgements are stored and figures are computed from
them at the end, so that a run can be resumed item by item, nothing counts twice, and a table can be made again without
asking anybody.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacorl.bench.benchmarks import BENCHMARKS, Advance, BenchmarkOptions
from pacorl.bench.items import BadItemError
from pacorl.bench.suite import Benchmark, Line, Row, Table
from pacorl.config.options import packed_form
from pacorl.generate.image_queue import Shard
from pacorl.io.documents import Journal, as_read_back, blamed_on, parse_json, read_object, write_json
from pacorl.io.files import LockedError, check_writable, claim_folder, sole_holder, sweep, write_atomic
from pacorl.io.quiet import quiet_loading
from pacorl.judge import check_judge
from pacorl.judge.paco_reward import PacoReward
from pacorl.records import leaks
from pacorl.report.page import render

RUN_LEVELS = 3
"""How far above an adapter its run's folder may lie: RUN/checkpoints/step-000040/adapter."""

Progress = Callable[[str], AbstractContextManager[Advance]]
Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run has measured so far, over all of its processes."""

    folder: Path
    total: int
    """Items that there are to measure."""
    measured: int
    missing: Mapping[str, str]
    """Items without a judgement, and why; another run tries them again."""
    skipped: Mapping[str, str]
    """Items whose data cannot be used, left out on request."""
    trained_on: Mapping[str, str]
    """Items that the named run was trained on, and what they share."""
    tables: tuple[Table, ...]
    note: str = ""
    """What a reader must know of the judge; empty for most."""

    @property
    def complete(self) -> bool:
        return self.measured + len(self.skipped) == self.total

    @property
    def summary(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "wanted": self.total,
            "measured": self.measured,
            "complete": self.complete,
            "missing": dict(self.missing),
            "skipped": dict(self.skipped),
            "trained_on": dict(self.trained_on),
            "tables": [table.to_dict() for table in self.tables],
        }

    @property
    def remarks(self) -> list[str]:
        """What a reader of the tables must know."""
        lines = [] if self.complete else [f"Incomplete: {self.measured} of {self.total} items are measured."]
        for items, fate in ((self.missing, "without a judgement"), (self.skipped, "left out, unusable")):
            if items:
                lines.append(f"{len(items)} items {fate}, such as {_first(items)}.")
        if self.trained_on:
            leaked = f"Leak: {len(self.trained_on)} of {self.measured} items are among the training data"
            lines.append(f"{leaked}, such as {_first(self.trained_on)}.")
        return lines


def _first(items: Mapping[str, str]) -> str:
    key, why = next(iter(items.items()))
    return f"{key} ({why.removesuffix('.')})"


def run_benchmark(
    name: str,
    data: Path,
    options: BenchmarkOptions,
    *,
    progress: Progress = lambda activity: nullcontext(lambda done, total: None),
    notice: Notice = lambda line: None,
) -> Outcome | None:
    """Runs a benchmark of the table, or goes on with it.

    Args:
        data: the published data, as it was downloaded.
        options: an object of the entry's own options class.
        progress: opens a bar for an activity.
        notice: hears one line of what a user should know.

    Returns:
        The tables; None if images were to be generated only.

    Raises:
        ValueError: if name, data or options cannot be used, or the run's folder holds results of other settings.
    """
    spec = BENCHMARKS.named(name)
    items = spec.read(data, options)  # first of all: faulty data are told before a model is loaded
    # The entry of a file is called by the last part of its name.
    out = options.out or Path("runs") / "bench" / name.rpartition(":")[2]
    check_writable(out, folder=True)
    # A judge's benchmark has no such options.
    generate_only = getattr(options, "generate_only", False)
    if options.needs_judge and not generate_only:
        check_judge(options.judge, adapter=options.judge_adapter)
    claim_folder(out, "settings.json")
    if spec.generate and not getattr(options, "images", None):
        with progress("generating") as advance:
            spec.generate(items, options, out, _shard(options), advance)
    if generate_only:
        return None
    quiet_loading()  # imports what loads models, for seconds
    with opened_judge(options, all_spellings=spec.all_spellings) as reward:
        benchmark = spec.build(items, options, reward, out)
        outcome = run(benchmark, out, options, progress=progress, notice=notice)
    return replace(outcome, note=reward.note if reward else "")


def _shard(options: BenchmarkOptions) -> Shard:
    """Without --shard, torchrun's rank: one command then serves one process and many."""
    rank = os.environ.get("RANK", "0")
    world_size = os.environ.get("WORLD_SIZE", "1")
    return Shard.parse(options.shard) if options.shard else Shard(int(rank), int(world_size))


def opened_judge(options: BenchmarkOptions, *, all_spellings: bool) -> AbstractContextManager[PacoReward | None]:
    """The judge, if one is needed.

    It declines nothing: a benchmark measures what a judge says, and a generator by all that it made.
    """
    if not options.needs_judge:
        return nullcontext()
    return PacoReward.from_pretrained(options.judge, **options.judge_access, variants=all_spellings, decline=False)


def _leaked(benchmark: Benchmark, options: BenchmarkOptions, notice: Notice) -> Mapping[str, str]:
    """Item → what it shares with the training data, of a run that is named or that the measured adapter lies in."""
    if options.trained:
        return leaks.trained_on(benchmark.texts(), options.trained)
    adapter = Path(options.subject_adapter)
    folders = [adapter, *adapter.resolve().parents[:RUN_LEVELS]] if options.subject_adapter else []
    folder = next((folder for folder in folders if (folder / "config.yaml").is_file()), None)
    try:
        return leaks.trained_on(benchmark.texts(), folder) if folder else {}
    except ValueError as error:
        # Nobody asked for this comparison, so it must not stop the run.
        notice(f"not compared with what the adapter was trained on: {error}")
        return {}


def run(
    benchmark: Benchmark,
    out: Path,
    options: BenchmarkOptions,
    *,
    progress: Progress = lambda activity: nullcontext(lambda done, total: None),
    notice: Notice = lambda line: None,
) -> Outcome:
    """Measures what is not measured yet and writes the tables.

    Raises:
        ValueError: if `out` holds results of other settings, or another process writes this shard.
    """
    # Before judging, because it can fail and costs nothing.
    trained_on = _leaked(benchmark, options, notice)
    shard = _shard(options)
    _claim(out, {**benchmark.settings(), **packed_form(options.memory)})
    with _sole_writer(out / f".{shard.file}.lock"), progress("judging") as advance:
        journal = Journal(out / shard.file)
        if journal.torn:
            notice(f"{journal.path}: its last line was half-written and is dropped: {journal.torn[:60]!r}")
        _measure_missing(benchmark, journal, options, shard=shard, notice=notice, advance=advance)
    outcome = _gather(benchmark, out, name=options.name or options.subject, trained_on=trained_on)
    _write_tables(outcome, title=benchmark.title)
    return outcome


def _claim(out: Path, settings: Mapping[str, Any]) -> None:
    """Makes `out` the folder of these settings. Raises ValueError if it is another's, naming what differs."""
    # As JSON has them: a tuple or a path in memory would differ from what was stored of it.
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


@contextmanager
def _sole_writer(lock: Path) -> Iterator[None]:
    try:
        with sole_holder(lock):
            sweep(lock.parent)
            yield
    except LockedError:
        raise ValueError(
            f"another process writes results in {lock.parent}; give each a --shard of its own, e.g. 0/2 and 1/2"
        ) from None


def _measure_missing(
    benchmark: Benchmark,
    journal: Journal,
    options: BenchmarkOptions,
    *,
    shard: Shard,
    notice: Notice,
    advance: Advance,
) -> None:
    """Measure the items of a shard that have no judgement, in the batches of a run that was never stopped.

    The last bits of a judge's answer may depend on the batch that it is asked in, and so batches are cut from all items
    of a shard, never from the missing ones. A batch of which a stop left a part on the disk is measured whole. Items
    that were measured before keep their rows, and a notice names them if they now come out otherwise.
    """
    # Rows of every process: shards may have been cut otherwise in an earlier run.
    row_of = read_results(journal.path.parent)
    own_keys = [key for batch in shard.batches(list(benchmark.texts()), size=options.dealt) for key in batch]
    missing = {key for key in own_keys if key not in row_of or "error" in row_of[key]}
    done = 0
    for batch in Shard().batches(own_keys, size=options.batch):
        lacking = [key for key in batch if key in missing]
        if not lacking:
            continue
        # Not every batch that lacks an item is repeated: an item that failed, and a raised limit, leave others that
        # were asked in full, and a question to a server has its price.
        keys = batch if _is_cut_short(batch, journal) else lacking
        rows = _measured(benchmark, keys, skip_bad=options.skip_bad)
        repeated = [row for row in rows if row["key"] not in missing and "error" not in row]
        changed = [row["key"] for row in repeated if as_read_back(row) != row_of[row["key"]]]
        if changed:
            notice(
                f"{journal.path}: {', '.join(changed)} kept, although the batch now comes out with other numbers: "
                "another machine or software version made the lines; delete them to replace them"
            )
        journal.add(*(row for row in rows if row["key"] in missing))
        done += len(lacking)
        advance(done, len(missing))


def _is_cut_short(batch: Sequence[str], journal: Journal) -> bool:
    """Whether a stop fell into the write of a batch: its first items, and not all of them, are the journal's last."""
    written = [key for key in batch if key in journal]
    if not 0 < len(written) < len(batch):
        return False
    return written == list(batch[: len(written)]) == list(journal.items)[-len(written) :]


def _measured(benchmark: Benchmark, keys: Sequence[str], *, skip_bad: bool) -> list[Row]:
    try:
        rows = benchmark.measure(keys)
    except BadItemError as error:
        if not skip_bad:
            raise BadItemError(f"{error}; --skip-bad leaves such items out") from None
        if len(keys) == 1:
            return [{"key": keys[0], "error": str(error), "skipped": True}]
        # The error does not say whose it is, so each item of the batch is tried alone.
        return [row for key in keys for row in _measured(benchmark, [key], skip_bad=True)]
    assert [row["key"] for row in rows] == list(keys), "a benchmark must return one row per item, in order"
    return rows


def read_results(out: Path) -> dict[str, Row]:
    """Item → row over the files of all processes; a judgement wins over a failure, a later line over an earlier one.

    A last line that is half-written is another process at work, and passed over. Raises ValueError with file and line
    for any other line that is no result.
    """
    rows: dict[str, Row] = {}
    for path in sorted(out.glob("results*.jsonl")):
        # Bytes: a half-written line may end within a letter.
        whole_lines = path.read_bytes().rpartition(b"\n")[0]
        for number, line in enumerate(whole_lines.split(b"\n") if whole_lines else [], start=1):
            with blamed_on(f"{path}:{number}"):
                row = parse_json(line, fix="delete the line, and its item is measured again")
                if not isinstance(row, dict) or not isinstance(row.get("key"), str):
                    raise ValueError("no result (it has no 'key'); delete the line, and its item is measured again")
            if "error" not in row or row["key"] not in rows:
                rows[row["key"]] = row
    return rows


def _gather(benchmark: Benchmark, out: Path, *, name: str, trained_on: Mapping[str, str]) -> Outcome:
    """The figures of everything that all processes have measured; each item counts once."""
    # Read again, because other processes have measured in the meantime.
    keys = list(benchmark.texts())
    row_of = read_results(out)
    rows = [row_of[key] for key in keys if key in row_of]
    good = [row for row in rows if "error" not in row]
    errors = {row["key"]: str(row["error"]) for row in rows if "error" in row}
    skipped = {key: why for key, why in errors.items() if row_of[key].get("skipped")}
    leaked = {row["key"] for row in good} & trained_on.keys()
    clean = [row for row in good if row["key"] not in leaked]
    lines = [Line(name, tuple(benchmark.figures(good)))] if good else []
    if leaked and clean:
        lines.append(Line(f"{name}, without what it was trained on", tuple(benchmark.figures(clean))))
    width = len(benchmark.columns)  # the paper has no figures in columns that are ours alone
    lines += [
        Line(paper_name, (*figures, *(None,) * (width - len(figures))), published=True)
        for paper_name, figures in (benchmark.paper.rows if benchmark.paper else {}).items()
    ]
    source = benchmark.paper.source if benchmark.paper else ""
    main = Table(benchmark.title, benchmark.columns, tuple(lines), source=source, notes=benchmark.notes)
    return Outcome(
        folder=out,
        total=len(keys) + len(benchmark.data.refused),
        measured=len(good),
        missing={key: why for key, why in errors.items() if key not in skipped},
        skipped=dict(benchmark.data.refused) | skipped,
        trained_on={key: shared for key, shared in trained_on.items() if key in leaked},
        tables=(main, *(benchmark.breakdowns(good) if good else ())),
    )


def _write_tables(outcome: Outcome, *, title: str) -> None:
    """table.md, table.html and summary.json."""
    text = "\n\n".join([*(table.markdown for table in outcome.tables), *outcome.remarks])
    write_atomic(outcome.folder / "table.md", f"# {title}\n\n{text}\n")
    page = render(
        "benchmark.html",
        title=title,
        name=outcome.folder.resolve().name,
        remarks=outcome.remarks,
        tables=outcome.tables,
        facts=[(f"{outcome.measured}", "measured"), (f"{outcome.total}", "wanted")],
    )
    write_atomic(outcome.folder / "table.html", page)
    write_json(outcome.folder / "summary.json", outcome.summary)
