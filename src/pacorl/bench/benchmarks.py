"""The benchmarks: a table of specs, their common options, and the contents of an entry.

A new benchmark is one file with a `BenchmarkSpec`, and one line of `BENCHMARKS`: `pacorl benchmark NAME`, its tables
and the contract tests come from the entry. This file imports no heavy package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pacorl.config.options import LARGEST, GeneratorOptions, JudgeOptions, UsageError, inherited, option
from pacorl.config.table import Table

if TYPE_CHECKING:
    from pacorl.bench.suite import Benchmark
    from pacorl.gate.paco_reward import PacoReward
    from pacorl.generate.image_queue import ImageSource, Shard
    from pacorl.io.terminal import Progress


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(GeneratorOptions, JudgeOptions):
    """Options of `pacorl benchmark`; `BenchmarkSpec.takes` lists the optional part."""

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

    def image_source(self, *, edits: bool) -> ImageSource:
        """Describe the generator, without loading it."""
        from pacorl.generate.image_sources import image_source

        return image_source(
            self.model,
            kind=self.kind,
            edits=edits,
            adapter=self.adapter,
            size=self.size,
            steps=self.steps,
            memory=self.memory,
            batch=self.image_batch,
            seed=self.seed,
            **self.policy_options,
        )

    def described(self, *, edits: bool) -> dict[str, Any]:
        """Settings that change the images; of finished images, their folder."""
        if self.images:
            return {"images": str(self.images)}
        return dict(self.image_source(edits=edits).generator) | {"seed": self.seed}


GENERATOR = (
    *("model", "kind", "adapter", "size", "steps", "options", "seed"),
    *("images", "image_batch"),
)
"""Options of the benchmarks of generators, or of finished images."""
COMMON = ("judge", "memory", "out", "limit", "against", "as_json")
"""Options of every benchmark."""


Items = TypeVar("Items")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec(Generic[Items]):
    """Entry of a benchmark.

    Example:
        PAIRS = BenchmarkSpec(
            read=lambda data, options: read_pairs(data, limit=options.limit),
            build=lambda pairs, options, reward, out: PairAccuracy(pairs, reward),
        )
    """

    read: Callable[[Path, BenchmarkOptions], Items]
    """Reader of the published data, before anything heavy is loaded; it checks them."""
    build: Callable[[Items, BenchmarkOptions, PacoReward, Path], Benchmark]
    """(items, options, the judge, the run's folder) → the benchmark."""
    generate: Callable[[Items, BenchmarkOptions, Path, Shard, Progress], object] | None = None
    """Generator of a share's images that the run's folder lacks; None for benchmarks of judges."""
    all_spellings: bool = False
    """Whether P(Yes) sums every spelling of Yes and of No."""
    batch: int = 16
    """Items per call of the judge."""
    takes: tuple[str, ...] = ()
    """Further options: of `GENERATOR`, or the benchmark's own."""

    def check(self, name: str, options: BenchmarkOptions) -> None:
        """Raise UsageError for an option of other benchmarks, or if nothing is named that makes images."""
        taken_options = {*self.takes, *COMMON}
        for field in fields(options):
            if field.name not in taken_options and getattr(options, field.name) not in (field.default, []):
                raise UsageError(f"--{field.name.replace('_', '-')} is not an option of {name}")
        if self.generate and not options.makes_images:
            raise ValueError("name a generator with --model, or a folder of finished images with --images")
        if options.images and not options.images.is_dir():
            raise ValueError(f"--images {options.images}: there is no such folder")


BENCHMARKS: Table[BenchmarkSpec[Any]] = Table(
    "benchmark",
    {
        "consistency-rank": "pacorl.bench.consistency_rank:SPEC",
        "edit-reward-bench": "pacorl.bench.edit_reward_bench:SPEC",
        "vc-reward-bench": "pacorl.bench.edit_reward_bench:VC_REWARD_BENCH",
        "edit-reward-compass": "pacorl.bench.edit_reward_bench:COMPASS",
        "t2is": "pacorl.bench.t2is:SPEC",
        "gedit": "pacorl.bench.gedit:SPEC",
    },
)
