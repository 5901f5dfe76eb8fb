"""Generates several grids per prompt (`pacorl dataset generate`), going on where an earlier call stopped.

The engine's image queue does the work: every grid carries its recipe, and several processes may share the prompts. The
last process to finish lists the grids.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import PromptRecord, read_prompts
from pacorl.engine.image_queue import GenerateImages, ImageJob, ImageSource, Shard, generate_missing, missing_jobs
from pacorl.io.documents import write_jsonl
from pacorl.io.files import digest
from pacorl.types import Size


def generate(
    folder: Path,
    source: ImageSource,
    *,
    grids: int = 4,
    prompts: str = "diverse.jsonl",
    shard: Shard = Shard(),
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Generates the grids that this shard lacks; lists all in grids.jsonl as soon as none is missing.

    Args:
        source: the generator; a dry run does not load it.
        grids: how many per prompt.
        prompts: the prompts file inside the folder.

    Returns:
        How many grids there are to be, how many were generated (or would be), and how many other shards still owe.
    """
    jobs = grid_jobs(read_prompts(folder / prompts), grids=grids, seed=source.seed)
    if dry_run:
        return {"grids": len(jobs), "to_generate": len(missing_jobs(jobs, folder, source, shard=shard))}
    generated = generate_missing(jobs, folder, source, shard=shard, progress=progress)
    missing = len(missing_jobs(jobs, folder, source))
    if not missing:
        _list_grids(folder, jobs, source, prompts=prompts)
    return {"grids": len(jobs), "generated": generated, "missing": missing}


def grid_jobs(records: Sequence[PromptRecord], *, grids: int, seed: int) -> list[ImageJob]:
    """One job per grid, prompt by prompt; its key is GROUP/NUMBER."""
    return [
        ImageJob(
            f"{record.idx}/{number}",
            record.prompt,
            f"grids/{record.idx}/{number}.png",
            _grid_seed(seed, record.idx, number),
        )
        for record in records
        for number in range(grids)
    ]


def _grid_seed(seed: int, idx: str, number: int) -> int:
    """The seed of a grid depends on (seed, prompt, number) alone: on no other prompt, and no process."""
    return int.from_bytes(sha256(f"{seed}\n{idx}\n{number}".encode()).digest()[:7], "big")


def _list_grids(folder: Path, jobs: Sequence[ImageJob], source: ImageSource, *, prompts: str) -> None:
    rows = []
    for job in jobs:
        group, _, number = job.key.rpartition("/")
        row = {"group": group, "number": int(number), "file": job.file, "seed": source.seed_of(job)}
        rows.append(row | {"sha256": digest(folder / job.file)})
    write_jsonl(folder / "grids.jsonl", rows)
    options = {"generator": dict(source.generator)}
    step = DatasetStep(folder, "generate", inputs=[folder / prompts], options=options, seed=source.seed)
    step.finish(outputs=[folder / "grids.jsonl"], counts={"grids": len(jobs)})


# --- the generator -----------------------------------------------------------------------------------------------

RECIPE_KEYS = {"guidance_scale": "guidance", "max_sequence_length": "text_tokens"}
"""Option → its key in a recipe: the first edition's, so that the grids of its folders stay valid."""


def image_source(
    checkpoint: str,
    *,
    kind: str = "",
    adapter: str = "",
    size: Size | None = None,
    steps: int = 20,
    dtype: str = "",
    batch: int = 4,
    seed: int = 0,
    **options: Any,
) -> ImageSource:
    """A generator by any name, described but not loaded.

    Args:
        checkpoint: a diffusers folder, a hub name, or "tiny".
        kind: of POLICIES; found out from the checkpoint if empty.
        adapter: a LoRA in any form; a recipe names it by its content.
        size: for every prompt; None for the records' own.
        dtype: float32 or bfloat16; bfloat16 if empty, unless the checkpoint is tiny.
        batch: grids at a time.
        seed: of the whole data set.
        options: of the kind by name, such as guidance_scale; None for the checkpoint's default.

    Raises:
        ValueError: for an unknown kind, an option that the kind does not take, or an adapter that is missing.
    """
    from pacorl.engine.generator import Generator
    from pacorl.lora.formats import adapter_file
    from pacorl.policies import POLICIES, kind_of
    from pacorl.types import TINY

    kind = kind or kind_of(checkpoint)
    dtype = dtype or ("float32" if checkpoint == TINY else "bfloat16")
    settings = POLICIES.named(kind).options_for(checkpoint, dtype=dtype, **options)
    recorded = {key: getattr(settings, name) for name, key in RECIPE_KEYS.items() if hasattr(settings, name)}
    recorded |= {name: value for name, value in options.items() if name not in RECIPE_KEYS and value is not None}
    description: dict[str, Any] = {"checkpoint": checkpoint, "steps": steps, **recorded, "dtype": dtype}
    description |= {"size": str(size)} if size else {}
    description |= {"adapter": digest(adapter_file(adapter))} if adapter else {}

    def load() -> GenerateImages:
        generator = Generator.load(checkpoint, kind=kind, adapter=adapter, dtype=dtype, **options)
        generator.batch = batch
        return lambda prompts, seeds: generator.sample(prompts, seeds, size=size, steps=steps)

    return ImageSource(load, description, seed=seed, batch=batch)
