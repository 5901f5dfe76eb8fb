"""The benchmarks: a table of them, and their options.

A new benchmark is one file with a subclass of `suite.Benchmark`, and one line of `BENCHMARKS`: `pacorl benchmark NAME`,
its tables and the contract tests come from the entry. This file imports no heavy package.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pacorl.config.options import LARGEST, GeneratorOptions, JudgeOptions, UsageError, inherited, option
from pacorl.config.table import Table

if TYPE_CHECKING:
    from pacorl.bench.suite import Benchmark


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(GeneratorOptions, JudgeOptions):
    """Options of `pacorl benchmark`; `suite.Benchmark.takes` lists the optional part."""

    panel: ClassVar[str] = "Run"

    out: Path | None = option(None, "The folder of this run; runs/bench/NAME if left out.")
    limit: int | None = option(None, "At most so many items, evenly spread over the data.", min=1, max=LARGEST)
    against: Path | None = option(None, "The folder of another run on the same data, for paired differences.")
    as_json: bool = option(False, "Print JSON.", "--json")
    aesthetics: bool = option(False, "t2is: measure aesthetics too, by LAION's predictor.")
    model: str = inherited(GeneratorOptions, "model", default="", help="A diffusers folder, a hub name, or tiny.")
    images: Path | None = option(None, "A folder of finished images; nothing is generated then.")
    image_batch: int = option(4, "Images per forward.", min=1, max=LARGEST)

    @property
    def makes_images(self) -> bool:
        """Whether a generator or finished images are measured, and not a judge."""
        return bool(self.model or self.images)

    @property
    def subject(self) -> str:
        """Name of the measured model, for the tables."""
        if self.images:
            return str(self.images)
        if self.model:
            return " + ".join(filter(None, (self.model, self.adapter)))
        return self.judge.partition("#")[2] or self.judge

    @property
    def subject_adapter(self) -> str:
        """Folder of the measured judge or adapter, if it has one; its run must not have been trained on the items."""
        return self.adapter if self.makes_images else self.judge


GENERATOR = ("model", "kind", "adapter", "size", "steps", "options", "seed", "images", "image_batch")
"""Options of the benchmarks of generators, or of finished images."""


def check_options(entry: type[Benchmark[Any]], options: BenchmarkOptions) -> None:
    """Raise UsageError for an option of other benchmarks, or if nothing is named that makes images."""
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
