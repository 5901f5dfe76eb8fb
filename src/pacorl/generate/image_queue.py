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
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pacorl.config.options import GeneratorOptions, packed_form
from pacorl.core.batches import in_batches
from pacorl.core.schedule import seed_of
from pacorl.io.documents import JsonObject
from pacorl.io.files import digest, write_atomic
from pacorl.io.images import png_bytes, png_texts
from pacorl.io.quiet import quiet_loading
from pacorl.io.terminal import Progress, silent
from pacorl.models.policies import POLICIES, kind_of
from pacorl.models.policies.spec import NO_ADAPTER
from pacorl.types import TINY, Prompt

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
    unfinished = []
    total = done = 0
    for batch in batches:
        if any(job.file in missing for job in batch):
            unfinished.append(batch)
            total += len(batch)
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


def image_source(
    options: GeneratorOptions, *, edits: bool | None = None, memory: str = "normal", batch: int = 4
) -> ImageSource:
    """Describe a generator by any name, without loading it.

    Args:
        options: an adapter is in a recipe by its content, and a size is that of every image, not the records' own.
        edits: whether it must edit images, or generate sets; None for either.
        memory: see `Generator.from_pretrained`.

    Raises:
        ValueError: the kind has the other purpose, or no such option.
    """
    from pacorl.models.lora import adapter_file

    # Resolve the defaults of the kind.
    checkpoint, size, steps = options.model, options.size, options.steps
    kind = options.kind or kind_of(checkpoint, edits=bool(edits))
    spec = POLICIES.named(kind)
    if edits is not None and not (spec.edits if edits else spec.sets):
        raise ValueError(f"{checkpoint} is of kind {kind!r}, which {'makes sets' if edits else 'edits images'}")
    dtype = "float32" if checkpoint == TINY else "bfloat16"
    policy_options = options.policy_options
    settings = spec.options_for(checkpoint, dtype=dtype, **policy_options)

    # Describe the settings that change an image.
    description: JsonObject = {"checkpoint": checkpoint, "steps": steps}
    for name in ("guidance_scale", "max_sequence_length"):
        if hasattr(settings, name):
            description[name] = getattr(settings, name)
    for name, value in policy_options.items():
        if value is not None:
            description[name] = value
    description |= {"dtype": dtype, **packed_form(memory)}
    if size:
        description["size"] = str(size)
    # The base, unless an adapter is named: the tiny generator's own would make a benchmark of something else.
    adapter = options.adapter or NO_ADAPTER
    adapters = spec.adapters_of(checkpoint, {adapter: 1.0})
    for name in adapters:
        description["adapter"] = digest(adapter_file(spec.adapter_source(checkpoint, name)))
    if edits:
        description["kind"] = kind

    # Loaded late: a folder without missing images needs no weights.
    def load() -> GenerateImages:
        spec.check_source(checkpoint, adapters=adapters)  # before torch is imported
        quiet_loading()
        import torch

        from pacorl.generate.generator import Generator

        # Under torchrun each process uses its own GPU; without a rank, the usual choice.
        rank = os.environ.get("LOCAL_RANK")
        device = f"cuda:{rank}" if rank and torch.cuda.is_available() else ""
        names = {"kind": kind, "adapter": adapter, "dtype": dtype, "memory": memory, "device": device}
        generator = Generator.from_pretrained(checkpoint, **names, **policy_options)
        # Not in the recipe: each image has its own seed, so a batch changes speed and at most last bits.
        generator.batch = batch
        return partial(generator.sample, size=size, steps=steps)

    return ImageSource(load, description, seed=options.seed, batch=batch)
