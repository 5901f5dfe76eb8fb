"""The benchmarks: a table of specs, their common options, and the contents of an entry.

A new benchmark is one file with a `BenchmarkSpec`, and one line of `BENCHMARKS`: the command `pacorl benchmark NAME`,
its help, its tables and the contract tests come from the entry. This file imports no heavy package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pacorl.config.options import LARGEST, GeneratorOptions, JudgeOptions, inherited, option
from pacorl.config.table import Table

if TYPE_CHECKING:
    from pacorl.bench.suite import Benchmark
    from pacorl.generate.image_queue import ImageSource, Shard
    from pacorl.io.terminal import Progress


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(JudgeOptions):
    """Options of every benchmark; a benchmark of judges measures the judge itself."""

    panel: ClassVar[str] = "Run"

    out: Path | None = option(None, "The folder of this run; runs/bench/NAME if left out.")
    limit: int | None = option(None, "At most so many items, evenly spread over the data.", least=1, most=LARGEST)
    batch: int = option(16, "Items per call of the judge.", least=1, most=LARGEST)
    against: Path | None = option(None, "The folder of another run on the same data, for paired differences.")
    as_json: bool = option(False, "Print JSON.", flags=("--json",))

    @property
    def needs_judge(self) -> bool:
        """Whether a judge is loaded."""
        return True

    @property
    def dealt(self) -> int:
        """Number of items dealt to a process at a time."""
        return self.batch

    @property
    def subject(self) -> str:
        """Name of the measured model, for the tables."""
        return self.judge.partition("#")[2] or self.judge

    @property
    def subject_adapter(self) -> str:
        """Folder of the measured judge or adapter, if it has one; its run must not have been trained on the items."""
        return self.judge


@dataclass(frozen=True, kw_only=True)
class GeneratorBenchmarkOptions(GeneratorOptions, BenchmarkOptions):
    """Options of the benchmarks of generators, or of finished images."""

    panel: ClassVar[str] = "Generator"

    model: str = inherited(GeneratorOptions, "model", default="", help="A diffusers folder, a hub name, or tiny.")
    images: Path | None = option(None, "A folder of finished images; nothing is generated then.")
    image_batch: int = option(4, "Images per forward.", least=1, most=LARGEST)
    generate_only: bool = option(False, "Generate this share and judge nothing.")

    def __post_init__(self) -> None:
        if not self.model and not self.images:
            raise ValueError("name a generator with --model, or a folder of finished images with --images")
        if self.images and not self.images.is_dir():
            raise ValueError(f"--images {self.images}: there is no such folder")

    @property
    def dealt(self) -> int:
        # A process judges the images that it generates.
        return self.image_batch

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

    @property
    def subject(self) -> str:
        return str(self.images) if self.images else " + ".join(filter(None, (self.model, self.adapter)))

    @property
    def subject_adapter(self) -> str:
        return self.adapter


Options = TypeVar("Options", bound=BenchmarkOptions)
Items = TypeVar("Items")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSpec(Generic[Options, Items]):
    """Entry of a benchmark.

    Example:
        PAIRS = BenchmarkSpec(
            summary="Does a judge distinguish matching pairs?",
            data="A JSONL of pairs.",
            options=BenchmarkOptions,
            read=lambda data, options: read_pairs(data, limit=options.limit),
            build=lambda pairs, options, reward, out: PairAccuracy(pairs, reward),
        )
    """

    summary: str
    """Line of the command's help."""
    data: str
    """Help of the argument DATA."""
    options: type[Options]
    read: Callable[[Path, Options], Items]
    """Reader of the published data, before anything heavy is loaded; it checks them."""
    build: Callable[[Items, Options, Any, Path], Benchmark]
    """(items, options, the `PacoReward` or None if no judge is needed, the run's folder) → the benchmark."""
    generate: Callable[[Items, Options, Path, Shard, Progress], object] | None = None
    """Generator of a share's images that the run's folder lacks; None for benchmarks of judges."""
    all_spellings: bool = False
    """Whether P(Yes) sums every spelling of Yes and of No."""


BENCHMARKS: Table[BenchmarkSpec[Any, Any]] = Table(
    "benchmark",
    {
        "consistency-rank": "pacorl.bench.consistency_rank:SPEC",
        "edit-reward-bench": "pacorl.bench.edit_reward_bench:SPEC",
        "t2is": "pacorl.bench.t2is:SPEC",
        "gedit": "pacorl.bench.gedit:SPEC",
    },
)
