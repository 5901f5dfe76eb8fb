"""Cut and combine: grids → sub-figures → the questions that people rank (`pacorl dataset pair`).

For every sub-figure of every grid as the reference, and for every other position, the candidates are the sub-figures
at that position in all grids of the prompt (arXiv 2512.04784, §3.1): 4 grids of 2×2 give 16 × 3 = 48 instances, and
708 prompts 33,984.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pacorl.core.grid import shared_text, split
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import Instance, PromptRecord, read_prompts, write_instances
from pacorl.io.documents import read_jsonl
from pacorl.io.files import digest, inside, write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.types import Grid


def panel_path(group: str, grid: int, position: int) -> str:
    """Where sub-figure `position` of grid `grid` lies, relative to the dataset (the released benchmark's naming)."""
    return f"images/{group}/{grid}_{position}.png"


def instances_of(record: PromptRecord, *, grids: int) -> Iterator[Instance]:
    """Every instance of one prompt: `grids` × positions × (positions − 1).

    Raises:
        ValueError: if there are fewer than two grids or positions, so that nothing can be compared.
    """
    positions = record.prompt.grid.count
    if grids < 2 or positions < 2:
        raise ValueError(
            f"{record.idx}: {grids} grids of {record.prompt.grid} give nothing to rank; at least two of each are needed"
        )
    for grid in range(grids):
        for position in range(positions):
            for other in range(positions):
                if other != position:
                    yield _instance(record, grid=grid, position=position, other=other, grids=grids)


def _instance(record: PromptRecord, *, grid: int, position: int, other: int, grids: int) -> Instance:
    return Instance(
        id=f"{record.idx}:{grid}_{position}:{other}",
        group=record.idx,
        reference=panel_path(record.idx, grid, position),
        candidates=tuple(panel_path(record.idx, candidate, other) for candidate in range(grids)),
        theme=shared_text(record.prompt.text),
        category=record.prompt.category,
        task=record.prompt.task,
        criteria=record.prompt.criteria,
    )


def pair(
    folder: Path, *, prompts: str = "diverse.jsonl", dry_run: bool = False, progress: Progress = silent
) -> dict[str, int]:
    """Cuts every grid that grids.jsonl lists, and writes instances.jsonl.

    Returns:
        How many prompts, panels and instances there are.

    Raises:
        ValueError: for a prompt without grids, or a grid that is missing, changed, no image, or too small to cut.
    """
    records = {record.idx: record for record in read_prompts(folder / prompts)}
    grids = grids_of(folder)
    absent = [idx for idx in records if idx not in grids]
    if absent:
        raise ValueError(
            f"{len(absent)} prompts have no grids yet, {absent[0]} first; run `pacorl dataset generate` to the end"
        )
    instances = [
        instance for idx, record in records.items() for instance in instances_of(record, grids=len(grids[idx]))
    ]
    panels = sum(len(grids[idx]) * record.prompt.grid.count for idx, record in records.items())
    counts = {"prompts": len(records), "panels": panels, "instances": len(instances)}
    step = DatasetStep(folder, "pair", inputs=[folder / prompts, folder / "grids.jsonl"])
    # The manifest vouches for the instances, not for the panels, which a copied folder may lack: these are looked for.
    if dry_run or (step.counts_if_done() == counts and _all_cut(folder, instances)):
        return counts
    for done, record in enumerate(records.values(), 1):
        for number, name in enumerate(grids[record.idx]):
            cut(folder, name, record.idx, number, grid=record.prompt.grid)
        progress(done, len(records))
    write_instances(folder / "instances.jsonl", instances)
    return step.finish(outputs=[folder / "instances.jsonl"], counts=counts)


def grids_of(folder: Path) -> dict[str, list[str]]:
    """group → its grids' files in order, as grids.jsonl lists them.

    Raises:
        ValueError: for a grid that is malformed, listed twice, changed, gone, or outside of the folder.
    """
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


def cut(folder: Path, name: str, group: str, number: int, *, grid: Grid) -> None:
    """Writes the sub-figures of one grid; equal ones on the disk stay untouched."""
    image = open_image(folder / name)
    try:
        panels = split(image, grid)
    except ValueError as error:
        raise ValueError(f"{folder / name}: {error}") from None
    for position, panel in enumerate(panels):
        path, content = folder / panel_path(group, number, position), png_bytes(panel)
        # Rewriting an equal panel would change its time stamp, and with it what a backup or a server copies again.
        if not path.is_file() or path.read_bytes() != content:
            write_atomic(path, content)


def _all_cut(folder: Path, instances: Sequence[Instance]) -> bool:
    return all((folder / name).is_file() for name in {instance.reference for instance in instances})
