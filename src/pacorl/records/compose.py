"""Prompts from a theme and one text per panel, from a sentence, or from a record by its address."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import isqrt

from pacorl.core.grid import LAYOUT, panel_tags, panel_texts, parse_layout
from pacorl.io.terminal import excerpt
from pacorl.records.panels import NUMBERS, read_request, write_panels
from pacorl.tiny.words import check_tiny, check_tiny_edit, tiny_edit, tiny_prompt
from pacorl.types import TINY, Grid, Prompt, SetCriteria

logger = logging.getLogger(__name__)

SPELT = 10
"""Largest number of panels that a prompt names in letters."""


def prompt_from(
    model: str, *, theme: str, panels: Sequence[str] = (), grid: Grid | None = None, criteria: SetCriteria | None = None
) -> Prompt:
    """Compose a prompt for a model: a set if there are panels, else one image.

    Args:
        theme: the panels' common theme. A text with panel tags is used unchanged. Without `panels`, the template writer
            (`records.panels`) writes them if the sentence requests several images.
        grid: the layout; by default the text's, else the squarest that fits.

    Raises:
        ValueError: if a text is empty, panels and layout do not fit, or a word is unknown to the tiny generator.
    """
    # A sentence can request several images.
    if not panels and (grid is None or grid.count > 1) and read_request(theme):
        draft = write_panels(theme, count=grid.count if grid else None)
        if draft.note:
            logger.warning("%s: %s", excerpt(theme), draft.note)
        # "a 3x2 grid of …" states its layout; other numbers around a cross are the content's.
        if grid is None and LAYOUT.search(theme) and parse_layout(theme).count == len(draft.panels):
            grid = parse_layout(theme)
        theme, panels, criteria = draft.theme, draft.panels, criteria or draft.criteria

    # A set, or one image.
    if panels:
        layout = grid or layout_for(len(panels))
        check_panel_count(layout, panels)
        # The tiny generator has a vocabulary of its own.
        prompt = tiny_prompt(theme, panels, layout) if model == TINY else compose(theme, panels, layout)
    else:
        if not theme.strip():
            raise ValueError("the prompt is empty; say what to generate")
        # A line of prose may hold "3 x 4 cm", so its layout counts only if panels are described.
        described = panel_texts(theme)
        if grid is None:
            grid = parse_layout(theme) if described else Grid(1, 1)
        check_panel_count(grid, described)
        prompt = Prompt(0, theme, grid=grid, panels=described)
        # Words, size and references, before any weights load.
        prompt = check_for(model, prompt)
    return replace(prompt, criteria=criteria or prompt.criteria)


def check_panel_count(grid: Grid, panels: Sequence[str]) -> None:
    """Raise ValueError if described panels do not fill the layout."""
    if panels and len(panels) != grid.count:
        raise ValueError(
            f"the layout {grid} has {grid.count} panels and {len(panels)} are described; {layout_for(len(panels))} "
            "would fit (in a prompt, each tag follows the end of a sentence: '… lamp. [TOP]-[LEFT]: A …')"
        )


def check_for(model: str, prompt: Prompt) -> Prompt:
    """Return a prompt, an instruction as the model learned it. Only the tiny model has a vocabulary.

    Raises:
        ValueError: for an unknown word or instruction.
    """
    if model == TINY and prompt.sources:
        prompt = replace(prompt, text=tiny_edit(prompt.text))
        check_tiny_edit(prompt)
    elif model == TINY:
        check_tiny(prompt)
    return prompt


def in_tiny_words(prompt: Prompt) -> Prompt:
    """Compose a set for the tiny generator if its text is another generator's; one with other words stays."""
    if prompt.panels and "-PANEL" in prompt.text:
        with suppress(ValueError):
            return replace(prompt, text=tiny_prompt(prompt.theme, prompt.panels, prompt.grid).text)
    return prompt


def compose(theme: str, panels: Sequence[str], grid: Grid, *, shared: str = "") -> Prompt:
    """Compose a prompt in the T2IS form: the shared description, then each panel behind its tag.

    Args:
        theme: the request, for the judge.
        shared: description of all panels, for the generator; the theme by default.

    Raises:
        ValueError: a text is empty, or would be read as a panel's tag.
    """
    if not all(text.strip() for text in (theme, *panels)):
        raise ValueError("the description of all panels, or of one, is empty; say what it shows")
    count = NUMBERS[grid.count].upper() if grid.count <= SPELT else str(grid.count)
    subject = f" portraying {sentence(theme)}"
    if shared:
        subject = f". {sentence(shared)}"
    text = f"{count}-PANEL Images with a {grid} grid layout{subject}"
    for tag, panel in zip(panel_tags(grid), panels, strict=True):
        text += f" {tag}: {sentence(panel)}"
    # Read the text back: a theme with a tag of its own would shift the panels.
    if len(panel_texts(text)) != grid.count or parse_layout(text) != grid:
        raise ValueError(
            f"a text of {excerpt(theme)} holds a panel tag, capitals before a colon after a sentence; give tags, or "
            "one text per panel, not both"
        )
    return Prompt(id=0, text=text, theme=theme, grid=grid, panels=tuple(panels))


def sentence(text: str) -> str:
    """Put a text on one line that ends as a sentence does, by which the tag after it is recognized."""
    return " ".join(text.split()).rstrip(".") + "."


def layout_for(count: int) -> Grid:
    """Return the squarest layout of exactly `count` panels: 4 → 2x2, 6 → 2x3, 5 → 1x5."""
    rows = next(side for side in range(isqrt(count), 0, -1) if count % side == 0)
    return Grid(rows, count // rows)
