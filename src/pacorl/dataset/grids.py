"""Grids of every prompt are generated (`pacorl dataset generate`), cut and combined into questions (`pair`).

The engine's image queue generates: every grid carries its recipe, an interrupted call goes on, and several processes
may share the prompts; the last to finish lists the grids.

For every sub-figure of every grid as the reference, and for every other position, the candidates are the sub-figures
at that position in all grids of the prompt (arXiv 2512.04784, §3.1): 4 grids of 2×2 give 16 × 3 = 48 instances, and
708 prompts 33,984.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from typing import Any

from pacorl.config.options import packed_form
from pacorl.core.grid import shared_text, split
from pacorl.dataset.folder import Instance, PromptRecord, read_prompts, write_records
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.generate.image_queue import (
    GenerateImages,
    ImageJob,
    ImageSource,
    Shard,
    generate_missing,
    missing_jobs,
    unfinished_batches,
)
from pacorl.io.documents import blamed_on, read_jsonl, write_jsonl
from pacorl.io.files import digest, flush_all, inside, write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.io.quiet import quiet_loading
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

    Returns:
        How many grids there are to be, how many were generated, and how many other shards still owe. Of a dry run: how
        many would be generated, and how many finished ones would be sampled again to repeat their batches.
    """
    jobs = grid_jobs(read_prompts(folder / prompts), grids=grids, seed=source.seed)
    if dry_run:
        batches = unfinished_batches(jobs, folder, source, shard=shard)
        missing = sum(len(batch.missing) for batch in batches)
        repeated = sum(len(batch.jobs) for batch in batches) - missing
        return {"grids": len(jobs), "to_generate": missing, "to_repeat": repeated}
    generated = generate_missing(jobs, folder, source, shard=shard, progress=progress)
    missing = len(missing_jobs(jobs, folder, source))
    if not missing:  # of all shards: the last process to finish lists them
        write_jsonl(folder / "grids.jsonl", [_grid_row(folder, job, seed=source.seed_of(job)) for job in jobs])
        options = {"generator": dict(source.generator)}
        step = DatasetStep(folder, "generate", inputs=[folder / prompts], options=options, seed=source.seed)
        step.finish(outputs=[folder / "grids.jsonl"], counts={"grids": len(jobs)})
    return {"grids": len(jobs), "generated": generated, "missing": missing}


def _grid_row(folder: Path, job: ImageJob, *, seed: int) -> dict[str, Any]:
    group, _, number = job.key.rpartition("/")
    row = {"group": group, "number": int(number), "file": job.file, "seed": seed}
    return row | {"sha256": digest(folder / job.file)}


def grid_jobs(records: Sequence[PromptRecord], *, grids: int, seed: int) -> list[ImageJob]:
    """One job per grid, prompt by prompt; its key is GROUP/NUMBER."""
    jobs = []
    for record in records:
        for number in range(grids):
            # Of (seed, prompt, number) alone: the same noise whatever the other prompts, shards and batches.
            hashed = sha256(f"{seed}\n{record.idx}\n{number}".encode()).digest()
            # 56 bits, which torch's generators take and JSON keeps.
            key, own_seed = f"{record.idx}/{number}", int.from_bytes(hashed[:7], "big")
            jobs.append(ImageJob(key, record.prompt, f"grids/{key}.png", own_seed))
    return jobs


def image_source(
    checkpoint: str,
    *,
    kind: str = "",
    adapter: str = "",
    size: Size | None = None,
    steps: int = 20,
    dtype: str = "",
    memory: str = "normal",
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
        memory: as of `Generator.from_pretrained`.
        options: of the kind by name, such as guidance_scale; None for the checkpoint's default.
    """
    from pacorl.models.lora.formats import adapter_file
    from pacorl.models.policies import POLICIES, kind_of
    from pacorl.types import TINY

    kind = kind or kind_of(checkpoint)
    dtype = dtype or ("float32" if checkpoint == TINY else "bfloat16")
    settings = POLICIES.named(kind).options_for(checkpoint, dtype=dtype, **options)
    defaults = ("guidance_scale", "max_sequence_length")
    recorded = {name: getattr(settings, name) for name in defaults if hasattr(settings, name)}
    recorded |= {name: value for name, value in options.items() if value is not None}
    description: dict[str, Any] = {"checkpoint": checkpoint, "steps": steps, **recorded, "dtype": dtype}
    description |= packed_form(memory) | ({"size": str(size)} if size else {})
    description |= {"adapter": digest(adapter_file(adapter))} if adapter else {}

    def load() -> GenerateImages:
        from pacorl.generate.generator import Generator

        quiet_loading()
        generator = Generator.from_pretrained(
            checkpoint, kind=kind, adapter=adapter, dtype=dtype, memory=memory, **options
        )
        # Not in the recipe: each image has a seed of its own, so a batch changes speed and at most last bits.
        generator.batch = batch
        return lambda prompts, seeds: generator.sample(prompts, seeds, size=size, steps=steps)

    return ImageSource(load, description, seed=seed, batch=batch)


def panel_path(group: str, grid: int, position: int) -> str:
    """Where sub-figure `position` of grid `grid` lies, relative to the dataset (the released benchmark's naming)."""
    return f"images/{group}/{grid}_{position}.png"


def instances_of(record: PromptRecord, *, grids: int) -> Iterator[Instance]:
    """Every instance of one prompt: `grids` × positions × (positions − 1)."""
    prompt, positions = record.prompt, record.prompt.grid.count
    if grids < 2 or positions < 2:
        few = f"{record.idx}: {grids} grids of {prompt.grid}"
        raise ValueError(f"{few} give nothing to rank; at least two of each are needed")
    for grid in range(grids):
        for position, other in permutations(range(positions), 2):
            yield Instance(
                id=f"{record.idx}:{grid}_{position}:{other}",
                group=record.idx,
                reference=panel_path(record.idx, grid, position),
                candidates=tuple(panel_path(record.idx, candidate, other) for candidate in range(grids)),
                theme=shared_text(prompt.text),
                category=prompt.category,
                task=prompt.task,
                criteria=prompt.criteria,
            )


def pair(
    folder: Path, *, prompts: str = "diverse.jsonl", dry_run: bool = False, progress: Progress = silent
) -> dict[str, int]:
    """Cuts every grid that grids.jsonl lists, and writes instances.jsonl.

    Raises:
        ValueError: for a prompt without grids, or a grid that is missing, changed, no image, or too small to cut.
    """
    records = read_prompts(folder / prompts)
    grids = grids_of(folder)
    absent = [record.idx for record in records if record.idx not in grids]
    if absent:
        raise ValueError(
            f"{len(absent)} prompts have no grids yet, {absent[0]} first; run `pacorl dataset generate` to the end"
        )
    instances = [instance for record in records for instance in instances_of(record, grids=len(grids[record.idx]))]
    panels = sum(len(grids[record.idx]) * record.prompt.grid.count for record in records)
    counts = {"prompts": len(records), "panels": panels, "instances": len(instances)}
    target = folder / "instances.jsonl"
    step = DatasetStep(folder, "pair", inputs=[folder / prompts, folder / "grids.jsonl"])
    # The manifest vouches for the instances, not for the panels, which a copied folder may lack: these are looked for.
    references = {instance.reference for instance in instances}
    if dry_run or (step.counts_if_done() == counts and all((folder / name).is_file() for name in references)):
        return counts
    for done, record in enumerate(records, 1):
        for number, name in enumerate(grids[record.idx]):
            cut(folder, name, record, number)
        progress(done, len(records))
    flush_all(folder / "images")  # before the manifest vouches for them; a wait for each would be most of the time
    write_records(target, instances)
    return step.finish(outputs=[target], counts=counts)


def grids_of(folder: Path) -> dict[str, list[str]]:
    """group → its grids' files in order, as grids.jsonl lists them."""
    path, files_of = folder / "grids.jsonl", dict[str, dict[int, str]]()
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        if not {"group", "number", "file", "sha256"} <= row.keys():
            raise ValueError(f"{where}: a grid has group, number, file and sha256, this has {', '.join(row)}")
        if digest(inside(folder, row["file"])) != row["sha256"]:
            raise ValueError(
                f"{folder / row['file']} is not the image that was generated; run `pacorl dataset generate` again"
            )
        files = files_of.setdefault(row["group"], {})
        if row["number"] in files:
            raise ValueError(f"{where}: grid {row['number']} of {row['group']!r} is already taken by an earlier record")
        files[row["number"]] = row["file"]
    return {group: [files[number] for number in sorted(files)] for group, files in files_of.items()}


def cut(folder: Path, name: str, record: PromptRecord, number: int) -> None:
    """Writes the sub-figures of one grid; equal ones on the disk stay untouched.

    They may be on the disk only later: one that is torn or empty after a power cut is not equal, and is written again.
    """
    image = open_image(folder / name)
    with blamed_on(folder / name):
        panels = split(image, record.prompt.grid)
    for position, panel in enumerate(panels):
        path, content = folder / panel_path(record.idx, number, position), png_bytes(panel)
        # Rewriting an equal panel would change its time stamp, and with it what a backup or a server copies again.
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content, flush=False)
