"""Pictures on the disk: sheets and panels as PNGs that say what made them, and one page that shows them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from PIL import Image

from pacorl.generate.sets import Made
from pacorl.io.files import write_atomic
from pacorl.io.images import png_bytes
from pacorl.report import pair_matrix_svg, render
from pacorl.report.images import Picture, show


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a picture and its panels lie."""

    made: Made
    sheet: Path
    panels: tuple[Path, ...]


def recipe_texts(made: Made, *, judge: str = "") -> dict[str, str]:
    """The PNG text chunks of a picture, a text each; `panels` and `sources` are JSON lists."""
    prompt, recipe, judged = made.prompt, made.recipe, made.judged
    known = {
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
    return {key: text for key, text in known.items() if text}


def read_recipe(path: Path) -> dict[str, str]:
    """The text chunks of a picture; empty for one without."""
    with Image.open(path) as image:
        image.load()
        return {str(key): str(value) for key, value in image.info.items() if isinstance(value, str)}


def save(made: Sequence[Made], out: Path, *, judge: str = "", stem: str = "") -> list[Saved]:
    """Writes each picture, and the panels of a set beside it; returns where.

    Names are `STEM-NUMBER[-rank-RANK].png` and `…-panel-P.png`; the same call gives the same bytes. Existing files of
    these names are replaced, each whole.
    """
    out.mkdir(parents=True, exist_ok=True)
    width = len(str(len(made)))
    several = any(one.rank > 1 for one in made)
    saved, number = [], 0
    for one in made:
        number += one.rank == 1
        rank = f"-rank-{one.rank}" if several else ""
        name = f"{stem or ('edit' if one.prompt.sources else 'set')}-{number:0{width}d}{rank}"
        saved.append(_save_one(one, out, name, judge=judge))
    return saved


def _save_one(made: Made, out: Path, name: str, *, judge: str) -> Saved:
    texts = recipe_texts(made, judge=judge)
    sheet = out / f"{name}.png"
    write_atomic(sheet, png_bytes(made.sheet, texts))
    if made.prompt.grid.count == 1:
        return Saved(made, sheet, ())
    panels = []
    for place, panel in enumerate(made.panels, 1):
        panels.append(out / f"{name}-panel-{place}.png")
        own = {"panel": made.prompt.panels[place - 1]} if made.prompt.panels else {}
        write_atomic(panels[-1], png_bytes(panel, {**texts, "place": str(place), **own}))
    return Saved(made, sheet, tuple(panels))


def save_pdf(made: Sequence[Made], path: Path, *, title: str) -> Path:
    """The pages as one PDF, a sheet each."""
    sheets = [one.sheet.convert("RGB") for one in made]
    sheets[0].save(path, "PDF", save_all=True, append_images=sheets[1:], title=title, producer="pacorl")
    return path


def to_dict(saved: Saved) -> dict[str, Any]:
    """What `--json` prints of a picture."""
    made, judged = saved.made, saved.made.judged
    document: dict[str, Any] = {
        "file": str(saved.sheet),
        "panels": [str(path) for path in saved.panels],
        "prompt": made.prompt.text,
        "layout": str(made.prompt.grid),
        "seed": made.recipe.seed,
        "size": str(made.recipe.size),
        "steps": made.recipe.steps,
        "guidance": made.recipe.guidance_scale,
        "rank": made.rank,
        "candidates": made.candidates,
    }
    if judged:
        document |= {"score": judged.score, "pairs": judged.matrix, "parts": dict(judged.parts), "error": judged.error}
    return document


# --- the page --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Card:
    """One picture on the page."""

    name: str
    picture: Picture
    source: Picture | None
    captions: tuple[str, ...]
    matrix: Markup
    score: float | None
    facts: Mapping[str, str]


def write_page(path: Path, saved: Sequence[Saved], *, title: str, notes: Sequence[str] = (), judge: str = "") -> Path:
    """One self-contained page of the pictures, their panels' texts, pair matrices and recipes."""
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


def _card(saved: Saved, *, judge: str) -> Card:
    made, judged = saved.made, saved.made.judged
    facts = recipe_texts(made, judge=judge)
    hidden = ("Software", "panels", "prompt", "score", "judge", "layout")
    matrix = pair_matrix_svg(judged.matrix) if judged and len(judged.matrix) > 1 else Markup("")
    source = None
    if made.prompt.sources:
        with Image.open(made.prompt.sources[0]) as opened:
            source = show(opened.convert("RGB"))
    return Card(
        name=saved.sheet.name,
        picture=show(made.sheet),
        source=source,
        captions=made.prompt.panels or (made.prompt.text,),
        matrix=matrix,
        score=judged.score if judged else None,
        facts={key: text for key, text in facts.items() if key not in hidden},
    )
