"""Edits in the tiny world: one attribute of a drawn panel changes, the other six stay.

`write_edits` draws sources and writes a JSONL for `records.prompts`. `grade_edits` measures by the oracle whether the
other attributes stayed and the instruction was followed. It is never a reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import numpy as np

from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.tiny.oracle import nearest_panels, read_panels
from pacorl.tiny.words import INSTRUCTIONS, Text, read_texts
from pacorl.tiny.world import VALUES, Panel, Split, draw, panels_of, with_another
from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image

EDIT_GRADES = ("kept", "followed", "edited_well", "valid")


@dataclass(frozen=True, slots=True)
class Edit:
    """One attribute of a panel and its new value."""

    before: Panel
    attribute: str
    value: str

    @property
    def instruction(self) -> str:
        """The text of the edit."""
        return INSTRUCTIONS[self.attribute][self.value]

    @property
    def after(self) -> Panel:
        """The edited panel."""
        return replace(self.before, **{self.attribute: self.value})

    @property
    def others(self) -> tuple[str, ...]:
        """The attributes that stay."""
        return tuple(name for name in VALUES if name != self.attribute)


def world_edits(split: Split, count: int, *, seed: int = 0) -> list[Edit]:
    """Draw `count` edits of heroes of one split; the attributes of INSTRUCTIONS take turns.

    A new colour or hat makes another hero, possibly of another split: only the sources are held out.
    """
    rng = Random(f"edits-{split}-{seed}")
    panels = panels_of(split)
    attributes = tuple(INSTRUCTIONS)
    edits = []
    for index in range(count):
        edits.append(draw_edit(rng.choice(panels), attributes[index % len(attributes)], rng))
    return edits


def draw_edit(panel: Panel, attribute: str, rng: Random) -> Edit:
    """Draw another value of `attribute`."""
    edited = with_another(panel, attribute, rng)
    return Edit(panel, attribute, getattr(edited, attribute))


def in_words(panel: Panel) -> str:
    """Name every attribute of a panel: `red round hero, crown, sunset, meadow, waving, flag`."""
    return f"{panel.colour} {panel.shape} hero, {panel.hat}, {panel.palette}, {panel.place}, {panel.scene}"


def write_edits(folder: Path, edits: Sequence[Edit], *, name: str, pixels: int = 64) -> Path:
    """Draw each source as `folder/name/0000.png` and write the records as `folder/name.jsonl`."""
    rows = []
    for number, edit in enumerate(edits):
        image = f"{name}/{number:04d}.png"
        write_atomic(folder / image, png_bytes(draw(edit.before, pixels)))
        row = {
            "image": image,
            "instruction": edit.instruction,
            "panels": [in_words(edit.after)],
            "category": edit.attribute,
        }
        rows.append(row)
    path = folder / f"{name}.jsonl"
    write_jsonl(path, rows)
    return path


def edit_of(prompt: Prompt, before: Panel) -> Edit:
    """Return the edit of a prompt of `write_edits`.

    Args:
        before: panel of the source.

    Raises:
        ValueError: if the prompt does not describe the edited image, or changes more than one attribute.
    """
    if len(prompt.panels) != 1:
        raise ValueError(f"prompt {prompt.id} ({prompt.text!r}) does not describe the edited image in 'panels'")
    # The prompt describes the edited panel, so that the change follows from both.
    names = tuple(VALUES)
    (attributes,) = read_texts(Text(f"prompt {prompt.id}", prompt.panels[0], names, names))
    after = Panel(**attributes)
    changed = [name for name in names if getattr(after, name) != getattr(before, name)]
    if len(changed) != 1:
        raise ValueError(
            f"prompt {prompt.id} turns {in_words(before)!r} into {in_words(after)!r}: that is no single change"
        )
    return Edit(before, changed[0], getattr(after, changed[0]))


def grade_edits(prompts: Sequence[Prompt], images: Sequence[Image]) -> dict[str, float]:
    """Return the EDIT_GRADES of edited images, each in 0..1, means over images.

    Returns:
        kept: share of the other six attributes that equal the source's.
        followed: share of images with the new value of the edited attribute.
        edited_well: share of images with kept = followed = 1.
        valid: share of recognised images; all grades of the rest are 0.
    """
    # The nearest panel at any distance: a source is a drawing, and its file may have been resized or compressed.
    sources = nearest_panels([open_image(prompt.sources[0]) for prompt in prompts])

    rows = []
    for prompt, (before, _), shown in zip(prompts, sources, read_panels(images), strict=True):
        edit = edit_of(prompt, before)
        if shown is None:
            rows.append(dict.fromkeys(EDIT_GRADES, 0.0))
            continue
        kept = float(np.mean([getattr(shown, name) == getattr(before, name) for name in edit.others]))
        followed = float(getattr(shown, edit.attribute) == edit.value)
        rows.append({"kept": kept, "followed": followed, "edited_well": float(kept == followed == 1), "valid": 1.0})

    return {name: float(np.mean([row[name] for row in rows])) for name in EDIT_GRADES}
