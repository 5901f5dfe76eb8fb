"""Resumable queue of generated images, shared by processes; each image contains its recipe.

An image with the current recipe is never replaced; an image with another recipe is. The last bits of an image may
depend on its batch, so batches are cut from all images of a job, not from the missing images: a resumed job repeats the
batches of an uninterrupted job.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pacorl.core.batches import in_batches
from pacorl.core.schedule import seed_of
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes, png_texts
from pacorl.io.terminal import Progress, silent
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Item = TypeVar("Item")

GenerateImages = Callable[[Sequence[Prompt], Sequence[int]], Sequence["Image"]]
"""(prompts, seeds) → one image each, in order."""

RECIPE = "pacorl recipe"
"""The key of a recipe among the texts of a PNG."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One process's share of a job's batches: every `count`-th, from `index` on."""

    index: int = 0
    count: int = 1

    @classmethod
    def of_process(cls) -> Shard:
        """Return the share of this process by torchrun's rank; all of it without torchrun."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    def batches(self, items: Sequence[Item], *, size: int) -> list[Sequence[Item]]:
        """Return this process's batches of a job.

        Args:
            items: all items of the job. Batches are cut before they are dealt, so that their contents do not depend on
                the number of processes.
            size: maximum number of items in a batch.
        """
        return in_batches(items, size)[self.index :: self.count]

    @property
    def file(self) -> str:
        """File of this process's results. The first one's is that of a single process, which locks the same."""
        return f"results-{self.index}.jsonl" if self.index else "results.jsonl"


@dataclass(frozen=True, slots=True)
class ImageJob:
    """One image to be generated."""

    key: str
    """The image's name in its run; with the source's seed it determines the noise."""
    prompt: Prompt
    file: str
    """Relative to the run's folder."""
    seed: int | None = None
    """Seed of the noise; None to derive it from the source's seed and the key."""


@dataclass(frozen=True, slots=True)
class ImageSource:
    """A lazily loaded generator and the inputs of its recipes."""

    load: Callable[[], GenerateImages]
    """Loader of the generator, called only if an image is missing: weights are heavy."""
    generator: Mapping[str, Any]
    """The model's name, its adapter and settings, as part of every recipe."""
    seed: int = 0
    batch: int = 4

    def seed_of(self, job: ImageJob) -> int:
        if job.seed is None:
            return seed_of(self.seed, job.key)
        return job.seed

    def recipe(self, job: ImageJob) -> str:
        """Return the recipe of an image as its PNG text: generator, prompt, source images, references and seed."""
        content = {"generator": dict(self.generator), "prompt": job.prompt.text, "seed": self.seed_of(job)}
        if job.prompt.sources:
            # Names without their folders: a moved data set keeps its recipes.
            content["sources"] = [path.name for path in job.prompt.sources]
        if job.prompt.references:
            content["references"] = [path.name for path in job.prompt.references]
        return json.dumps(content, sort_keys=True, ensure_ascii=False)


def generate_missing(
    jobs: Sequence[ImageJob],
    out: Path,
    source: ImageSource,
    *,
    shard: Shard = Shard(),
    save_panels: Callable[[ImageJob, Image], None] = lambda job, image: None,
    progress: Progress = silent,
) -> int:
    """Generate this shard's missing images, batch by batch; return their number.

    A partly finished batch is sampled whole, and its finished images stay.

    Args:
        save_panels: writes further files of an image, such as its panels.
        progress: callback with (done, total) sampled images after each batch.
    """
    batches = shard.batches(jobs, size=source.batch)
    missing = {job.file for job in missing_images(list(chain(*batches)), out, source)}
    if not missing:
        return 0

    # The weights load only if an image is missing.
    generate = source.load()
    unfinished = [batch for batch in batches if any(job.file in missing for job in batch)]
    total = sum(map(len, unfinished))
    done = 0
    for batch in unfinished:
        images = generate([job.prompt for job in batch], [source.seed_of(job) for job in batch])
        for job, image in zip(batch, images, strict=True):
            if job.file in missing:
                # Panels first: an image with its recipe marks its job as complete.
                save_panels(job, image)
                write_atomic(out / job.file, png_bytes(image, {RECIPE: source.recipe(job)}))
        done += len(batch)
        progress(done, total)
    return len(missing)


def missing_images(jobs: Sequence[ImageJob], out: Path, source: ImageSource) -> list[ImageJob]:
    """List the jobs whose image is absent, broken, or of another recipe."""
    # By the recipe inside the file, not by the file's existence.
    return [job for job in jobs if png_texts(out / job.file).get(RECIPE) != source.recipe(job)]
