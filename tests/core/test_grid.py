"""Layouts and panel texts parse as the released rule does; splitting is the inverse of joining."""

from __future__ import annotations

import time

import numpy as np
import pytest
from PIL import Image

from pacorl.core.grid import QUOTED, join, panel_texts, parse_layout, shared_text, split
from pacorl.types import Grid

LAYOUTS = ["1x2", "1x3", "1x5", "1x7", "2x2", "2x3", "2x4"]


def panels_of(count: int, size: tuple[int, int]) -> list[Image.Image]:
    noise = np.random.default_rng(0).integers(0, 256, (count, size[1], size[0], 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in noise]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_is_the_inverse_of_join(layout: str) -> None:
    grid = parse_layout(layout)
    panels = panels_of(grid.count, (6, 4))
    sheet = join(panels, grid)
    assert sheet.size == (6 * grid.cols, 4 * grid.rows)
    assert [p.tobytes() for p in split(sheet, grid)] == [p.tobytes() for p in panels]


def test_panels_are_row_major() -> None:
    colours = [(10, 0, 0), (20, 0, 0), (30, 0, 0), (40, 0, 0), (50, 0, 0), (60, 0, 0)]
    sheet = join([Image.new("RGB", (1, 1), colour) for colour in colours], Grid(2, 3))
    assert np.asarray(sheet)[..., 0].tolist() == [[10, 20, 30], [40, 50, 60]]


def test_too_small_a_sheet_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a 4x1 image cannot be cut into 2x2 panels"):
        split(Image.new("RGB", (4, 1)), Grid(2, 2))


TAGS = {
    "1x2": ["[LEFT]", "[RIGHT]"],
    "1x3": ["[LEFT]", "[MIDDLE]", "[RIGHT]"],
    "1x5": [f"[{number}]" for number in range(1, 6)],
    "1x7": [f"[{number}]" for number in range(1, 8)],
    "2x2": [f"[{row}]-[{col}]" for row in ("TOP", "BOTTOM") for col in ("LEFT", "RIGHT")],
    "2x3": [f"[{row}]-[{col}]" for row in ("TOP", "BOTTOM") for col in ("LEFT", "MIDDLE", "RIGHT")],
    "2x4": [f"[{row}]-[{col}]" for row in ("TOP", "BOTTOM") for col in "1234"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_panels_of_every_layout(layout: str) -> None:
    wanted = [f"A fox at hour {number}: it naps. Later it wakes." for number in range(len(TAGS[layout]))]
    scenes = [f"{tag}:{text}" for tag, text in zip(TAGS[layout], wanted, strict=True)]
    prompt = " ".join([f"A {layout} grid layout. All images feature one fox.", *scenes])
    assert panel_texts(prompt) == tuple(wanted)
    assert shared_text(prompt) == f"A {layout} grid layout. All images feature one fox."


def test_a_tag_may_follow_a_quotation_and_a_line_break() -> None:
    prompt = 'A 1x2 sign. [LEFT]:It reads "OPEN"\n[RIGHT]:It reads "CLOSED"'
    assert panel_texts(prompt) == ('It reads "OPEN"', 'It reads "CLOSED"')


def test_colons_within_a_sentence_open_no_panel() -> None:
    assert panel_texts("A poster of one word: HELLO. It says: [A] or B.") == ()
    assert shared_text(" A poster of one word. ") == "A poster of one word."


def test_many_opening_marks_are_read_in_a_moment() -> None:
    start = time.process_time()
    for mark in "\"'“‘「":
        assert QUOTED.findall(mark * 20_000) == []
    assert time.process_time() - start < 1
