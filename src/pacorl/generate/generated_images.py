"""Generated images with their recipes: in memory, as PNGs of grid images and panels, and on a page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL.Image import Image

from pacorl.core.grid import split
from pacorl.io.files import replacing, write_atomic
from pacorl.io.images import open_image, png_bytes
from pacorl.judge.pairwise import Matrix
from pacorl.report.figures import pair_matrix_svg, show
from pacorl.report.page import notebook_frame, render
from pacorl.types import Prompt, Size


@dataclass(frozen=True, slots=True)
class Recipe:
    """What generates an image again, beside its prompt; None is what the model does not read."""

    model: str
    """Checkpoint folder or hub name."""
    adapter: str
    """Folder, file or hub name; empty without one."""
    lora_scale: float | None
    """The adapter's strength: 1 is as it was trained."""
    seed: int
    """Of the initial noise."""
    size: Size
    """Of the image."""
    steps: int
    """Denoising steps."""
    guidance_scale: float | None
    """Under the name that the model's pipeline has for it."""
    true_cfg_scale: float | None
    """Of classifier-free guidance; 1 is without."""
    negative_prompt: str | None
    """What classifier-free guidance leads away from."""
    max_sequence_length: int | None
    """Most tokens that are read of a prompt."""
    version: str
    """pacorl's."""
    quantize: str | None = None
    """How the model's blocks were packed, by little memory."""


@dataclass(frozen=True, slots=True)
class Judged:
    """What a judge says of one image."""

    score: float | None
    """0..1; None if an answer is missing."""
    matrix: Matrix = ()
    """P(Yes) of every two panels of a set, None on the diagonal; empty for an edit."""
    parts: tuple[tuple[str, float | None], ...] = ()
    """What the score is made of, by name."""
    error: str = ""
    """Why there is no score."""


@dataclass(frozen=True, slots=True, repr=False)
class GeneratedImage:
    """An image with its recipe, and the judgement of it if there is a judge."""

    prompt: Prompt
    """What it shows."""
    image: Image
    """A grid image for a set."""
    recipe: Recipe
    """What makes it again."""
    judged: Judged | None = None
    """None without a judge."""
    rank: int = 1
    """Among its candidates, from 1."""
    candidates: int = 1
    """How many there were to choose from."""
    tied: int = 1
    """How many candidates tie with it, itself included: their scores differ by less than a judge resolves."""

    @property
    def panels(self) -> list[Image]:
        """The grid image cut apart; one image for an edit."""
        return split(self.image, self.prompt.grid)

    @property
    def place(self) -> str:
        """Its rank in words; a tie is named."""
        return f"number {self.rank} of {self.candidates}" + (f", a tie of {self.tied}" if self.tied > 1 else "")

    def __repr__(self) -> str:
        recipe, judged = self.recipe, self.judged
        facts = [repr(self.prompt.theme or self.prompt.text[:60]), str(recipe.size), f"seed {recipe.seed}"]
        facts += [f"score {judged.score:.4f}"] if judged and judged.score is not None else []
        facts += [self.place] if self.candidates > 1 else []
        return f"GeneratedImage({', '.join(facts)})"

    def _repr_html_(self) -> str:
        """What a notebook shows: the page of `pacorl generate --report`."""
        return notebook_frame(page_of([SavedImage(self, Path("image"), ())], title=self.prompt.theme or "An image"))


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image and its panels as files."""

    image: GeneratedImage
    path: Path
    panels: tuple[Path, ...]


def recipe_texts(image: GeneratedImage, *, judge: str = "") -> dict[str, str]:
    """The PNG text chunks of an image, which `io.images.png_texts` reads.

    `panels`, `sources` and `characters` are JSON lists.
    """
    prompt, recipe, judged = image.prompt, image.recipe, image.judged
    score = judged.score if judged else None
    texts = {
        "Software": f"pacorl {recipe.version}",
        "prompt": prompt.text,
        "layout": str(prompt.grid),
        "panels": json.dumps(list(prompt.panels), ensure_ascii=False),
        "sources": json.dumps([path.name for path in prompt.sources], ensure_ascii=False) if prompt.sources else None,
        "characters": json.dumps(list(prompt.characters), ensure_ascii=False) if prompt.characters else None,
        "seed": str(recipe.seed),
        "model": recipe.model,
        "adapter": recipe.adapter or None,
        "lora_scale": None if recipe.lora_scale is None else f"{recipe.lora_scale:g}",
        "size": str(recipe.size),
        "steps": str(recipe.steps),
        "guidance": None if recipe.guidance_scale is None else f"{recipe.guidance_scale:g}",
        "true_cfg_scale": None if recipe.true_cfg_scale is None else f"{recipe.true_cfg_scale:g}",
        "negative_prompt": recipe.negative_prompt,
        "max_sequence_length": None if recipe.max_sequence_length is None else str(recipe.max_sequence_length),
        "quantize": recipe.quantize,
        "version": recipe.version,
        "score": None if score is None else f"{score:.6f}",
        "judge": judge if judge and judged else None,
    }
    # An empty text stays: the empty negative prompt is one, and not the model's default.
    return {key: text for key, text in texts.items() if text is not None}


def save(images: Sequence[GeneratedImage], out: Path, *, judge: str = "", stem: str = "") -> list[SavedImage]:
    """Write each image, and the panels of a set beside it.

    Names are `STEM-NUMBER[-rank-RANK].png` and `…-panel-P.png`; the same call gives the same bytes. Existing files of
    these names are replaced, each whole; the command has checked that they were generated.
    """
    # As many digits for all, so that a folder lists them in order.
    width = len(str(len(images)))
    ranked = any(image.rank > 1 for image in images)
    saved, number = [], 0
    for image in images:
        number += image.rank == 1  # candidates of one image share its number
        rank = f"-rank-{image.rank}" if ranked else ""
        name = f"{stem or ('edit' if image.prompt.sources else 'set')}-{number:0{width}d}{rank}"
        saved.append(_save(image, out, name, judge=judge))
    return saved


def _save(image: GeneratedImage, out: Path, name: str, *, judge: str) -> SavedImage:
    texts = recipe_texts(image, judge=judge)
    write_atomic(out / f"{name}.png", png_bytes(image.image, texts))
    paths = []
    for position, panel in enumerate(image.panels if image.prompt.grid.count > 1 else [], 1):
        paths.append(out / f"{name}-panel-{position}.png")
        described = {"panel": image.prompt.panels[position - 1]} if image.prompt.panels else {}
        write_atomic(paths[-1], png_bytes(panel, {**texts, "place": str(position), **described}))
    return SavedImage(image, out / f"{name}.png", tuple(paths))


def save_pdf(images: Sequence[GeneratedImage], path: Path, *, title: str) -> Path:
    """Write one PDF with an image on each page."""
    pages = [image.image.convert("RGB") for image in images]
    with replacing(path) as temporary:
        pages[0].save(temporary, "PDF", save_all=True, append_images=pages[1:], title=title, producer="pacorl")
    return path


def to_dict(saved: SavedImage) -> dict[str, Any]:
    """The image in the JSON of `pacorl generate`."""
    image, recipe, judged = saved.image, saved.image.recipe, saved.image.judged
    document: dict[str, Any] = {
        "file": str(saved.path),
        "panels": [str(path) for path in saved.panels],
        "prompt": image.prompt.text,
        "layout": str(image.prompt.grid),
        "seed": recipe.seed,
        "lora_scale": recipe.lora_scale,
        "size": str(recipe.size),
        "steps": recipe.steps,
        "guidance": recipe.guidance_scale,
        "true_cfg_scale": recipe.true_cfg_scale,
        "negative_prompt": recipe.negative_prompt,
        "max_sequence_length": recipe.max_sequence_length,
        "quantize": recipe.quantize,
        "rank": image.rank,
        "candidates": image.candidates,
        "tied": image.tied,
    }
    if judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": dict(judged.parts), "error": judged.error}
    return document


def write_page(
    path: Path, saved: Sequence[SavedImage], *, title: str, notes: Sequence[str] = (), judge: str = ""
) -> Path:
    """Write `page_of` into a file."""
    write_atomic(path, page_of(saved, title=title, name=path.stem, notes=notes, judge=judge))
    return path


def page_of(
    saved: Sequence[SavedImage], *, title: str, name: str = "image", notes: Sequence[str] = (), judge: str = ""
) -> str:
    """One self-contained page of the images, their panels' texts, pair matrices and recipes."""
    return render(
        "generated.html",
        title=title,
        name=name,
        cards=[_card(image, judge=judge) for image in saved],
        notes=list(filter(None, notes)),
        judge=judge,
    )


def _card(saved: SavedImage, *, judge: str) -> dict[str, Any]:
    image, judged = saved.image, saved.image.judged
    shown_elsewhere = ("Software", "panels", "prompt", "score", "judge", "layout")
    facts = {key: text for key, text in recipe_texts(image, judge=judge).items() if key not in shown_elsewhere}
    return {
        "name": saved.path.name,
        "image": show(image.image),
        "sources": [show(open_image(path)) for path in image.prompt.sources],
        "captions": image.prompt.panels or (image.prompt.text,),
        "matrix": pair_matrix_svg(judged.matrix) if judged and len(judged.matrix) > 1 else Markup(""),
        "score": judged.score if judged else None,
        "tie": f", a tie of {image.tied}" if image.tied > 1 else "",
        "facts": facts,
    }
