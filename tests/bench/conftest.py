"""The judge of the benchmarks' tests, and T2IS-Bench of the tiny world; `bench_examples` has the other formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pacorl.judge.local import LocalJudge
from pacorl.tiny.world import set_prompts


@pytest.fixture(scope="session")
def tiny() -> LocalJudge:
    """The committed tiny judge."""
    return LocalJudge.from_pretrained("tiny")


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
