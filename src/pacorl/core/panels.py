"""Panels of a set in its latents: the tokens that a panel's advantage acts on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from pacorl.core.devices import to_device
from pacorl.types import Grid, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@lru_cache(maxsize=64)
def panel_of_token(grid: Grid, size: Size, token_grid: tuple[int, int]) -> Tensor:
    """Find the panel that contains the centre of each latent token.

    Args:
        size: of the grid image, in pixels.
        token_grid: rows and columns of tokens, which are row-major.

    Returns:
        (N,) int64 panel indices, row-major, of the panels of `core.grid.split`.
    """
    import torch

    # The row, and the column, of panels at each token's centre; the last includes the side's remainder.
    sides = ((size.height, grid.rows, token_grid[0]), (size.width, grid.cols, token_grid[1]))
    cells_of_side = []
    for pixels, cells, tokens in sides:
        # Doubled, so that centres stay integers.
        doubled_centre = (2 * torch.arange(tokens) + 1) * pixels // tokens
        cells_of_side.append((doubled_centre // (2 * (pixels // cells))).clamp(max=cells - 1))
    row_H, col_W = cells_of_side
    return (row_H[:, None] * grid.cols + col_W).flatten()


@dataclass(frozen=True, slots=True)
class Panels:
    """Panels of a batch of latents."""

    inside_BPN: Tensor
    """Whether a panel contains a token. Sets with fewer panels than P have empty panels at the end."""

    @classmethod
    def of(cls, grids: Sequence[Grid], size: Size, token_grid: tuple[int, int], *, device: torch.device) -> Panels:
        """Lay out the panels of each sample of a batch."""
        import torch

        panel_BN = torch.stack([panel_of_token(grid, size, token_grid) for grid in grids])
        panel_P = torch.arange(max(grid.count for grid in grids))
        return cls(to_device(panel_BN[:, None] == panel_P[:, None], device))

    def mean(self, value_BNC: Tensor) -> Tensor:
        """Average over the tokens and channels of each token's panel: (B, N)."""
        if self.inside_BPN.shape[1] == 1:  # the bits of a mean without panels
            return value_BNC.flatten(1).mean(1)[:, None].expand(value_BNC.shape[:2])
        # Masked sums, since a scatter on a card adds in any order, and the ratio of fresh samples must be exactly 1.
        inside_BPN = self.inside_BPN.to(value_BNC.dtype)
        sum_BP = (value_BNC.mean(2)[:, None] * inside_BPN).sum(2)
        return self.at_tokens(sum_BP / inside_BPN.sum(2).clamp(min=1))

    def at_tokens(self, value_BP: Tensor) -> Tensor:
        """Give each token its panel's value: (B, N)."""
        inside_BPN = self.inside_BPN
        return (value_BP[:, : inside_BPN.shape[1], None] * inside_BPN.to(value_BP.dtype)).sum(1)


def sample_mean(value_BNC: Tensor, panels: Panels | None = None) -> Tensor:
    """Average over the tokens and channels of each sample: (B,); with panels over those of each panel: (B, N).

    Every token then has its panel's mean, so that a mean over tokens weighs each panel by its size.
    """
    return value_BNC.flatten(1).mean(1) if panels is None else panels.mean(value_BNC)
