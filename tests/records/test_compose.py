"""Prompts from a theme and panels, and records by their address."""

from __future__ import annotations

import pytest

from pacorl.core.grid import panel_texts, shared_text
from pacorl.records.compose import compose
from pacorl.records.prompts import find_record
from pacorl.types import Grid


@pytest.mark.parametrize("grid", [Grid(2, 2), Grid(1, 3), Grid(2, 3), Grid(1, 12)])
def test_a_composed_prompt_reads_back(grid):
    panels = [f"Dr. Ada, 3.5 m tall, shows slide {number}!" for number in range(grid.count)]
    prompt = compose("a lecture. All in ink", panels, grid)
    assert panel_texts(prompt.text) == tuple(f"{text}." for text in panels)
    assert f"{grid} grid layout" in shared_text(prompt.text)
    assert prompt.panels == tuple(panels)


def test_a_record_is_found_by_its_idx_or_without_one_by_its_number(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"idx": "0007", "prompt": "a fox"}\n\n{"prompt": "an owl"}\n')
    assert [find_record(f"{path}:{name}").text for name in ("0007", "2")] == ["a fox", "an owl"]
    with pytest.raises(ValueError, match="'3'"):
        find_record(f"{path}:3")
    with pytest.raises(ValueError, match="'prompts'"):
        find_record("prompts")
