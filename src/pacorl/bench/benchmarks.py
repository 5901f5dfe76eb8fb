"""The benchmarks: a table of them, and the check of their options.

A new benchmark is one file with a subclass of `suite.Benchmark`, and one line of `BENCHMARKS`: `pacorl benchmark NAME`,
its tables and the contract tests come from the entry. This file imports no heavy package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pacorl.bench.options import GENERATOR, BenchmarkOptions
from pacorl.config.options import UsageError
from pacorl.config.table import Table

if TYPE_CHECKING:
    from pacorl.bench.suite import Benchmark


def check_options(entry: type[Benchmark[Any]], options: BenchmarkOptions) -> None:
    """Raise UsageError for an option of another benchmark, ValueError without a generator or a folder of images."""
    defaults = BenchmarkOptions()
    for name in (*GENERATOR, "aesthetics"):
        if name not in entry.takes and getattr(options, name) != getattr(defaults, name):
            raise UsageError(f"--{name.replace('_', '-')} is not an option of {entry.name}")
    if "model" in entry.takes and not options.makes_images:
        raise ValueError("name a generator with --model, or a folder of finished images with --images")
    if options.images and not options.images.is_dir():
        raise ValueError(f"--images {options.images}: there is no such folder")


BENCHMARKS: Table[type[Benchmark[Any]]] = Table(
    "benchmark",
    {
        "consistency-rank": "pacorl.bench.consistency_rank:ConsistencyRank",
        "edit-reward-bench": "pacorl.bench.edit_reward_bench:EditRewardBench",
        "vc-reward-bench": "pacorl.bench.edit_reward_bench:VcRewardBench",
        "edit-reward-compass": "pacorl.bench.edit_reward_bench:EditRewardCompass",
        "t2is": "pacorl.bench.t2is:T2isBench",
        "gedit": "pacorl.bench.gedit:GeditBench",
    },
)
