"""The one queue of generated images: resumable, shared by processes, each image with the recipe that made it.

An image whose recipe is still the current one is never generated again; one with another recipe is replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.core.schedule import seed_of
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes, png_texts
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

GenerateImages = Callable[[Sequence[Prompt], Sequence[int]], Sequence["Image"]]
"""(prompts, seeds) → one image each, in order."""

# The key of the PNG text: images of the first edition carry it.
RECIPE = "pacorl recipe"


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of the items that one process takes: every `count`-th, from `index` on."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"shard {self.index} of {self.count} does not exist; shards count from 0 to {self.count - 1}"
            )

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`0/4` is the first of four.

        Raises:
            ValueError: if the text is of another form, or names a shard that does not exist.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"shard {text!r} is not of the form INDEX/COUNT with INDEX from 0, e.g. 0/4")
        return cls(int(index), int(count))

    @property
    def file(self) -> str:
        return "results.jsonl" if self.count == 1 else f"results-{self.index}-of-{self.count}.jsonl"


@dataclass(frozen=True, slots=True)
class ImageJob:
    """One image to be generated."""

    key: str
    """Names the image in its run, and with the source's seed its noise."""
    prompt: Prompt
    file: str
    """Relative to the run's folder."""
    seed: int | None = None
    """None for the seed that follows from the source's and the key."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A generator that is not loaded yet, and what its images depend on."""

    load: Callable[[], GenerateImages]
    """Called only if an image is missing: weights are heavy."""
    generator: Mapping[str, Any]
    """Names the model, its adapter and its settings: a part of every recipe."""
    seed: int = 0
    batch: int = 4

    def seed_of(self, job: ImageJob) -> int:
        return seed_of(self.seed, job.key) if job.seed is None else job.seed

    def recipe(self, job: ImageJob) -> str:
        """What an image depends on, as its PNG text: generator, prompt, source images and seed."""
        # Keys and their order are those of the first edition: half-finished folders go on without a second pass.
        content = {"generator": dict(self.generator), "prompt": job.prompt.text, "seed": self.seed_of(job)}
        sources = {"sources": [path.name for path in job.prompt.sources]} if job.prompt.sources else {}
        return json.dumps(content | sources, sort_keys=True, ensure_ascii=False)


def generate_missing(
    jobs: Sequence[ImageJob],
    out: Path,
    source: ImageSource,
    *,
    shard: Shard = Shard(),
    save_panels: Callable[[ImageJob, Image], None] = lambda job, image: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Generate the images that this shard lacks, a batch at a time.

    Args:
        jobs: all of the run's.
        out: its folder.
        source: what generates them.
        shard: this process's share.
        save_panels: writes what belongs to an image, such as its panels.
        progress: gets (done, total) after each batch.

    Returns:
        How many images were missing.
    """
    missing = missing_jobs(jobs, out, source, shard=shard)
    if not missing:
        return 0
    generate = source.load()
    for start in range(0, len(missing), source.batch):
        batch = missing[start : start + source.batch]
        images = generate([job.prompt for job in batch], [source.seed_of(job) for job in batch])
        for job, image in zip(batch, images, strict=True):
            # Panels first: the image with its recipe is the sign that everything of the job is on the disk.
            save_panels(job, image)
            write_atomic(out / job.file, png_bytes(image, {RECIPE: source.recipe(job)}))
        progress(start + len(batch), len(missing))
    return len(missing)


def missing_jobs(jobs: Sequence[ImageJob], out: Path, source: ImageSource, *, shard: Shard = Shard()) -> list[ImageJob]:
    """The jobs of a shard whose image is absent, broken, or of another recipe."""
    # The shard is cut from all jobs, not from the missing ones: another process may finish some in the meantime.
    return [
        job for job in jobs[shard.index :: shard.count] if png_texts(out / job.file).get(RECIPE) != source.recipe(job)
    ]
