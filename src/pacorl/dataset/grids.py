"""Generate grids of every prompt (`pacorl dataset generate`), cut and combine them into questions (`pair`).

The image queue generates: every grid carries its recipe, an interrupted call continues, and several processes may
share the prompts; the last to finish writes the manifest, which lists the grids.

For every sub-figure of every grid as the reference, and for every other position, the candidates are the sub-figures
at that position in all grids of the prompt (arXiv 2512.04784, §3.1): 4 grids of 2×2 give 16 × 3 = 48 instances, and
708 prompts 33,984.
"""

from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import permutations
from pathlib import Path
from random import Random

from pacorl.core.grid import shared_text, split
from pacorl.dataset.folder import Instance, PromptRecord, read_prompts, write_records
from pacorl.dataset.manifest import DatasetStep
from pacorl.generate.image_queue import ImageJob, ImageSource, Shard, generate_missing, missing_images
from pacorl.io.documents import blamed_on
from pacorl.io.files import digest, flush_all, inside, write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.io.terminal import Progress, silent
from pacorl.tiny.words import check_tiny_grid
from pacorl.types import TINY


def prompts_file(folder: Path) -> Path:
    """Return the selected prompts of a folder; all prompts if none were selected."""
    selected = folder / "diverse.jsonl"
    if selected.is_file():
        return selected
    return folder / "prompts.jsonl"


def generate(
    folder: Path, source: ImageSource, *, grids: int = 4, shard: Shard = Shard(), progress: Progress = silent
) -> dict[str, int]:
    """Generate the missing grids of this shard; list all in the manifest as soon as none is missing.

    Returns:
        The number of grids in all, generated now, and missing (of other shards).

    Raises:
        ValueError: the tiny generator does not support a prompt's layout.
    """
    prompts = prompts_file(folder)
    records = read_prompts(prompts)
    if source.generator.get("checkpoint") == TINY:
        # The tiny generator draws its own layout whatever the prompt says, and `pair` would cut that wrongly.
        for record in records:
            with blamed_on(f"{prompts}, prompt {record.idx}"):
                check_tiny_grid(record.prompt.grid, record.prompt.grid.count)

    # Generate this shard's grids.
    jobs = grid_jobs(records, grids=grids, seed=source.seed)
    generated = generate_missing(jobs, folder, source, shard=shard, progress=progress)
    missing = len(missing_images(jobs, folder, source))
    # Only the last process to finish lists the grids of all shards.
    if not missing:
        options = {"generator": dict(source.generator)}
        step = DatasetStep(folder, "generate", inputs=[prompts], options=options, seed=source.seed)
        step.finish(outputs=[folder / job.file for job in jobs], counts={"grids": len(jobs)})
    return {"grids": len(jobs), "generated": generated, "missing": missing}


def grid_jobs(records: Sequence[PromptRecord], *, grids: int, seed: int) -> list[ImageJob]:
    """List a job per grid, prompt by prompt; its key is GROUP/NUMBER."""
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


def panel_path(group: str, grid: int, position: int) -> str:
    """Path of sub-figure `position` of grid `grid` in the dataset folder (the released benchmark's naming)."""
    return f"images/{group}/{grid}_{position}.png"


def instances_of(record: PromptRecord, *, grids: int) -> Iterator[Instance]:
    """Yield every instance of one prompt: `grids` × positions × (positions − 1)."""
    prompt = record.prompt
    positions = prompt.grid.count
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
                criteria=prompt.criteria,
            )


def pair(folder: Path, *, limit: int | None = None, progress: Progress = silent) -> dict[str, int]:
    """Cut the generated grids, and write instances.jsonl.

    Args:
        limit: the number of questions at most, evenly spread over the prompts.

    Raises:
        ValueError: a prompt has no grids, or a grid is missing, changed, no image, or too small to cut.
    """
    prompts = prompts_file(folder)
    grids = grids_of(folder)
    shares = _shares(read_prompts(prompts), grids, limit)

    def instances() -> Iterator[Instance]:
        for record, share in shares:
            of_prompt = list(instances_of(record, grids=len(grids[record.idx])))
            if share < len(of_prompt):
                # Without a shuffle, every prompt of a pilot would have questions about the same panels.
                Random(record.idx).shuffle(of_prompt)
            yield from of_prompt[:share]

    # The grids of the prompts that questions are about, and the panels cut from them.
    cuts = []
    panels = []
    questions = 0
    for record, share in shares:
        questions += share
        for number in range(len(grids[record.idx])):
            cuts.append((record, number))
            for position in range(record.prompt.grid.count):
                panels.append(panel_path(record.idx, number, position))
    counts = {"prompts": len(shares), "panels": len(panels), "instances": questions}

    # The manifest covers the instances but not the panels, which a copied folder may lack: check the files.
    step = DatasetStep(folder, "pair", inputs=[prompts, DatasetStep(folder, "generate").path])
    if step.counts_if_done() == counts and all((folder / name).is_file() for name in panels):
        return counts

    # Cut the grids, and wait for the disk once before the manifest names the panels.
    for done, (record, number) in enumerate(cuts, 1):
        path, sha256 = grids[record.idx][number]
        cut(folder, path, sha256, record, number)
        progress(done, len(cuts))
    flush_all()
    target = folder / "instances.jsonl"
    write_records(target, instances())
    return step.finish(outputs=[target], counts=counts)


def _shares(
    records: Sequence[PromptRecord], grids: Mapping[str, Sequence[tuple[Path, str]]], limit: int | None
) -> list[tuple[PromptRecord, int]]:
    """Return the prompts with their numbers of questions, counted before any is made: 100,000 prompts have millions."""
    shares = []
    for number, record in enumerate(records):
        count, positions = len(grids.get(record.idx, ())), record.prompt.grid.count
        if count < 2 or positions < 2:
            few = f"{record.idx}: {count} grids of {record.prompt.grid}"
            raise ValueError(f"{few} give nothing to rank; run `pacorl dataset generate` to the end")
        share = count * positions * (positions - 1)
        if limit is not None:
            share = min(share, (number + 1) * limit // len(records) - number * limit // len(records))
        if share:
            shares.append((record, share))
    return shares


def grids_of(folder: Path) -> dict[str, list[tuple[Path, str]]]:
    """Map each group to its grids in order, each with its SHA-256, by the manifest of `generate`."""
    step = DatasetStep(folder, "generate")
    made = step.last()
    if made is None:
        raise ValueError(f"{step.path} lists no grids; run `pacorl dataset generate` to the end")
    grids: dict[str, list[tuple[Path, str]]] = {}
    with blamed_on(step.path):
        for file, sha256 in made.outputs.items():
            path = inside(folder, file)
            grids.setdefault(path.parent.name, []).append((path, sha256))
    return grids


def cut(folder: Path, path: Path, sha256: str, record: PromptRecord, number: int) -> None:
    """Write the sub-figures of one grid, which reach the disk later."""
    # A replaced image would be ranked under the recipe of another.
    if digest(path) != sha256:
        raise ValueError(f"{path} is not the image that was generated; run `pacorl dataset generate` again")
    with blamed_on(path):
        panels = split(open_image(path), record.prompt.grid)
    for position, panel in enumerate(panels):
        write_atomic(folder / panel_path(record.idx, number, position), png_bytes(panel), flush=False)
