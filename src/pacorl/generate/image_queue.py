"""The one queue of generated images: resumable, shared by processes, each image with the recipe that made it.

An image whose recipe is still the current one is never replaced; one with another recipe is. The last bits of an image
may depend on the batch that it is sampled in, and so batches are cut from all images of a job, never from the missing
ones: a job that goes on repeats the batches of one that was never stopped.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pacorl.core.schedule import seed_of
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes, png_texts
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

GenerateImages = Callable[[Sequence[Prompt], Sequence[int]], Sequence["Image"]]
"""(prompts, seeds) → one image each, in order."""

RECIPE = "pacorl recipe"
"""The key of a recipe among the texts of a PNG."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of a job's batches that one process takes: every `count`-th, from `index` on."""

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

    def batches(self, items: Sequence[Item], *, size: int) -> list[Sequence[Item]]:
        """This process's batches of a job.

        Args:
            items: all of the job's. They are cut into batches before these are dealt, so that what is in a batch does
                not depend on the number of processes.
            size: most items of a batch.
        """
        cut = [items[start : start + size] for start in range(0, len(items), size)]
        return cut[self.index :: self.count]

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
        content = {"generator": dict(self.generator), "prompt": job.prompt.text, "seed": self.seed_of(job)}
        sources = {"sources": [path.name for path in job.prompt.sources]} if job.prompt.sources else {}
        return json.dumps(content | sources, sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class UnfinishedBatch:
    """A batch that lacks images."""

    jobs: Sequence[ImageJob]
    """All of the batch, in order."""
    missing: Sequence[ImageJob]
    """Those whose image is absent, broken, or of another recipe."""


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

    A batch that is finished in part is sampled whole. Its finished images stay as they are. If some of them come out
    with other bits than before, a warning names those of the first such batch.

    Args:
        jobs: all of the run's.
        out: its folder.
        source: what generates them.
        shard: this process's share.
        save_panels: writes what belongs to an image, such as its panels.
        progress: gets (done, total) after each batch, of the images that are sampled.

    Returns:
        How many images were missing.
    """
    batches = unfinished_batches(jobs, out, source, shard=shard)
    if not batches:
        return 0
    generate, done, total = source.load(), 0, sum(len(batch.jobs) for batch in batches)
    warned = False
    for batch in batches:
        images = generate([job.prompt for job in batch.jobs], [source.seed_of(job) for job in batch.jobs])
        image_of = dict(zip((job.file for job in batch.jobs), images, strict=True))
        # Compared before anything is written: a kill in between leaves a batch that is compared again.
        finished = [job for job in batch.jobs if job not in batch.missing]
        changed = [out / job.file for job in finished if not _equal(out / job.file, image_of[job.file])]
        if changed and not warned:
            # Once: after another --batch or --limit it may be true of every batch.
            warned = True
            logger.warning(
                "%s: kept, although the batch now comes out with other bits: another machine, software version or cut "
                "into batches made the file; delete it to replace it",
                ", ".join(map(str, changed)),
            )
        for job in batch.missing:
            # Panels first: the image with its recipe is the sign that everything of the job is on the disk.
            save_panels(job, image_of[job.file])
            write_atomic(out / job.file, png_bytes(image_of[job.file], {RECIPE: source.recipe(job)}))
        done += len(batch.jobs)
        progress(done, total)
    return sum(len(batch.missing) for batch in batches)


def unfinished_batches(
    jobs: Sequence[ImageJob], out: Path, source: ImageSource, *, shard: Shard = Shard()
) -> list[UnfinishedBatch]:
    """The batches of a shard that are not finished."""
    batches = []
    for batch in shard.batches(jobs, size=source.batch):
        missing = [job for job in batch if png_texts(out / job.file).get(RECIPE) != source.recipe(job)]
        if missing:
            batches.append(UnfinishedBatch(batch, missing))
    return batches


def missing_jobs(jobs: Sequence[ImageJob], out: Path, source: ImageSource, *, shard: Shard = Shard()) -> list[ImageJob]:
    """The jobs of a shard whose image is absent, broken, or of another recipe."""
    return [job for batch in unfinished_batches(jobs, out, source, shard=shard) for job in batch.missing]


def _equal(path: Path, image: Image) -> bool:
    """Whether a finished image has the pixels of one that was sampled again."""
    finished, again = open_image(path), image.convert("RGB")
    return finished.size == again.size and finished.tobytes() == again.tobytes()
