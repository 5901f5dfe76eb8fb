"""A set's grid: its layout and panels' texts, its panels in pixels, and in the tokens that their advantages act on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from PIL import Image

from pacorl.core.devices import to_device
from pacorl.io.terminal import excerpt
from pacorl.types import Grid, Size

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Of three digits at most: without bounds a text of 20,000 digits takes half a minute.
LAYOUT = re.compile(r"(?<!\d)(\d{1,3})\s{0,9}[x×⨉]\s{0,9}(\d{1,3})(?!\d)")
"""`2x2 grid layout`, `1×5`, `1 ⨉ 3`: the first pair of numbers around a cross is the layout (the released rule)."""

LAYOUT_OPENING = re.compile(
    r"^(?:[A-Z]+-PANEL images with an? |an? )?\d{1,3}\s?[x×⨉]\s?\d{1,3} grid layout(?:\. |,? (?:of |[a-z]+ing ))", re.I
)
"""Opening words of a T2IS prompt about its layout, before its subject."""

PANEL_TAG = re.compile(r"[.\"]\s+[A-Z0-9\-\[\]]+:")
"""A panel opens with a tag of capitals, digits, dashes and brackets that ends in a colon, after the end of a sentence:
`… detail. [TOP]-[LEFT]:A dentist …` (the released rule)."""

# Nothing quoted holds a mark of its kind: a text of 20,000 of them would take 20 s. An apostrophe in a word is none.
QUOTED = re.compile(r"[\"“]([^\"“”]+)[\"”]|「([^「」]+)」|(?<!\w)['‘]((?:[^'‘’]|(?<=\w)['’](?=\w))+)['’](?!\w)")
"""Words between quotation marks, straight, curly or mixed; a single mark counts only if no letter touches its outside
(not in "dog's")."""


SetImages = Image.Image | Sequence[Image.Image]
"""Images of a set: its grid image, or one image per panel."""


def parse_layout(text: str) -> Grid:
    """Parse the first `RxC` in `text`.

    Raises ValueError if there is none or a side is 0.
    """
    layout = LAYOUT.search(text)
    if layout is None:
        raise ValueError(f"no layout such as '2x2' in {excerpt(text)}")
    return Grid(rows=int(layout[1]), cols=int(layout[2]))


def panel_texts(prompt: str) -> tuple[str, ...]:
    """Split the texts after the panel tags of a T2IS prompt, in order; empty without tags."""
    tags = list(PANEL_TAG.finditer(prompt))
    ends = [*(tag.start() + 1 for tag in tags[1:]), len(prompt)]
    # Without tags there is one end and no text to go with it.
    return tuple(prompt[tag.end() : end].strip() for tag, end in zip(tags, ends, strict=bool(tags)))


def panel_tags(grid: Grid) -> list[str]:
    """List the panel tags: `[TOP]-[LEFT]` … for 2×2, as released; `[1]-[2]` (row, column) for other grids."""
    if grid == Grid(2, 2):
        return ["[TOP]-[LEFT]", "[TOP]-[RIGHT]", "[BOTTOM]-[LEFT]", "[BOTTOM]-[RIGHT]"]
    return [f"[{row + 1}]-[{col + 1}]" for row in range(grid.rows) for col in range(grid.cols)]


def shared_text(prompt: str) -> str:
    """Return the part of a T2IS prompt before its first panel tag."""
    first = PANEL_TAG.search(prompt)
    return (prompt if first is None else prompt[: first.start() + 1]).strip()


def subject_text(shared: str) -> str:
    """Return a shared text without its words about the layout: `2x2 grid layout of a red fox.` → `a red fox.`"""
    return LAYOUT_OPENING.sub("", shared) or shared


def split(image: SetImages, grid: Grid) -> list[Image.Image]:
    """Cut a grid image into its panels, row-major, by integer division; a remainder at the right or bottom is lost.

    Separate images of the panels are returned as they are, and may differ in size.

    Raises ValueError if the image has fewer pixels than panels along a side, or there is not one image per panel.
    """
    if not isinstance(image, Image.Image):
        if len(image) != grid.count:
            raise ValueError(f"a {grid} grid has {grid.count} panels, and {len(image)} images are given; give one each")
        return list(image)
    height, width = image.height // grid.rows, image.width // grid.cols
    if height == 0 or width == 0:
        raise ValueError(f"a {image.width}x{image.height} image cannot be cut into {grid} panels")
    # Cut and never resized: a judge must see the pixels that were generated.
    panels = []
    for top in range(0, grid.rows * height, height):
        for left in range(0, grid.cols * width, width):
            panels.append(image.crop((left, top, left + width, top + height)))
    return panels


def join(panels: Sequence[Image.Image], grid: Grid) -> Image.Image:
    """Join panels of one size, the inverse of `split`."""
    sizes = {panel.size for panel in panels}
    if len(panels) != grid.count or len(sizes) != 1:
        raise ValueError(f"a {grid} grid needs {grid.count} panels of one size, got {len(panels)} of {sorted(sizes)}")
    width, height = panels[0].size
    image = Image.new("RGB", (width * grid.cols, height * grid.rows))
    for index, panel in enumerate(panels):
        row, col = divmod(index, grid.cols)
        image.paste(panel, (col * width, row * height))
    return image


@lru_cache(maxsize=64)
def panel_of_token(grid: Grid, size: Size, token_grid: tuple[int, int]) -> Tensor:
    """Find the panel that contains the centre of each latent token.

    Args:
        size: of the grid image, in pixels.
        token_grid: rows and columns of tokens, which are row-major.

    Returns:
        (N,) int64 panel indices, row-major, of the panels of `split`.
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

    def at_tokens(self, value_BP: Tensor) -> Tensor:
        """Give each token its panel's value: (B, N)."""
        inside_BPN = self.inside_BPN
        return (value_BP[:, : inside_BPN.shape[1], None] * inside_BPN.to(value_BP.dtype)).sum(1)


def sample_mean(value_BNC: Tensor, panels: Panels | None = None) -> Tensor:
    """Average over the tokens and channels of each sample: (B,); or, with panels, of each panel: (B, N).

    Every token then has its panel's mean, so that a mean over tokens weighs each panel by its size.
    """
    if panels is None:
        return value_BNC.flatten(1).mean(1)
    if panels.inside_BPN.shape[1] == 1:  # the bits of a mean without panels
        return value_BNC.flatten(1).mean(1)[:, None].expand(value_BNC.shape[:2])
    # Masked sums, since a scatter on a card adds in any order, and the ratio of fresh samples must be exactly 1.
    inside_BPN = panels.inside_BPN.to(value_BNC.dtype)
    sum_BP = (value_BNC.mean(2)[:, None] * inside_BPN).sum(2)
    return panels.at_tokens(sum_BP / inside_BPN.sum(2).clamp(min=1))
