"""ConsistencyRank's folder, the only reader and writer: rankings of sub-figures by people.

images/FOLDER/GRID_PANEL.png
prompt_data.jsonl               {idx, prompt, criteria}, a folder's prompt
consistency_full_rank.jsonl     {folder, ref_image, comp_images, rank_images}, a reference with its candidates
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field

from pacorl.io.documents import JsonObject, blamed_on, read_jsonl, typed, write_jsonl
from pacorl.io.files import existing
from pacorl.records.criteria import PublishedCriteria, written

IMAGES = "images"
PROMPTS = "prompt_data.jsonl"
RANKS = "consistency_full_rank.jsonl"


@dataclass(frozen=True, slots=True)
class Ranked:
    """A reference, its candidates, and their order by people; images are named within their folder."""

    folder: str
    reference: str
    candidates: tuple[str, ...]
    best_first: tuple[str, ...]
    category: str = ""
    prompt: str = ""
    criteria: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Name of the item: a reference is ranked several times, with other candidates each time."""
        return f"{self.folder}/{self.reference}: {' '.join(self.candidates)}"


class RankRow(BaseModel):
    """A line of RANKS; releases differ in the names of two columns."""

    folder: str
    reference: Annotated[str, Field(validation_alias=AliasChoices("ref_image", "ref_img"))]
    candidates: Annotated[list[str], Field(validation_alias=AliasChoices("comp_images", "comparison_images"))]
    best_first: Annotated[list[str], Field(validation_alias="rank_images")]
    category: str | None = None


class PromptRow(BaseModel):
    """A line of PROMPTS."""

    prompt: str | None = None
    category: str | None = None
    criteria: PublishedCriteria | None = None


def rank_rows(folder: Path) -> dict[str, tuple[JsonObject, Mapping[str, JsonObject]]]:
    """Read the lines of RANKS by their place, each with the prompts by folder, for `ranked_of`.

    Raises:
        ValueError: it is no such folder, or a file is damaged.
    """
    for name in (IMAGES, PROMPTS, RANKS):
        if not (folder / name).exists():
            raise ValueError(f"{folder / name} is missing; give the folder of ConsistencyRank-Bench as published")
    prompts = {str(row.get("idx")): row for row in read_jsonl(folder / PROMPTS)}
    rows = enumerate(read_jsonl(folder / RANKS), 1)
    return {f"{folder / RANKS}, record {number}": (row, prompts) for number, row in rows}


def ranked_of(row: JsonObject, prompts: Mapping[str, JsonObject], *, images: Path) -> Ranked:
    """Read a line of RANKS. Raises ValueError if it is no ranking, or an image is missing."""
    given = typed(row, RankRow)
    if len(set(given.candidates)) < len(given.candidates) or len(given.candidates) < 2:
        raise ValueError(f"needs two different candidates or more, got {given.candidates}")
    if sorted(given.best_first) != sorted(given.candidates):
        raise ValueError(f"rank_images {given.best_first} is no order of comp_images {given.candidates}")
    if given.folder not in prompts:
        raise ValueError(f"folder {given.folder!r} has no record in {PROMPTS}")
    with blamed_on(f"{PROMPTS}, {given.folder!r}"):
        prompt = typed({key: prompts[given.folder].get(key) for key in PromptRow.model_fields}, PromptRow)
    # Missing files are reported now, not after hours of judging.
    for name in (given.reference, *given.candidates):
        existing(images, f"{given.folder}/{name}")
    return Ranked(
        folder=given.folder,
        reference=given.reference,
        candidates=tuple(given.candidates),
        best_first=tuple(given.best_first),
        category=given.category or prompt.category or "",
        prompt=prompt.prompt or "",
        criteria=written(prompt.criteria),
    )


def save_ranked(items: Iterable[Ranked], folder: Path) -> list[Path]:
    """Write the lists of a folder, whose images are there already. Returns the written files."""
    prompts: dict[str, JsonObject] = {}
    rows = []
    for item in items:
        prompts[item.folder] = {"idx": item.folder, "prompt": item.prompt, "criteria": item.criteria}
        row: JsonObject = {"folder": item.folder, "ref_image": item.reference, "comp_images": list(item.candidates)}
        rows.append(row | {"rank_images": list(item.best_first)})
    write_jsonl(folder / PROMPTS, prompts.values())
    write_jsonl(folder / RANKS, rows)
    return [folder / PROMPTS, folder / RANKS]
