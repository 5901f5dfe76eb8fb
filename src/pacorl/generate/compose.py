"""Prompts for generation: from a theme and one text per panel, or from a T2IS record by its address."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path

from pacorl.core.grid import PANEL_TAG, panel_tags, panel_texts
from pacorl.generate.panels import read_request, single_image_note, write_panels
from pacorl.io.documents import read_jsonl
from pacorl.models.policies import tiny_spec
from pacorl.records.prompts import load_prompts, text_prompt
from pacorl.types import TINY, Grid, Prompt

logger = logging.getLogger(__name__)

_NUMBERS = ("ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE", "TEN")


def prompt_from(
    model: str,
    *,
    theme: str,
    panels: Sequence[str] = (),
    grid: Grid | None = None,
    criteria: Mapping[str, Mapping[str, str]] | None = None,
    number: int = 0,
) -> Prompt:
    """Compose a prompt for a model: a set if there are panels, else one image.

    Args:
        theme: the panels' common theme. A text with panel tags is used unchanged. Without `panels`, the template writer
            (`generate.panels`) writes the panels of a sentence that requests several images. A text that only mentions
            several makes one image, with a warning.
        grid: the layout; by default the squarest that fits.
        number: the prompt's id.

    Raises:
        ValueError: if panels and layout do not fit, or a word is unknown to the tiny generator.
    """
    # A sentence can request several images.
    if not panels and (grid is None or grid.count > 1) and read_request(theme):
        draft = write_panels(theme, count=grid.count if grid else None)
        if draft.note:
            logger.warning("%s: %s", theme[:60], draft.note)
        theme = draft.theme
        panels = draft.panels
        criteria = criteria or draft.criteria

    # A set, or one image.
    if panels:
        _check_fit(theme, panels, grid)
        layout = grid or layout_for(len(panels))
        write = tiny_spec(edits=False).committed.compose if model == TINY else None
        # The tiny model has a vocabulary of its own for panels.
        prompt = write(theme, panels, layout, number) if write else compose(theme, panels, layout)
    else:
        if not theme.strip():
            raise ValueError("the prompt is empty; say what to generate")
        prompt = text_prompt(theme, grid=grid)
        note = "" if grid else single_image_note(theme)
        if note:
            logger.warning("%s: %s", theme[:60], note)
        # Words, size and references, before any weights load.
        check_for(model, prompt)
    return replace(prompt, id=number, criteria=criteria or prompt.criteria)


def check_for(model: str, prompt: Prompt) -> None:
    """Check the words of a prompt; only the tiny model has a vocabulary.

    Raises:
        ValueError: naming an unknown word.
    """
    if model == TINY:
        tiny_spec(edits=bool(prompt.sources)).committed.check(prompt)


def compose(theme: str, panels: Sequence[str], grid: Grid) -> Prompt:
    """Compose a prompt in the T2IS form: the common theme, then each panel behind its tag."""

    def sentence(text: str) -> str:
        # With one full stop: a panel's tag is recognized by the end of the sentence before it.
        return text.strip().rstrip(".") + "."

    count = _NUMBERS[grid.count - 1] if grid.count <= len(_NUMBERS) else str(grid.count)
    opening = f"{count}-PANEL Images with a {grid} grid layout portraying {sentence(theme)}"
    scenes = [f"{tag}: {sentence(text)}" for tag, text in zip(panel_tags(grid), panels, strict=True)]
    prompt = Prompt(id=0, text=" ".join([opening, *scenes]), theme=theme, grid=grid, panels=tuple(panels))
    # Texts with their own tags were refused, so that exactly these panels are read back.
    assert len(panel_texts(prompt.text)) == grid.count
    return prompt


def layout_for(count: int) -> Grid:
    """Return the squarest layout of exactly `count` panels: 4 → 2x2, 6 → 2x3, 5 → 1x5."""
    rows = next(side for side in range(isqrt(count), 0, -1) if count % side == 0)
    return Grid(rows, count // rows)


def _check_fit(theme: str, panels: Sequence[str], grid: Grid | None) -> None:
    for number, text in enumerate([theme, *panels]):
        name = f"panel {number}" if number else "the theme"
        if not text.strip():
            raise ValueError(f"{name} is empty; say what it shows")
        # As it would follow a sentence of the prompt, since a tag is recognized only there.
        if PANEL_TAG.search(f". {text}"):
            raise ValueError(f"{name}, {text[:60]!r}, holds a panel tag; give tags, or one text per panel, not both")
    if grid and grid.count != len(panels):
        raise ValueError(
            f"the layout {grid} has {grid.count} panels and {len(panels)} are described; "
            f"{layout_for(len(panels))} would fit"
        )


def find_record(address: str) -> Prompt:
    """Load the record of an address `FILE:ID`; the ID is its `idx`, else its line number, from 1.

    Raises:
        ValueError: if there is no such record; the message lists existing ids.
    """
    file, _, name = address.rpartition(":")
    if not file or not name:
        raise ValueError(f"{address!r} is not of the form FILE:ID, e.g. prompts.jsonl:0001")
    prompts = load_prompts(file)
    names: list[str] = []
    if Path(file).suffix.lower() == ".jsonl":  # other forms have no names
        names = [str(record.get("idx", "")) for record in read_jsonl(Path(file))]
    # Names first: an idx such as 0003 is also a line number, often of another record.
    if name in names:
        return prompts[names.index(name)]
    if name.isascii() and name.isdigit() and 1 <= int(name) <= len(prompts):
        return prompts[int(name) - 1]
    first = ", ".join(filter(None, names[:5])) or "none"
    raise ValueError(
        f"{file} has no record {name!r}; the first of its {len(prompts)} are {first} (or give a line, from 1)"
    )
