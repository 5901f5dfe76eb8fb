"""Edits in the tiny world: one attribute of a drawn panel is to change, the other five are to stay.

`write_edits` draws sources and writes the JSONL that `records.prompts` reads; `grade_edits` measures by the oracle what
was kept and whether the instruction was followed. It grades and is never rewarded.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pacorl.io.documents import write_jsonl
from pacorl.io.files import write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.tiny.characters import EDITS, VALUES, Oracle, Panel, Split, draw, panels_of, with_another
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
        return EDITS[self.attribute].format(self.value)

    @property
    def after(self) -> Panel:
        return replace(self.before, **{self.attribute: self.value})

    @property
    def others(self) -> tuple[str, ...]:
        """The attributes that are to stay."""
        return tuple(name for name in VALUES if name != self.attribute)


def character_edits(split: Split, count: int, *, seed: int = 0) -> list[Edit]:
    """`count` edits of characters of one split; the attributes of EDITS take turns, values are drawn among the others.

    A new colour or hat makes another character, possibly of another split: what is held out are the sources.
    """
    rng = random.Random(f"edits-{split}-{seed}")
    panels = panels_of(split)
    return [draw_edit(rng.choice(panels), tuple(EDITS)[index % len(EDITS)], rng) for index in range(count)]


def draw_edit(panel: Panel, attribute: str, rng: random.Random) -> Edit:
    """An edit of `panel` to another value of `attribute`."""
    return Edit(panel, attribute, getattr(with_another(panel, attribute, rng), attribute))


def write_edits(folder: Path, edits: Sequence[Edit], *, name: str, pixels: int = 64) -> Path:
    """Draw each source as `folder/name/0000.png` and write `folder/name.jsonl`, which names them."""
    rows = []
    for number, edit in enumerate(edits):
        image = f"{name}/{number:04d}.png"
        write_atomic(folder / image, png_bytes(draw(edit.before, pixels)))
        record = {"image": image, "instruction": edit.instruction, "panels": [edit.after.text]}
        rows.append(record | {"category": edit.attribute})
    path = folder / f"{name}.jsonl"
    write_jsonl(path, rows)
    return path


def edit_of(prompt: Prompt, before: Panel) -> Edit:
    """The edit that a prompt of `write_edits` asks for, of a source that shows `before`.

    Raises ValueError if the prompt does not say what the edited image is to show, or that is no single change.
    """
    if len(prompt.panels) != 1:
        raise ValueError(f"prompt {prompt.id} ({prompt.text!r}) does not say what the edited image is to show")
    after = Panel.parse(prompt.panels[0])
    changed = [name for name in VALUES if getattr(after, name) != getattr(before, name)]
    if len(changed) != 1:
        raise ValueError(f"prompt {prompt.id} turns {before.text!r} into {after.text!r}: that is no single change")
    return Edit(before, changed[0], getattr(after, changed[0]))


def grade_edits(prompts: Sequence[Prompt], images: Sequence[Image], *, oracle: Oracle) -> dict[str, float]:
    """The EDIT_GRADES of edited images, each in 0..1, means over images.

    kept: share of the other five attributes that are as in the source. followed: whether the attribute that was to
    change has its new value. edited_well: both, entirely. valid: share of images that show anything of this world;
    an invalid one keeps and follows nothing.
    """
    # The nearest panel whatever its distance: a source is a drawing, and its file may have been resized or compressed.
    sources = oracle.nearest([open_image(prompt.sources[0]) for prompt in prompts])

    rows = []
    for prompt, (before, _), shown in zip(prompts, sources, oracle.read(images), strict=True):
        rows.append(_grade(edit_of(prompt, before), shown))

    return {name: float(np.mean([row[name] for row in rows])) for name in EDIT_GRADES}


def _grade(edit: Edit, shown: Panel | None) -> dict[str, float]:
    if shown is None:
        return dict.fromkeys(EDIT_GRADES, 0.0)
    kept_share = float(np.mean([getattr(shown, name) == getattr(edit.before, name) for name in edit.others]))
    followed = float(getattr(shown, edit.attribute) == edit.value)
    return {"kept": kept_share, "followed": followed, "edited_well": float(kept_share == followed == 1), "valid": 1.0}
