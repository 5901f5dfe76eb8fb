"""Options of `pacorl benchmark`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pacorl.config.options import LARGEST, GeneratorOptions, JudgeOptions, inherited, option


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions(GeneratorOptions, JudgeOptions):
    """Options of `pacorl benchmark`; `suite.Benchmark.takes` lists the optional part."""

    panel: ClassVar[str] = "Run"

    out: Path | None = option(None, "The folder of this run; runs/bench/NAME if left out.")
    limit: int | None = option(None, "At most so many items, evenly spread over the data.", min=1, max=LARGEST)
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
            return f"{self.model} + {self.adapter}" if self.adapter else self.model
        return self.judge.partition("#")[2] or self.judge


GENERATOR = ("model", "kind", "adapter", "size", "steps", "options", "seed", "images", "image_batch")
"""Options of the benchmarks of generators, or of finished images."""
