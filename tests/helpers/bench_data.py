"""Rows of the benchmarks in their published forms, drawn from the tiny world."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

from PIL import Image
from research.tiny.edits import draw_edit

from pacorl.tiny.world import all_panels, draw
from pacorl.types import Prompt

GRIDS = 4


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def rank_rows(prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Three items per prompt; the order is not one that a scorer would find by luck for all."""
    rng = random.Random(3)
    rows = []
    for prompt in prompts:
        for grid, panel, other in [(0, 0, 1), (1, 2, 3), (3, 1, 0)]:
            names = [f"{x}_{other}.png" for x in range(GRIDS)]
            order = rng.sample(names, len(names))
            rows.append(
                {
                    "folder": f"{prompt.id:04d}",
                    "ref_image": f"{grid}_{panel}.png",
                    "comp_images": names,
                    "rank_images": order,
                }
            )
    return rows


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)


def cell(image: Image.Image, name: str) -> dict[str, Any]:
    return {"bytes": png(image), "path": name}


def edit_reward_rows() -> list[dict[str, Any]]:
    """Three pairs of outputs of unlike sizes, each asked about in all three dimensions, over two task types."""
    rng, rows = random.Random(11), []
    for number, panel in enumerate(rng.sample(list(all_panels()), 3)):
        edit = draw_edit(panel, "hat", rng)
        other = draw(rng.choice(all_panels()), 48)
        for dimension in ("prompt_following", "consistency", "overall"):
            rows.append(
                {
                    "key": [f"{number}_a", f"{number}_b"],
                    "instruction": edit.instruction,
                    "input_image": cell(draw(panel, 32), "in.png"),
                    "output_images": [cell(draw(edit.after, 48), "a.png"), cell(other, "b.png")],
                    "task_type": ["subject-add", "color_alter"][number % 2],
                    "dimension": dimension,
                }
            )
    return rows


def gedit_rows() -> list[dict[str, Any]]:
    rng, rows = random.Random(13), []
    for number, panel in enumerate(rng.sample(list(all_panels()), 4)):
        edit = draw_edit(panel, "hat", rng)
        for language in ("en", "cn"):
            rows.append(
                {
                    "task_type": ["subject-add", "color_alter"][number // 2],
                    "key": f"k{number}",
                    "instruction": edit.instruction,
                    "instruction_language": language,
                    "input_image": cell(draw(panel, 64), "in.png"),
                    "Intersection_exist": number % 2 == 0,
                }
            )
    return rows
