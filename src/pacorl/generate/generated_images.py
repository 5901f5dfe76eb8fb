"""Generated images with their recipes: in memory, and as PNGs of grid images and panels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.judge.pairwise import Matrix
from pacorl.types import Prompt, Size


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings that, with its prompt, reproduce an image; None if the model ignores a setting.

    Attributes:
        model: Checkpoint folder or hub name.
        adapter: Folders, files or hub names with strengths that are not 1, as `--adapter` takes them; empty without
            one.
        seed: Seed of the initial noise.
        size: Size of the image, or of a separate panel.
        steps: Denoising steps.
        guidance_scale: `guidance_scale` of the model's pipeline.
        true_cfg_scale: Scale of classifier-free guidance; 1 disables it.
        negative_prompt: Negative prompt of classifier-free guidance.
        max_sequence_length: Maximum number of prompt tokens.
        version: Version of pacorl.
        quantize: Quantization of the model's blocks.
        separate: Whether each panel was generated as an image of its own.
    """

    model: str
    adapter: str
    seed: int
    size: Size
    steps: int
    guidance_scale: float | None
    true_cfg_scale: float | None
    negative_prompt: str | None
    max_sequence_length: int | None
    version: str
    quantize: str | None = None
    separate: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name, for JSON."""
        return asdict(self) | {"size": str(self.size)}


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
    """

    prompt: Prompt
    image: Image
    recipe: Recipe
    judged: Judged | None = None
    rank: int = 1
    candidates: int = 1
    tied: int = 1

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


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image and its panels as files.

    Attributes:
        image: The image, with its recipe.
        path: File of the image.
        panels: Files of its panels; empty for a single image.
    """

    image: GeneratedImage
    path: Path
    panels: tuple[Path, ...]


def recipe_texts(image: GeneratedImage, *, judge: str = "") -> dict[str, str]:
    """Return the PNG text chunks of an image, for `io.images.png_texts`.

    `panels`, `sources`, `characters` and `references` are JSON lists.
    """
    prompt = image.prompt
    score = image.judged.score if image.judged else None
    settings = {}
    for name, value in image.recipe.to_dict().items():
        # An empty negative prompt stays: it differs from the model's default.
        if value is not None and value is not False and (value or name != "adapter"):
            settings[name] = f"{value:g}" if isinstance(value, float) else str(value)
    texts: dict[str, str | None] = {
        "Software": f"pacorl {image.recipe.version}",
        "prompt": prompt.text,
        "layout": str(prompt.grid),
        "theme": prompt.theme or None,
        "panels": _json_list(prompt.panels) or "[]",
        "sources": _json_list([path.name for path in prompt.sources]),
        "characters": _json_list([character.name for character in prompt.characters]),
        "references": _json_list([path.name for path in prompt.references]),
        **settings,
        "score": None if score is None else f"{score:.6f}",
        "judge": judge if judge and image.judged else None,
    }
    return {key: text for key, text in texts.items() if text is not None}


def _json_list(texts: Sequence[str]) -> str | None:
    if not texts:
        return None
    return json.dumps(list(texts), ensure_ascii=False)


def save(images: Sequence[GeneratedImage], out: Path, *, judge: str = "", stem: str = "set") -> list[SavedImage]:
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
        path = out / f"{name}.png"
        write_atomic(path, png_bytes(image.image, texts))
        panel_paths = []
        for position, panel in enumerate(image.panels if prompt.grid.count > 1 else [], 1):
            panel_texts = {**texts, "place": str(position)}
            if prompt.panels:
                panel_texts["panel"] = prompt.panels[position - 1]
            panel_path = out / f"{name}-panel-{position}.png"
            write_atomic(panel_path, png_bytes(panel, panel_texts))
            panel_paths.append(panel_path)
        saved.append(SavedImage(image, path, tuple(panel_paths)))
    return saved


def to_dict(saved: SavedImage) -> dict[str, Any]:
    """Return an image's entry in the JSON of `pacorl generate`."""
    # The image, its recipe and its score.
    image = saved.image
    judged = image.judged
    document: dict[str, Any] = {
        "file": str(saved.path),
        "panels": [str(path) for path in saved.panels],
        "prompt": image.prompt.text,
        "layout": str(image.prompt.grid),
        **image.recipe.to_dict(),
        "rank": image.rank,
        "candidates": image.candidates,
        "tied": image.tied,
    }
    # Without a judge the keys are absent, rather than null.
    if judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": judged.parts, "error": judged.error}
    return document
