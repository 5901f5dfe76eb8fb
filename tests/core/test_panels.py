"""Panels in a set's latents: which tokens they contain, and means, gradients and objectives by panel."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from torch import Tensor

from pacorl.core.grid import Panels, panel_of_token, sample_mean, split
from pacorl.types import Grid, Size

CPU = torch.device("cpu")
SIZE = Size(32, 32)
TOKENS = (8, 8)


def noise(seed: int, *, batch: int = 3) -> Tensor:
    return torch.randn(batch, 64, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def panels_of(*grids: Grid) -> Panels:
    return Panels.of(grids, SIZE, TOKENS, device=CPU)


@pytest.mark.parametrize("grid", [Grid(3, 3), Grid(1, 5), Grid(2, 3), Grid(5, 2)], ids=str)
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


def test_a_mean_by_panel_is_the_mean_of_its_tokens() -> None:
    """Sets of several layouts in a batch, whose panels differ in number and size."""
    grids = (Grid(2, 2), Grid(3, 3), Grid(1, 4))
    value = noise(0)
    found = sample_mean(value, panels_of(*grids))
    for sample, grid in enumerate(grids):
        panel_N = panel_of_token(grid, SIZE, TOKENS)
        for panel in range(grid.count):
            expected = value[sample, panel_N == panel].mean()
            torch.testing.assert_close(found[sample, panel_N == panel], expected.expand(int((panel_N == panel).sum())))
    torch.testing.assert_close(found.mean(1), value.mean((1, 2)), rtol=1e-12, atol=1e-12)
