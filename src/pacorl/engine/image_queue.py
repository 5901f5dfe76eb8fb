"""Pictures that a benchmark asks a generator for: resumable, shared by processes, each with what made it.

A picture whose recipe is the wanted one is never painted again; one with another recipe is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.engine.rollout import seed_of
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes, png_text
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Paint = Callable[[Sequence[Prompt], Sequence[int]], Sequence["Image"]]
"""(prompts, seeds) → one picture each, in order."""

RECIPE = "pacorl recipe"  # the key of the PNG text


@dataclass(frozen=True, slots=True)
class Shard:
    """This process's share of the items: every `count`-th, from `index` on."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`0/4` is the first of four. Raises ValueError for others."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
            raise ValueError(f"shard {text!r} is not of the form INDEX/COUNT with INDEX from 0, e.g. 0/4")
        return cls(int(index), int(count))

    @property
    def file(self) -> str:
        return "results.jsonl" if self.count == 1 else f"results-{self.index}-of-{self.count}.jsonl"


@dataclass(frozen=True, slots=True)
class Job:
    """One picture that is wanted."""

    key: str
    prompt: Prompt
    file: str
    """Relative to the run's folder."""


@dataclass(frozen=True, slots=True)
class Studio:
    """Who paints, and how."""

    load: Callable[[], Paint]
    """Called when there is something to paint, and not before: weights are heavy."""
    generator: Mapping[str, Any]
    """Names the model, its adapter and settings: part of every recipe."""
    seed: int = 0
    batch: int = 4


def paint_missing(
    jobs: Sequence[Job],
    out: Path,
    studio: Studio,
    *,
    shard: Shard = Shard(),
    accompany: Callable[[Job, Image], None] = lambda job, image: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Paints what this shard lacks; returns how many that were.

    A picture's seed comes from (seed, its key), so neither processes nor limits change it. `accompany` writes what
    belongs to a picture; it is called first, because the picture is the sign that all is there.
    """
    mine = [job for job in jobs[shard.index :: shard.count] if not is_painted(job, out, studio)]
    paint = studio.load() if mine else None
    for start in range(0, len(mine), studio.batch):
        assert paint is not None
        part = mine[start : start + studio.batch]
        images = paint([job.prompt for job in part], [seed_of(studio.seed, job.key) for job in part])
        for job, image in zip(part, images, strict=True):
            accompany(job, image)
            write_atomic(out / job.file, png_bytes(image, {RECIPE: recipe(job, studio)}))
        progress(start + len(part), len(mine))
    return len(mine)


def is_painted(job: Job, out: Path, studio: Studio) -> bool:
    """Whether the picture is there and made by the wanted recipe."""
    return png_text(out / job.file, RECIPE) == recipe(job, studio)


def recipe(job: Job, studio: Studio) -> str:
    """What makes a picture: generator, text, sources and seed."""
    content = {"generator": dict(studio.generator), "prompt": job.prompt.text, "seed": seed_of(studio.seed, job.key)}
    sources = {"sources": [path.name for path in job.prompt.sources]} if job.prompt.sources else {}
    return json.dumps(content | sources, sort_keys=True, ensure_ascii=False)
