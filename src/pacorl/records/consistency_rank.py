"""ConsistencyRank's folder, the only reader and writer: rankings of sub-figures by people.

images/FOLDER/GRID_PANEL.png
prompt_data.jsonl               {idx, prompt, criteria}, a folder's prompt
consistency_full_rank.jsonl     {folder, ref_image, comp_images, rank_images}, a reference with its candidates
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from pacorl.io.documents import JsonObject, read_records, typed, write_jsonl
from pacorl.io.files import existing
from pacorl.records.fields import Criteria, Text, Word

IMAGES = "images"
PROMPTS = "prompt_data.jsonl"
RANKS = "consistency_full_rank.jsonl"
FIX = "give the folder of ConsistencyRank-Bench as published"


class FolderPrompt(BaseModel):
    """A line of PROMPTS."""

    idx: Word
    prompt: Text = ""
    criteria: Criteria = {}


class Ranked(BaseModel):
    """A line of RANKS: a reference and its candidates, and their order by people; images are named within `folder`."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    folder: str
    # Releases differ in the names of two columns.
    reference: Annotated[str, Field(validation_alias=AliasChoices("ref_image", "ref_img"))]
    candidates: Annotated[list[str], Field(validation_alias=AliasChoices("comp_images", "comparison_images"))]
    best_first: Annotated[list[str], Field(validation_alias="rank_images")]
    category: Text = ""
    prompt: Text = ""
    criteria: Criteria = {}

    @property
    def key(self) -> str:
        """Name of the item: a reference is ranked several times, with other candidates each time."""
        return f"{self.folder}/{self.reference}: {' '.join(self.candidates)}"


def load_ranked(folder: Path) -> list[Ranked]:
    """Read the rankings, each with the prompt and the criteria of its folder.

    Raises:
        ValueError: naming the file and the line of a fault, or the missing file.
    """
    read_prompt = partial(typed, kind=FolderPrompt)
    prompts = {row.idx: row for row in read_records(folder / PROMPTS, read_prompt, fix=FIX)}
    read_rank = partial(_ranked, prompts=prompts, images=folder / IMAGES)
    return read_records(folder / RANKS, read_rank, fix=FIX)


def _ranked(row: JsonObject, prompts: Mapping[str, FolderPrompt], images: Path) -> Ranked:
    item = typed(row, Ranked)
    if len(set(item.candidates)) < len(item.candidates) or len(item.candidates) < 2:
        raise ValueError(f"needs two different candidates or more, got {item.candidates}")
    if sorted(item.best_first) != sorted(item.candidates):
        raise ValueError(f"rank_images {item.best_first} is no order of comp_images {item.candidates}")
    if item.folder not in prompts:
        raise ValueError(f"folder {item.folder!r} has no record in {PROMPTS}")
    # Missing files are reported now, not after hours of judging.
    for name in (item.reference, *item.candidates):
        existing(images, f"{item.folder}/{name}")
    prompt = prompts[item.folder]
    return item.model_copy(update={"prompt": prompt.prompt, "criteria": prompt.criteria})


def save_ranked(items: Iterable[Ranked], folder: Path) -> list[Path]:
    """Write the lists of a folder, whose images are there already. Returns the written files."""
    prompts: dict[str, JsonObject] = {}
    rows = []
    for item in items:
        prompts[item.folder] = {"idx": item.folder, "prompt": item.prompt, "criteria": item.criteria}
        row: JsonObject = {"folder": item.folder, "ref_image": item.reference, "comp_images": item.candidates}
        rows.append(row | {"rank_images": item.best_first, "category": item.category})
    write_jsonl(folder / PROMPTS, prompts.values())
    write_jsonl(folder / RANKS, rows)
    return [folder / PROMPTS, folder / RANKS]
