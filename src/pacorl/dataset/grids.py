"""Generate grids of every prompt (`pacorl dataset generate`), cut and combine them into questions (`pair`).

The image queue generates: every grid carries its recipe, an interrupted call continues, and several processes may
share the prompts; the last to finish lists the grids.

For every sub-figure of every grid as the reference, and for every other position, the candidates are the sub-figures
at that position in all grids of the prompt (arXiv 2512.04784, §3.1): 4 grids of 2×2 give 16 × 3 = 48 instances, and
708 prompts 33,984.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from random import Random
from typing import Any

from pacorl.config.options import check_previous, packed_form
from pacorl.core.grid import shared_text, split
from pacorl.dataset.folder import Instance, PromptRecord, read_prompts, write_records
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.generate.image_queue import (
    GenerateImages,
    ImageJob,
    ImageSource,
    Shard,
    generate_missing,
    unfinished_batches,
)
from pacorl.generate.separate import panel_prompts, sample_separately
from pacorl.io.documents import JsonObject, blamed_on, read_jsonl, write_jsonl
from pacorl.io.files import digest, flush_all, inside, write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.io.quiet import quiet_loading
from pacorl.models.policies import POLICIES, kind_of
from pacorl.records.prompts import evenly_spread
from pacorl.tiny.words import check_tiny_grid
from pacorl.types import TINY, Size


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
    """Generate the missing grids of this shard; list all in grids.jsonl as soon as none is missing.

    Returns:
        The number of grids in all, generated now, and missing (of other shards). For a dry run: the number to
        generate, and the number of finished grids to sample again to repeat their batches.

    Raises:
        ValueError: a prompt has a layout that the tiny generator does not make, or no text for each separate panel.
    """
    records = read_prompts(folder / prompts)
    options = source.generator
    for record in records:
        with blamed_on(f"{folder / prompts}, prompt {record.idx}"):
            if options.get("separate"):
                limit = POLICIES[options["kind"]].policy.max_references
                panel_prompts(record.prompt, options["checkpoint"], limit, previous=options["previous"])
            # The tiny generator draws its own layout whatever the prompt says, and `pair` would cut that wrongly.
            elif options.get("checkpoint") == TINY:
                check_tiny_grid(record.prompt.grid, record.prompt.grid.count)

    # Generate this shard's grids.
    jobs = grid_jobs(records, grids=grids, seed=source.seed)
    # A dry run loads no generator.
    if dry_run:
        batches = unfinished_batches(jobs, folder, source, shard=shard)
        missing = sum(len(batch.missing) for batch in batches)
        repeated = sum(len(batch.jobs) for batch in batches) - missing
        return {"grids": len(jobs), "to_generate": missing, "to_repeat": repeated}
    generated = generate_missing(jobs, folder, source, shard=shard, progress=progress)
    missing = sum(len(batch.missing) for batch in unfinished_batches(jobs, folder, source))
    # Only the last process to finish lists the grids of all shards.
    if not missing:
        rows = []
        for job in jobs:
            group, _, number = job.key.rpartition("/")
            row = {"group": group, "number": int(number), "file": job.file, "seed": source.seed_of(job)}
            rows.append(row | {"sha256": digest(folder / job.file)})
        write_jsonl(folder / "grids.jsonl", rows)
        # The manifest marks the step as done.
        options = {"generator": dict(source.generator)}
        step = DatasetStep(folder, "generate", inputs=[folder / prompts], options=options, seed=source.seed)
        step.finish(outputs=[folder / "grids.jsonl"], counts={"grids": len(jobs)})
    return {"grids": len(jobs), "generated": generated, "missing": missing}


def grid_jobs(records: Sequence[PromptRecord], *, grids: int, seed: int) -> list[ImageJob]:
    """One job per grid, prompt by prompt; its key is GROUP/NUMBER."""
    jobs = []
    for record in records:
        for number in range(grids):
            # A hash of (seed, prompt, number): the same noise whatever the other prompts, shards and batches.
            hashed = sha256(f"{seed}\n{record.idx}\n{number}".encode()).digest()
            # 56 bits, which torch's generators take and JSON keeps.
            key = f"{record.idx}/{number}"
            own_seed = int.from_bytes(hashed[:7], "big")
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
    separate: bool = False,
    previous: bool = False,
    **options: Any,
) -> ImageSource:
    """Describe a generator by any name, without loading it.

    Args:
        checkpoint: a diffusers folder, a hub name, or "tiny".
        kind: a key of POLICIES; detected from the checkpoint if empty.
        adapter: a LoRA in any form; a recipe identifies it by its content.
        size: for every prompt, of a panel if they are separate; None for the records' own.
        dtype: float32 or bfloat16; bfloat16 if empty, unless the checkpoint is tiny.
        memory: see `Generator.from_pretrained`.
        separate: whether each panel is generated as an image of its own.
        previous: with `separate`, whether each panel has the one before it as a reference.
        options: of the kind by name, such as guidance_scale; None for the checkpoint's default.
    """
    from pacorl.models.lora import adapter_file

    check_previous(separate=separate, previous=previous)

    # Resolve the defaults of the kind.
    kind = kind or kind_of(checkpoint)
    dtype = dtype or ("float32" if checkpoint == TINY else "bfloat16")
    settings = POLICIES.named(kind).options_for(checkpoint, dtype=dtype, **options)

    # Describe the settings that change an image.
    description: JsonObject = {"checkpoint": checkpoint, "steps": steps}
    for name in ("guidance_scale", "max_sequence_length"):
        if hasattr(settings, name):
            description[name] = getattr(settings, name)
    for name, value in options.items():
        if value is not None:
            description[name] = value
    description |= {"dtype": dtype, **packed_form(memory)}
    if size:
        description["size"] = str(size)
    if adapter:
        description["adapter"] = digest(adapter_file(adapter))
    if separate:
        description |= {"kind": kind, "separate": True, "previous": previous}

    # Loaded late: a folder without missing images needs no weights.
    def load() -> GenerateImages:
        from pacorl.generate.generator import Generator

        quiet_loading()
        generator = Generator.from_pretrained(
            checkpoint, kind=kind, adapter=adapter, dtype=dtype, memory=memory, **options
        )
        # Not in the recipe: each image has its own seed, so a batch changes speed and at most last bits.
        generator.batch = batch
        sample = partial(sample_separately, generator, previous=previous) if separate else generator.sample
        return lambda prompts, seeds: sample(prompts, seeds, size=size, steps=steps)

    return ImageSource(load, description, seed=seed, batch=batch)


def panel_path(group: str, grid: int, position: int) -> str:
    """Path of sub-figure `position` of grid `grid` in the dataset folder (the released benchmark's naming)."""
    return f"images/{group}/{grid}_{position}.png"


def instances_of(record: PromptRecord, *, grids: int) -> Iterator[Instance]:
    """Yield every instance of one prompt: `grids` × positions × (positions − 1)."""
    prompt = record.prompt
    positions = prompt.grid.count
    if grids < 2 or positions < 2:
        few = f"{record.idx}: {grids} grids of {prompt.grid}"
        raise ValueError(f"{few} give nothing to rank; at least two of each are needed")
    # Each sub-figure as the reference, against every other position of all grids.
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
    folder: Path,
    *,
    prompts: str = "diverse.jsonl",
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Cut every grid of grids.jsonl, and write instances.jsonl.

    Args:
        limit: the number of questions at most, evenly spread over the prompts.

    Raises:
        ValueError: a prompt has no grids, or a grid is missing, changed, no image, or too small to cut.
    """
    # Read the grids of all prompts.
    records = read_prompts(folder / prompts)
    grids = grids_of(folder)
    absent = [record.idx for record in records if record.idx not in grids]
    if absent:
        raise ValueError(
            f"{len(absent)} prompts have no grids yet, {absent[0]} first; run `pacorl dataset generate` to the end"
        )

    # Combine their sub-figures.
    instances: list[Instance] = []
    panels: list[str] = []
    for record in records:
        questions = list(instances_of(record, grids=len(grids[record.idx])))
        # Even steps would ask about the same grid and positions of every prompt.
        if limit is not None:
            Random(record.idx).shuffle(questions)
        instances += questions
        for number in range(len(grids[record.idx])):
            panels += [panel_path(record.idx, number, position) for position in range(record.prompt.grid.count)]
    instances = evenly_spread(instances, limit)
    counts = {"prompts": len(records), "panels": len(panels), "instances": len(instances)}

    # The manifest covers the instances but not the panels, which a copied folder may lack: check the files.
    step = DatasetStep(folder, "pair", inputs=[folder / prompts, folder / "grids.jsonl"])
    if dry_run or (step.counts_if_done() == counts and all((folder / name).is_file() for name in panels)):
        return counts

    # Cut the grids, and wait for the disk once before the manifest names the panels.
    for done, record in enumerate(records, 1):
        for number, name in enumerate(grids[record.idx]):
            cut(folder, name, record, number)
        progress(done, len(records))
    flush_all(folder / "images")
    target = folder / "instances.jsonl"
    write_records(target, instances)
    return step.finish(outputs=[target], counts=counts)


def grids_of(folder: Path) -> dict[str, list[str]]:
    """Group → the files of its grids in order, as listed in grids.jsonl."""
    path = folder / "grids.jsonl"
    files_of = dict[str, dict[int, str]]()
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        if not {"group", "number", "file", "sha256"} <= row.keys():
            raise ValueError(f"{where}: a grid has group, number, file and sha256, this has {', '.join(row)}")
        # A replaced image would be ranked under the recipe of another.
        if digest(inside(folder, row["file"])) != row["sha256"]:
            raise ValueError(
                f"{folder / row['file']} is not the image that was generated; run `pacorl dataset generate` again"
            )
        files = files_of.setdefault(row["group"], {})
        if row["number"] in files:
            raise ValueError(f"{where}: grid {row['number']} of {row['group']!r} is already taken by an earlier record")
        files[row["number"]] = row["file"]
    return {group: [file for _, file in sorted(files.items())] for group, files in files_of.items()}


def cut(folder: Path, name: str, record: PromptRecord, number: int) -> None:
    """Write the sub-figures of one grid; equal files on the disk remain untouched.

    They may reach the disk later: a panel torn by a power cut is not equal, and is written again.
    """
    image = open_image(folder / name)
    with blamed_on(folder / name):
        panels = split(image, record.prompt.grid)
    for position, panel in enumerate(panels):
        path = folder / panel_path(record.idx, number, position)
        content = png_bytes(panel)
        # Rewriting an equal panel would change its time stamp, and so the next backup would copy it again.
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content, flush=False)
