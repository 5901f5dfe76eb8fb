"""Benchmarks in the published formats, a few items each, drawn from the tiny world."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from bench_data import GRIDS, edit_reward_rows, gedit_rows, rank_rows, write_parquet
from tiny_sets import panels_of_prompt, redrawn

from pacorl.dataset.convert import convert
from pacorl.io.documents import write_jsonl
from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import draw, set_prompts


@pytest.fixture(scope="session")
def tiny() -> LocalJudge:
    """The committed tiny judge."""
    return LocalJudge.from_pretrained("tiny")


# --- ConsistencyRank -----------------------------------------------------------------------------------------------


@pytest.fixture
def rank_folder(tmp_path: Path) -> Path:
    """Two prompts of 4 × 4 sub-figures and six rankings."""
    folder, rng = tmp_path / "ConsistencyRank-Bench", random.Random(5)
    prompts = set_prompts("dev", 2)
    for prompt in prompts:
        panels = panels_of_prompt(prompt)
        images = folder / "images" / f"{prompt.id:04d}"
        images.mkdir(parents=True)
        for grid in range(GRIDS):
            for number, panel in enumerate(redrawn(panels, chance=0.4, rng=rng)):
                draw(panel, 32).save(images / f"{grid}_{number}.png")
    rows = []
    for prompt in prompts:
        criteria = prompt.criteria | {"Logic": {"Order": None}}
        rows.append({"idx": f"{prompt.id:04d}", "prompt": prompt.text, "criteria": criteria, "category": "Story"})
    write_jsonl(folder / "prompt_data.jsonl", rows)
    write_jsonl(folder / "consistency_full_rank.jsonl", rank_rows(prompts))
    return folder


# --- EditReward-Bench and GEdit-Bench ------------------------------------------------------------------------------


@pytest.fixture
def edit_reward_folder(tmp_path: Path) -> Path:
    rows, folder = edit_reward_rows(), tmp_path / "EditReward-Bench" / "data"
    write_parquet(folder / "train-00000-of-00002.parquet", rows[:5])
    write_parquet(folder / "train-00001-of-00002.parquet", rows[5:])
    convert(folder.parent)
    return folder.parent


@pytest.fixture
def gedit_folder(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "GEdit-Bench" / "data" / "train-00000-of-00001.parquet", gedit_rows())
    convert(tmp_path / "GEdit-Bench")
    return tmp_path / "GEdit-Bench"


# --- T2IS-Bench ----------------------------------------------------------------------------------------------------


@pytest.fixture
def t2is_folder(tmp_path: Path) -> Path:
    """Three cases of four images; one has no criteria for Logic, one none for Style."""
    folder = tmp_path / "T2IS-Bench"
    folder.mkdir()
    cases, criteria, alignment = {}, {}, {}
    for prompt in set_prompts("dev", 3):
        name = f"{prompt.id + 1:04d}_0001"
        cases[name] = {
            "output_image_count": len(prompt.panels),
            "category": "Character Generation",
            "instruction": prompt.theme,
            "sub_caption": list(prompt.panels),
        }
        lists = {name: [dict(texts)] for name, texts in prompt.criteria.items()} | {"Logic": [{"Order": "In order."}]}
        for missing in [["Logic"], ["Style"], []][prompt.id]:
            lists.pop(missing, None)
        criteria[name] = lists
        alignment[name] = {
            f"sub_{index}": {"Entity": [text, prompt.theme], "Attribute": [text], "Relation": [] if index else [text]}
            for index, text in enumerate(prompt.panels)
        }
    for file, content in (("T2IS-Bench", cases), ("prompt_consistency", criteria), ("prompt_alignment", alignment)):
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder
