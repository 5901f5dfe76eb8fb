"""Paints k grids per prompt (`pacorl dataset generate`), going on where an earlier call stopped.

A grid carries what made it in its PNG text: a picture whose recipe is the one that is wanted is never painted again,
and one with another recipe is. Several processes share the work by `shard`; the last one to finish lists the grids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pacorl.dataset.manifest import Progress, Step, silent
from pacorl.dataset.records import PromptRecord, read_prompts
from pacorl.io.documents import write_jsonl
from pacorl.io.files import digest, write_atomic
from pacorl.io.images import png_bytes, png_text
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

Paint = Callable[[Sequence[Prompt], Sequence[int]], Sequence["Image"]]
"""(prompts, seeds) → one sheet each, in order."""

RECIPE = "pacorl recipe"  # the key of the PNG text


@dataclass(frozen=True, slots=True)
class Sheet:
    """One grid that is wanted."""

    record: PromptRecord
    number: int
    seed: int

    @property
    def file(self) -> str:
        return f"grids/{self.record.idx}/{self.number}.png"


def sheets(records: Sequence[PromptRecord], *, grids: int, seed: int) -> list[Sheet]:
    """Every wanted grid. Its seed depends on (seed, prompt, number) alone: on no other prompt, and no process."""
    return [Sheet(one, number, _seed(seed, one.idx, number)) for one in records for number in range(grids)]


def _seed(seed: int, idx: str, number: int) -> int:
    return int.from_bytes(sha256(f"{seed}\n{idx}\n{number}".encode()).digest()[:7], "big")


def recipe(sheet: Sheet, generator: Mapping[str, Any]) -> str:
    """What makes a grid: generator, text and seed."""
    content = {"generator": dict(generator), "prompt": sheet.record.prompt.text, "seed": sheet.seed}
    return json.dumps(content, sort_keys=True, ensure_ascii=False)


def generate(
    folder: Path,
    paint: Paint | None,
    *,
    generator: Mapping[str, Any],
    grids: int = 4,
    prompts: str = "diverse.jsonl",
    batch: int = 4,
    seed: int = 0,
    shard: tuple[int, int] = (0, 1),
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Paints what is missing of this shard and, once every grid is there, writes grids.jsonl; returns counts.

    generator: names the policy and its settings, for the recipe. shard: (index, count). Without `paint` only a dry
    run is possible. Raises ValueError for an impossible shard.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(f"shard {index} of {count} does not exist; shards count from 0 to {count - 1}")
    wanted = sheets(read_prompts(folder / prompts), grids=grids, seed=seed)
    mine = [sheet for sheet in wanted[index::count] if not _is_painted(folder, sheet, generator)]
    counts = {"grids": len(wanted), "to_paint": len(mine)}
    if dry_run:
        return counts
    assert paint is not None
    for start in range(0, len(mine), batch):
        part = mine[start : start + batch]
        images = paint([sheet.record.prompt for sheet in part], [sheet.seed for sheet in part])
        for sheet, image in zip(part, images, strict=True):
            write_atomic(folder / sheet.file, png_bytes(image, {RECIPE: recipe(sheet, generator)}))
        progress(start + len(part), len(mine))
    return _list(folder, wanted, generator, prompts=prompts, seed=seed, painted=len(mine))


def _is_painted(folder: Path, sheet: Sheet, generator: Mapping[str, Any]) -> bool:
    return png_text(folder / sheet.file, RECIPE) == recipe(sheet, generator)


def _list(
    folder: Path, wanted: Sequence[Sheet], generator: Mapping[str, Any], *, prompts: str, seed: int, painted: int
) -> dict[str, int]:
    """Lists the grids, if the other shards have painted theirs."""
    missing = sum(not _is_painted(folder, sheet, generator) for sheet in wanted)
    counts = {"grids": len(wanted), "painted": painted, "missing": missing}
    if missing:
        return counts
    rows = [_row(folder, sheet) for sheet in wanted]
    write_jsonl(folder / "grids.jsonl", rows)
    step = Step(folder, "generate", inputs=[folder / prompts], options={"generator": dict(generator)}, seed=seed)
    step.finish(outputs=[folder / "grids.jsonl"], counts={"grids": len(wanted)})
    return counts


def _row(folder: Path, sheet: Sheet) -> dict[str, Any]:
    named = {"group": sheet.record.idx, "number": sheet.number, "file": sheet.file, "seed": sheet.seed}
    return named | {"sha256": digest(folder / sheet.file)}
