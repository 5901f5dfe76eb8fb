"""A theme and one text per panel → a prompt in the form that the T2IS records have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isqrt

from pacorl.core.grid import PANEL_TAG, panel_texts
from pacorl.policies import tiny_spec
from pacorl.types import TINY, Grid, Prompt

NUMBERS = ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN")


def prompt_from(
    model: str,
    *,
    theme: str,
    panels: Sequence[str] = (),
    grid: Grid | None = None,
    criteria: Mapping[str, Mapping[str, str]] | None = None,
    number: int = 0,
) -> Prompt:
    """The prompt for a model: a set if there are panels, else one image.

    Args:
        theme: what the panels share; a text that already has panel tags is taken as it is.
        grid: the squarest that fits, if left out.
        number: the prompt's id.

    Raises:
        ValueError: if panels and layout do not fit, or the tiny generator does not know a word.
    """
    if panels:
        _check_fit(theme, panels, grid)
        layout = grid or layout_for(len(panels))
        write = tiny_spec(edits=False).committed.compose if model == TINY else None
        prompt = write(theme, panels, layout, number) if write else compose(theme, panels, layout)
    else:
        prompt = _written_out(theme, grid)
        check_for(model, prompt)
    return Prompt(
        id=number,
        text=prompt.text,
        theme=prompt.theme,
        grid=prompt.grid,
        panels=prompt.panels,
        criteria=criteria or prompt.criteria,
    )


def check_for(model: str, prompt: Prompt) -> None:
    """Checks that a model knows the words of a prompt; only the tiny one has a list of them.

    Raises:
        ValueError: if it does not; it names the word.
    """
    if model == TINY:
        tiny_spec(edits=bool(prompt.sources)).committed.check(prompt)


def compose(theme: str, panels: Sequence[str], grid: Grid) -> Prompt:
    """The T2IS form: what all panels share, then each behind its tag."""
    count = NUMBERS[grid.count - 1] if grid.count <= len(NUMBERS) else str(grid.count)
    opening = f"{count}-PANEL Images with a {grid} grid layout portraying {_sentence(theme)}"
    scenes = [f"{tag}: {_sentence(text)}" for tag, text in zip(panel_tags(grid), panels, strict=True)]
    prompt = Prompt(id=0, text=" ".join([opening, *scenes]), theme=theme, grid=grid, panels=tuple(panels))
    assert len(panel_texts(prompt.text)) == grid.count
    return prompt


def panel_tags(grid: Grid) -> list[str]:
    """`[TOP]-[LEFT]` … for 2×2, `[1]-[2]` (row and column) for other layouts."""
    if grid == Grid(2, 2):
        return [f"[{row}]-[{col}]" for row in ("TOP", "BOTTOM") for col in ("LEFT", "RIGHT")]
    return [f"[{row + 1}]-[{col + 1}]" for row in range(grid.rows) for col in range(grid.cols)]


def layout_for(count: int) -> Grid:
    """The squarest layout that `count` panels fill: 4 → 2x2, 6 → 2x3, 5 → 1x5."""
    rows = next(side for side in range(isqrt(count), 0, -1) if count % side == 0)
    return Grid(rows, count // rows)


def _check_fit(theme: str, panels: Sequence[str], grid: Grid | None) -> None:
    for name, text in [("the theme", theme), *((f"panel {number}", text) for number, text in enumerate(panels, 1))]:
        if not text.strip():
            raise ValueError(f"{name} is empty; say what it shows")
        if PANEL_TAG.search(f". {text}"):
            raise ValueError(f"{name}, {text[:60]!r}, holds a panel tag; give tags, or one text per panel, not both")
    if grid and grid.count != len(panels):
        fitting = layout_for(len(panels))
        raise ValueError(
            f"the layout {grid} has {grid.count} panels and {len(panels)} are described; {fitting} would fit"
        )


def _written_out(text: str, grid: Grid | None) -> Prompt:
    from pacorl.core.grid import parse_layout

    if not text.strip():
        raise ValueError("the prompt is empty; say what to generate")
    panels = panel_texts(text)
    layout = grid or (parse_layout(text) if panels else Grid(1, 1))
    if panels and len(panels) != layout.count:
        raise ValueError(f"the layout {layout} has {layout.count} panels and the prompt describes {len(panels)}")
    return Prompt(id=0, text=text, grid=layout, panels=panels)


def _sentence(text: str) -> str:
    """The text with one full stop, which is what a panel tag is found by."""
    return text.strip().rstrip(".") + "."
