"""A tiny dataset folder: prompts of the tiny world and grids that an unreliable painter made."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from pacorl.curate.manifest import write_atomic, write_jsonl
from pacorl.curate.pictures import png_bytes
from pacorl.curate.records import PromptRecord, read_prompts
from pacorl.data.characters import Panel, character_prompts, draw_grid, redrawn


def write_tiny_prompts(path: Path, count: int) -> None:
    rows = [
        {
            "idx": f"{prompt.id:04d}",
            "prompt": prompt.text,
            "layout": "2x2",
            "theme": prompt.theme,
            "category": "Character",
            "task_name": "Multi-Scenario",
            "criteria": {dimension: dict(named) for dimension, named in prompt.criteria.items()},
        }
        for prompt in character_prompts("train", count)
    ]
    write_jsonl(path, rows)


def write_grids(folder: Path, records: list[PromptRecord], *, grids: int, panel_size: int = 32) -> None:
    rng, rows = random.Random(7), []
    for record in records:
        panels = [Panel.parse(text) for text in record.prompt.panels]
        for number in range(grids):
            name = f"grids/{record.idx}/{number}.png"
            sheet = draw_grid(redrawn(panels, chance=0.35, rng=rng), record.prompt.grid, panel_size)
            content = png_bytes(sheet)
            write_atomic(folder / name, content)
            rows.append({"group": record.idx, "number": number, "file": name, "sha256": sha256(content).hexdigest()})
    write_jsonl(folder / "grids.jsonl", rows)


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with prompts.jsonl, diverse.jsonl, grids and, where asked, instances."""

    def make(prompts: int = 3, grids: int = 3, *, paired: bool = True) -> Path:
        folder = tmp_path / "dataset"
        for name in ("prompts.jsonl", "diverse.jsonl"):
            write_tiny_prompts(folder / name, prompts)
        write_grids(folder, read_prompts(folder / "diverse.jsonl"), grids=grids)
        if paired:
            from pacorl.curate.pair import pair

            pair(folder)
        return folder

    return make
