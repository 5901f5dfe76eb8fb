"""Running a benchmark: read the data, generate missing images, ask the judge, write the tables.

    outcome = run_benchmark("consistency-rank", Path("ConsistencyRank-Bench"), BenchmarkOptions(judge="tiny"))
    print(outcome.table.markdown)

A run's folder contains `settings.json` (everything that affects the results), `results.jsonl` (one line per item; one
file per process under torchrun), `table.md` and `summary.json`. The figures are computed from the stored raw
judgements at the end. Therefore a run can be resumed item by item, no item counts twice, and tables can be made again
without the judge.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from math import nan
from pathlib import Path
from typing import Any

from pacorl.bench.benchmarks import BENCHMARKS, check_options
from pacorl.bench.options import BenchmarkOptions
from pacorl.bench.suite import Benchmark, ImageBenchmark, Line, Row, Table
from pacorl.config.options import UsageError, packed_form
from pacorl.core.batches import in_batches
from pacorl.core.ranking import FEWEST, Interval
from pacorl.gate.paco_reward import PacoReward
from pacorl.gate.scores import UNCALIBRATED
from pacorl.generate.image_queue import Shard
from pacorl.io.documents import Journal, JsonObject, as_read_back, read_journal, read_object, write_json
from pacorl.io.files import claim_folder, sole_holder, sweep, write_atomic
from pacorl.io.quiet import quiet_loading
from pacorl.io.terminal import Progress, silent
from pacorl.judge import NO_JUDGE, check_judge
from pacorl.judge.judge import Judge
from pacorl.records import leaks
from pacorl.report.html import render

logger = logging.getLogger(__name__)
OTHER_FOLDER = "name another folder with --out"
OpenProgress = Callable[[str], AbstractContextManager[Progress]]


def without_bar(activity: str) -> AbstractContextManager[Progress]:
    """`OpenProgress` without a display."""
    return nullcontext(silent)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run so far, over all of its processes."""

    folder: Path
    total: int
    """Number of items."""
    measured: int
    missing: Mapping[str, str]
    """Item without a judgement → error; another run tries it again."""
    trained_on: Mapping[str, str]
    """Item in the training data of the measured model → the shared text."""
    table: Table
    note: str
    """Remarks about the judge."""

    @property
    def summary(self) -> JsonObject:
        """The results for programs."""
        document = {
            "wanted": self.total,
            "measured": self.measured,
            "missing": self.missing,
            "trained_on": self.trained_on,
            "note": self.note,
            "table": self.table.to_dict(),
        }
        # JSON has no NaN, the mean of no values.
        return dict(as_read_back(document))

    @property
    def text(self) -> str:
        """Table in Markdown, the number of measured items, and the caveats, a paragraph each."""
        return render("outcome.md", outcome=self, fewest=FEWEST).rstrip()


def run_benchmark(name: str, data: Path, options: BenchmarkOptions, *, progress: OpenProgress = without_bar) -> Outcome:
    """Run a benchmark of the table, or resume it; return the results.

    Args:
        data: the published data, as it was downloaded.
        options: common options, and the options of the entry.
        progress: opens a progress bar for an activity.

    Raises:
        ValueError: if name, data or options cannot be used, or the run's folder holds results of other settings.
    """
    # Errors in the data are reported before a model is loaded.
    entry = BENCHMARKS.named(name)
    check_options(entry, options)
    benchmark = entry(data, options)
    if not options.judge:
        raise UsageError(NO_JUDGE)
    check_judge(options.judge)
    claim_folder(benchmark.out)

    # Generate.
    if isinstance(benchmark, ImageBenchmark) and not options.images:
        shard = Shard.of_process()
        if (benchmark.out / "settings.json").is_file():
            # Before the images of other settings are replaced.
            settings = benchmark.settings(judge="")
            of_images = ("benchmark", "data", "images")
            _check_settings(benchmark.out / "settings.json", settings, only=of_images)
        with sole_writer(benchmark.out, shard), progress("generating") as advance:
            benchmark.generate(shard, advance)

    # Measure. The import of the model libraries takes seconds.
    quiet_loading()
    with PacoReward.from_pretrained(options.judge, memory=options.memory, variants=entry.all_spellings) as reward:
        return run(benchmark, reward, progress=progress)


def sole_writer(out: Path, shard: Shard) -> AbstractContextManager[None]:
    """Lock a share of a run's folder. Raises ValueError if another process holds it."""
    return sole_holder(out / f".{shard.file}.lock", fix=f"wait for its end, or {OTHER_FOLDER}")


def run(benchmark: Benchmark[Any], reward: PacoReward, *, progress: OpenProgress = without_bar) -> Outcome:
    """Measure the remaining items by a judge, and write the tables.

    Raises:
        ValueError: if the run's folder holds results of other settings, or another process writes this share.
    """
    # Before judging, because it can fail and costs nothing: items in the training data of the run of the measured
    # adapter.
    options, out = benchmark.options, benchmark.out
    trained_on: Mapping[str, str] = {}
    run_of_adapter = leaks.run_of(options.adapter if options.makes_images else options.judge)
    if run_of_adapter:
        try:
            trained_on = leaks.trained_on(benchmark.texts(), run_of_adapter)
        except ValueError as error:
            # The user did not request this comparison, so it must not stop the run.
            logger.warning("not compared with the training data of the adapter: %s", error)
    # A folder holds results of one setting: other settings would mix in one table.
    settings = benchmark.settings(reward.name) | packed_form(options.memory)
    if (out / "settings.json").is_file():
        _check_settings(out / "settings.json", settings)
    else:
        write_json(out / "settings.json", settings)

    # Judge. Two writers of one journal would interleave their lines.
    shard = Shard.of_process()
    with sole_writer(out, shard), progress("judging") as advance:
        # Files that a killed process left unfinished.
        sweep(out)
        # A process judges the images that it generates.
        keys = list(chain(*shard.batches(list(benchmark.texts()), size=options.image_batch)))
        _measure_missing(benchmark, reward.judge, Journal(out / shard.file), keys, advance)

    outcome = _gather(benchmark, trained_on, note=f"{reward.note} {UNCALIBRATED}".strip())
    write_atomic(out / "table.md", outcome.text + "\n")
    write_json(out / "summary.json", outcome.summary)
    return outcome


def _check_settings(path: Path, settings: Mapping[str, Any], *, only: Sequence[str] = ()) -> None:
    """Raise ValueError if stored settings differ, all or `only` some."""
    stored = read_object(path, fix=OTHER_FOLDER)
    # In JSON's types: a tuple or a path in memory would differ from the stored list or text.
    requested = as_read_back(settings)
    differing = []
    for key in only or sorted({*stored, *requested}):
        if stored.get(key) != requested.get(key):
            differing.append(f"{key} was {stored.get(key)!r} and is {requested.get(key)!r}")
    if differing:
        raise ValueError(f"{path.parent} holds results of other settings: {'; '.join(differing)}; {OTHER_FOLDER}")


def _measure_missing(
    benchmark: Benchmark[Any], judge: Judge, journal: Journal, keys: Sequence[str], advance: Progress
) -> None:
    """Measure the items of `keys` without a judgement, batch by batch.

    The last bits of a judge's answer may depend on its batch, so a resumed run may differ in them.
    """
    # Rows of every process: an earlier run may have had another number of them.
    row_of = read_results(journal.path.parent)
    missing = [key for key in keys if "error" in row_of.get(key, {"error": ""})]
    done = 0
    for batch_keys in in_batches(missing, benchmark.batch):
        # One write per batch, so that an interruption loses one batch at most.
        journal.add(*benchmark.measure(batch_keys, judge))
        done += len(batch_keys)
        advance(done, len(missing))


def read_results(out: Path) -> dict[str, Row]:
    """Read the rows of all processes by item; a failure, whose retry is in another file, replaces no judgement.

    Raises:
        ValueError: with file and line, if a line is no result.
    """
    rows: dict[str, Row] = {}
    for path in sorted(out.glob("results*.jsonl")):
        for key, row in read_journal(path).items():
            if "error" not in row or key not in rows:
                rows[key] = row
    return rows


def _gather(benchmark: Benchmark[Any], trained_on: Mapping[str, str], *, note: str) -> Outcome:
    """Compute the figures from the rows of all processes; each item counts once."""
    name = benchmark.options.subject
    keys = list(benchmark.texts())
    row_of = read_results(benchmark.out)
    good, clean = [], []
    missing, leaked = {}, {}
    for key in keys:
        row = row_of.get(key)
        if row is None:
            continue
        if "error" in row:
            missing[key] = str(row["error"])
            continue
        good.append(row)
        # The shared texts count only where the item was measured.
        if key in trained_on:
            leaked[key] = trained_on[key]
        else:
            clean.append(row)

    lines = []
    if good:
        lines.append(Line(name, benchmark.figures(good)))
        if leaked and clean:
            lines.append(Line(f"{name}, without its training data", benchmark.figures(clean)))
    # The paper's rows, unless the data are clearly others in the published form.
    paper, table = benchmark.paper, benchmark.table
    if benchmark.total < paper.items / 2:
        note_of_paper = (
            f"The rows of {paper.source} are left out: these {benchmark.total:,} items are not the published "
            f"data, which are {paper.items:,} or more."
        )
    else:
        note_of_paper = f"† Published in {paper.source}, on its own data; not measured here."
        for paper_name, figures in paper.rows.items():
            cells = [Interval(nan if figure is None else figure) for figure in figures]
            # The paper has no figures in columns that are ours alone.
            missing_columns = len(table.columns) - len(cells)
            lines.append(Line(paper_name, cells + [Interval(nan)] * missing_columns, published=True))
    notes = [*table.notes, note_of_paper] if paper.rows else table.notes

    return Outcome(
        folder=benchmark.out,
        total=len(keys),
        measured=len(good),
        missing=missing,
        trained_on=leaked,
        table=replace(table, lines=lines, notes=notes),
        note=note,
    )
