"""Generated images with their recipes: in memory, and as PNGs of grid images and panels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.judge.pairwise import Matrix
from pacorl.types import Prompt

Recipe = Mapping[str, Any]
"""Settings that, with its prompt, reproduce an image, by name: those of `Generator.recipe`, the seed of the initial
noise, and whether each panel was generated as an image of its own (`separate`)."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A judge's score of one image.

    Attributes:
        score: 0..1; None if an answer is missing.
        matrix: P(Yes) of every two panels of a set, None on the diagonal; empty for an edit.
        parts: Components of the score, by name.
        error: Reason for a missing score.
        alike: How well each panel shows its characters; empty without a character that has images.
    """

    score: float | None
    matrix: Matrix = ()
    parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str = ""
    alike: Sequence[float | None] = ()


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image with its recipe, and the judgement of it if there is a judge.

    Attributes:
        prompt: The image's prompt.
        image: A grid image for a set.
        recipe: Settings for reproduction.
        judged: The judge's score; None without a judge.
        rank: Rank among its candidates, from 1.
        candidates: Number of candidates.
        tied: Number of candidates of this rank, itself included: their scores differ by less than a judge resolves.
        files: Its file, and those of its panels, once it is saved.
    """

    prompt: Prompt
    image: Image
    recipe: Recipe
    judged: Judged | None = None
    rank: int = 1
    candidates: int = 1
    tied: int = 1
    files: tuple[Path, ...] = ()

    @property
    def panels(self) -> list[Image]:
        """The grid image cut apart; one image for an edit."""
        return split(self.image, self.prompt.grid)

    @property
    def place(self) -> str:
        """The rank in words, with a tie if there is one."""
        rank_text = f"number {self.rank} of {self.candidates}"
        if self.tied > 1:
            rank_text += f", a tie of {self.tied}"
        return rank_text


def recipe_texts(image: GeneratedImage, *, judge: str = "") -> dict[str, str]:
    """Return the PNG text chunks of an image, for `io.images.png_texts`.

    `panels`, `sources`, `characters` and `references` are JSON lists.
    """
    prompt = image.prompt
    texts = {"Software": f"pacorl {image.recipe['version']}", "prompt": prompt.text, "layout": str(prompt.grid)}
    if prompt.theme:
        texts["theme"] = prompt.theme
    lists = {
        "panels": prompt.panels,
        "sources": [path.name for path in prompt.sources],
        "characters": [character.name for character in prompt.characters],
        "references": [path.name for path in prompt.references],
    }
    for name, names in lists.items():
        if names or name == "panels":
            texts[name] = json.dumps(list(names), ensure_ascii=False)
    for name, value in image.recipe.items():
        # An empty negative prompt stays: it differs from the model's default.
        if value is not None and value is not False and (value != "" or name != "adapter"):
            texts[name] = f"{value:g}" if isinstance(value, float) else str(value)
    if image.judged:
        if image.judged.score is not None:
            texts["score"] = f"{image.judged.score:.6f}"
        if judge:
            texts["judge"] = judge
    return texts


def save(images: Sequence[GeneratedImage], out: Path, *, judge: str = "", stem: str = "set") -> list[GeneratedImage]:
    """Write each image and the panels of a set.

    Names are `STEM-NUMBER[-rank-RANK].png` and `…-panel-P.png`; the same call writes the same bytes. Existing files of
    these names are replaced atomically; the command has checked that they were generated.
    """
    # Equal numbers of digits sort a folder's listing.
    width = len(str(len(images)))
    ranked = any(image.rank > 1 for image in images)
    saved = []
    number = 0
    for image in images:
        # The name: candidates of one image share its number.
        number += image.rank == 1
        prompt = image.prompt
        name = f"{stem}-{number:0{width}d}" + (f"-rank-{image.rank}" if ranked else "")

        # The image, then its panels with their own texts.
        texts = recipe_texts(image, judge=judge)
        files = [out / f"{name}.png"]
        write_atomic(files[0], png_bytes(image.image, texts))
        for position, panel in enumerate(image.panels if prompt.grid.count > 1 else [], 1):
            panel_texts = {**texts, "place": str(position)}
            if prompt.panels:
                panel_texts["panel"] = prompt.panels[position - 1]
            files.append(out / f"{name}-panel-{position}.png")
            write_atomic(files[-1], png_bytes(panel, panel_texts))
        saved.append(replace(image, files=tuple(files)))
    return saved


def to_dict(image: GeneratedImage) -> dict[str, Any]:
    """Return a saved image's entry in the JSON of `pacorl generate`."""
    path, *panels = map(str, image.files)
    document: dict[str, Any] = {
        "file": path,
        "panels": panels,
        "prompt": image.prompt.text,
        "layout": str(image.prompt.grid),
        **image.recipe,
        "rank": image.rank,
        "candidates": image.candidates,
        "tied": image.tied,
    }
    # Without a judge the keys are absent, rather than null.
    if judged := image.judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": judged.parts, "error": judged.error}
    return document
