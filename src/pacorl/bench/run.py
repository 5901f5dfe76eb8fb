"""`run_benchmark`: read the data, generate what is missing, ask the judge, write the tables.

report = run_benchmark("consistency-rank", Path("ConsistencyRank-Bench"), RankOptions(judge="tiny"))
print(report.outcome.tables[0])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from pacorl.bench.suite import Benchmark, Outcome, run
from pacorl.bench.table import BENCHMARKS, Advance, BenchmarkOptions
from pacorl.data.leaks import trained_on
from pacorl.engine.image_queue import Shard
from pacorl.score.reward import PacoReward

RUN_LEVELS = 3
"""How far above an adapter its run's folder may lie: RUN/checkpoints/step-000040/adapter."""

Progress = Callable[[str], AbstractContextManager[Advance]]
Notice = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run."""

    outcome: Outcome
    note: str
    """What a reader must know of the judge; empty for most."""


def no_progress(activity: str) -> AbstractContextManager[Advance]:
    """Shows nothing."""
    return nullcontext(lambda done, total: None)


def run_benchmark(
    name: str,
    data: Path,
    options: BenchmarkOptions,
    *,
    progress: Progress = no_progress,
    notice: Notice = lambda line: None,
) -> Report | None:
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
    items = spec.read(data, options)
    out, shard = options.out or Path("runs") / "bench" / name, shard_of(options.shard)
    if spec.generate and not getattr(options, "images", None):
        with progress("generating") as advance:
            spec.generate(items, options, out, shard, advance)
    if getattr(options, "generate_only", False):
        return None
    with opened_judge(options, all_spellings=spec.all_spellings) as reward:
        benchmark = spec.build(items, options, reward, out)
        leaked = _leaked(benchmark, options, notice)  # before judging, because it can fail and costs nothing
        with progress("judging") as advance:
            outcome = run(
                benchmark,
                out,
                name=options.name or options.subject,
                batch=options.batch,
                shard=shard,
                trained_on=leaked,
                skip_bad=options.skip_bad,
                progress=advance,
                notice=notice,
            )
    return Report(outcome, reward.note if reward else "")


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
        return trained_on(benchmark.texts(), options.trained)
    folder = run_of(options.subject_adapter)
    try:
        return trained_on(benchmark.texts(), folder) if folder else {}
    except ValueError as error:
        notice(f"not compared with what the adapter was trained on: {error}")
        return {}


def run_of(adapter: str) -> Path | None:
    """The run's folder that an adapter lies in, if it does."""
    folders = [Path(adapter), *Path(adapter).resolve().parents[:RUN_LEVELS]] if adapter else []
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def shard_of(text: str) -> Shard:
    """`--shard`, else this process's rank under torchrun, else everything."""
    if text:
        return Shard.parse(text)
    return Shard(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))
