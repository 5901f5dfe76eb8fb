"""Generated images with their recipes: in memory, and as PNGs of grid images and panels."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.types import Matrix, Prompt

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
    """

    score: float | None
    matrix: Matrix = ()
    parts: Mapping[str, float | None] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """An image with its recipe, and the judgement of it if there is a judge.

    Attributes:
        prompt: The image's prompt.
        image: A grid image for a set.
        recipe: Settings for reproduction.
        judged: The judge's score; None without a judge.
        tied: Number of candidates as good as it, itself included: their scores differ by less than a judge resolves.
    """

    prompt: Prompt
    image: Image
    recipe: Recipe
    judged: Judged | None = None
    tied: int = 1

    @property
    def panels(self) -> list[Image]:
        """The grid image cut apart; one image for an edit."""
        return split(self.image, self.prompt.grid)


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
    # With the judge, since scores of two judges cannot be compared.
    if image.judged:
        if image.judged.score is not None:
            texts["score"] = f"{image.judged.score:.6f}"
        if judge:
            texts["judge"] = judge
    return texts


def save(image: GeneratedImage, path: Path, *, judge: str = "") -> None:
    """Write an image and, beside it, the panels of a set; the same image has the same bytes.

    Existing files of these names are replaced atomically; the command has checked that they were generated.
    """
    texts = recipe_texts(image, judge=judge)
    prompt = image.prompt
    # The panels with their own texts, then the image: where it is, its panels are.
    for position, (panel, file) in enumerate(zip(image.panels, panel_files(image, path), strict=False), 1):
        panel_text = {"panel": prompt.panels[position - 1]} if prompt.panels else {}
        write_atomic(file, png_bytes(panel, {**texts, "place": str(position), **panel_text}))
    write_atomic(path, png_bytes(image.image, texts))


def panel_files(image: GeneratedImage, path: Path) -> list[Path]:
    """Return the files of a set's panels; none for a single image."""
    count = image.prompt.grid.count
    return [path.with_name(f"{path.stem}-panel-{number}.png") for number in range(1, count + 1) if count > 1]


def to_dict(image: GeneratedImage, path: Path) -> dict[str, Any]:
    """Return the entry of an image and its file in the JSON of `pacorl generate`."""
    document: dict[str, Any] = {
        "file": str(path),
        "panels": list(map(str, panel_files(image, path))),
        "prompt": image.prompt.text,
        "layout": str(image.prompt.grid),
        **image.recipe,
        "tied": image.tied,
    }
    # Without a judge the keys are absent, rather than null.
    if judged := image.judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": judged.parts, "error": judged.error}
    return document
