"""Panels in a set's latents: which tokens they contain."""

from __future__ import annotations

import pytest
from PIL import Image

from pacorl.core.grid import panel_of_token, split
from pacorl.types import Grid, Size


@pytest.mark.parametrize("grid", [Grid(3, 3), Grid(1, 5), Grid(2, 11), Grid(5, 2)], ids=str)
@pytest.mark.parametrize("size", [Size(128, 128), Size(80, 208)], ids=str)
def test_a_token_belongs_to_the_panel_that_contains_its_centre(grid: Grid, size: Size) -> None:
    """Panels of whole pixels cut tokens of 16, and leave a remainder at the right and the bottom."""
    rows, cols = size.height // 16, size.width // 16
    places = Image.new("L", (size.width, size.height), 255)
    height, width = size.height // grid.rows, size.width // grid.cols
    for panel in range(grid.count):
        corner = (panel % grid.cols * width, panel // grid.cols * height)
        places.paste(panel, (*corner, corner[0] + width, corner[1] + height))
    assert [set(part.tobytes()) for part in split(places, grid)] == [{panel} for panel in range(grid.count)]

    found = panel_of_token(grid, size, (rows, cols)).view(rows, cols)
    for row in range(rows):
        for col in range(cols):
            x, y = min(16 * col + 8, grid.cols * width - 1), min(16 * row + 8, grid.rows * height - 1)
            assert found[row, col] == places.getpixel((x, y))
