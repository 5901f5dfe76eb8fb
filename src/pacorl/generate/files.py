"""Images on the disk: grid images and panels as PNGs with their recipe, and one page that shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from pacorl.generate.sets import GeneratedImage
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.report import pair_matrix_svg, render
from pacorl.report.figures import ShownImage, show


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image and its panels as files."""

    image: GeneratedImage
    path: Path
    panels: tuple[Path, ...]


def recipe_texts(image: GeneratedImage, *, judge: str = "") -> dict[str, str]:
    """The PNG text chunks of an image, which `read_recipe` reads; `panels` and `sources` are JSON lists."""
    prompt, recipe, judged = image.prompt, image.recipe, image.judged
    texts = {
        "Software": f"pacorl {recipe.version}",
        "prompt": prompt.text,
        "layout": str(prompt.grid),
        "panels": json.dumps(list(prompt.panels), ensure_ascii=False),
        "sources": json.dumps([path.name for path in prompt.sources], ensure_ascii=False) if prompt.sources else "",
        "seed": str(recipe.seed),
        "model": recipe.model,
        "adapter": recipe.adapter,
        "size": str(recipe.size),
        "steps": str(recipe.steps),
        "guidance": "" if recipe.guidance_scale is None else f"{recipe.guidance_scale:g}",
        "true_cfg_scale": "" if recipe.true_cfg_scale is None else f"{recipe.true_cfg_scale:g}",
        "version": recipe.version,
        "score": "" if judged is None or judged.score is None else f"{judged.score:.6f}",
        "judge": judge if judged else "",
    }
    return {key: text for key, text in texts.items() if text}


def read_recipe(path: Path) -> dict[str, str]:
    """The text chunks of an image, as `recipe_texts` wrote them; empty for one without."""
    with Image.open(path) as image:
        image.load()
        return {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}


def save(images: Sequence[GeneratedImage], out: Path, *, judge: str = "", stem: str = "") -> list[SavedImage]:
    """Writes each image, and the panels of a set beside it.

    Names are `STEM-NUMBER[-rank-RANK].png` and `…-panel-P.png`; the same call gives the same bytes. Existing files of
    these names are replaced, each whole.
    """
    out.mkdir(parents=True, exist_ok=True)
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
    path = out / f"{name}.png"
    write_atomic(path, png_bytes(image.image, texts))
    if image.prompt.grid.count == 1:
        return SavedImage(image, path, ())
    panels = []
    for place, panel in enumerate(image.panels, 1):
        panels.append(out / f"{name}-panel-{place}.png")
        own = {"panel": image.prompt.panels[place - 1]} if image.prompt.panels else {}
        write_atomic(panels[-1], png_bytes(panel, {**texts, "place": str(place), **own}))
    return SavedImage(image, path, tuple(panels))


def save_pdf(images: Sequence[GeneratedImage], path: Path, *, title: str) -> Path:
    """Writes one PDF with an image on each page."""
    pages = [image.image.convert("RGB") for image in images]
    pages[0].save(path, "PDF", save_all=True, append_images=pages[1:], title=title, producer="pacorl")
    return path


def to_dict(saved: SavedImage) -> dict[str, Any]:
    """The image in the JSON of `pacorl generate`."""
    image, judged = saved.image, saved.image.judged
    document: dict[str, Any] = {
        "file": str(saved.path),
        "panels": [str(path) for path in saved.panels],
        "prompt": image.prompt.text,
        "layout": str(image.prompt.grid),
        "seed": image.recipe.seed,
        "size": str(image.recipe.size),
        "steps": image.recipe.steps,
        "guidance": image.recipe.guidance_scale,
        "rank": image.rank,
        "candidates": image.candidates,
    }
    if judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": dict(judged.parts), "error": judged.error}
    return document


# --- the page --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """An image on the page."""

    name: str
    picture: ShownImage
    source: ShownImage | None
    captions: tuple[str, ...]
    matrix: Markup
    score: float | None
    facts: Mapping[str, str]


def write_page(
    path: Path, saved: Sequence[SavedImage], *, title: str, notes: Sequence[str] = (), judge: str = ""
) -> Path:
    """Writes one self-contained page of the images, their panels' texts, pair matrices and recipes."""
    page = render(
        "generated.html",
        title=title,
        name=path.stem,
        cards=[_card(one, judge=judge) for one in saved],
        notes=list(filter(None, notes)),
        judge=judge,
    )
    write_atomic(path, page)
    return path


def _card(saved: SavedImage, *, judge: str) -> Card:
    image, judged = saved.image, saved.image.judged
    facts = recipe_texts(image, judge=judge)
    hidden = ("Software", "panels", "prompt", "score", "judge", "layout")
    matrix = pair_matrix_svg(judged.matrix) if judged and len(judged.matrix) > 1 else Markup("")
    source = None
    if image.prompt.sources:
        with Image.open(image.prompt.sources[0]) as opened:
            source = show(opened.convert("RGB"))
    return Card(
        name=saved.path.name,
        picture=show(image.image),
        source=source,
        captions=image.prompt.panels or (image.prompt.text,),
        matrix=matrix,
        score=judged.score if judged else None,
        facts={key: text for key, text in facts.items() if key not in hidden},
    )
