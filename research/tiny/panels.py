"""Batches of drawn panels as tensors, composed from cached layers.

Legend: B batch, P panels, C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from pacorl.tiny.world import VALUES, Panel, layer
from pacorl.types import Grid

NAMES = tuple(VALUES)
COUNTS = tuple(len(values) for values in VALUES.values())


def random_panels(count: int) -> Tensor:
    """Draw the attributes of independent panels: (count, 7) of indices."""
    return torch.stack([torch.randint(values, (count,)) for values in COUNTS], 1)


def indices_of(panels: Sequence[Panel]) -> Tensor:
    """Return the attributes of panels as indices: (P, 7)."""
    rows = []
    for panel in panels:
        rows.append([VALUES[name].index(getattr(panel, name)) for name in NAMES])
    return torch.tensor(rows)


@cache
def layers(size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def stacked(kind: str, *names: str) -> Tensor:
        layers = [layer(kind, values, size) for values in product(*(VALUES[name] for name in names))]
        return torch.from_numpy(np.stack(layers)).permute(0, 3, 1, 2).contiguous()

    return (
        stacked("background", "palette", "place"),
        stacked("prop", "prop"),
        stacked("hero", "colour", "shape", "pose"),
        stacked("hat", "hat", "shape", "pose"),
    )


def compose(panels: Tensor, size: int) -> Tensor:
    """Draw panels of these attributes: (P, 7) → (P, 3, size, size) in −1..1, equal to `world.draw` but its rounding."""
    colour, shape, hat, palette, place, pose, prop = panels.unbind(1)
    shapes, poses = len(VALUES["shape"]), len(VALUES["pose"])
    backgrounds, props, heroes, hats = layers(size)
    image = backgrounds[palette * len(VALUES["place"]) + place]
    for front in (
        props[prop],
        heroes[(colour * shapes + shape) * poses + pose],
        hats[(hat * shapes + shape) * poses + pose],
    ):
        image = front + image * (1 - front[:, 3:])
    return image[:, :3] * 2 - 1


def tile(panels_BPCHW: Tensor, grid: Grid) -> Tensor:
    """Join panels to grids of R × K, images or latents: (B, R·K, C, H, W) → (B, C, R·H, K·W)."""
    rows_BRKCHW = panels_BPCHW.unflatten(1, (grid.rows, grid.cols))
    return rows_BRKCHW.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
