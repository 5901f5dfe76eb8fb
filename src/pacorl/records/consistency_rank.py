"""ConsistencyRank's folder, the only reader and writer: rankings of sub-figures by people.

images/FOLDER/GRID_PANEL.png
prompt_data.jsonl               {idx, prompt, criteria}, a folder's prompt
consistency_full_rank.jsonl     {folder, ref_image, comp_images, rank_images}, a reference with its candidates;
                                of an export also `family`, one of folders that share images or a theme
"""

from collections.abc import Sequence
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

    model_config = ConfigDict(frozen=True)

    folder: str
    # Releases differ in the names of two columns.
    ref_image: Annotated[str, Field(validation_alias=AliasChoices("ref_image", "ref_img"))]
    comp_images: Annotated[list[str], Field(validation_alias=AliasChoices("comp_images", "comparison_images"))]
    """Candidates."""
    rank_images: list[str]
    """Candidates, best first."""
    category: Text = ""
    prompt: Text = ""
    criteria: Criteria = {}
    family: Text = ""

    @property
    def key(self) -> str:
        """Name of the item: a reference is ranked several times, with other candidates each time."""
        return f"{self.folder}/{self.ref_image}: {' '.join(self.comp_images)}"


def load_ranked(folder: Path) -> list[Ranked]:
    """Read the rankings, each with the prompt and the criteria of its folder.

    Raises:
        ValueError: naming the file and the line of a fault, or the missing file.
    """
    prompts = {row.idx: row for row in read_records(folder / PROMPTS, partial(typed, kind=FolderPrompt), fix=FIX)}

    def ranked(row: JsonObject) -> Ranked:
        item = typed(row, Ranked)
        candidates = item.comp_images
        if len(set(candidates)) < max(2, len(candidates)) or sorted(item.rank_images) != sorted(candidates):
            raise ValueError(f"rank_images {item.rank_images} is no order of two different comp_images or more")
        if item.folder not in prompts:
            raise ValueError(f"folder {item.folder!r} has no record in {PROMPTS}")
        # Missing files are reported now, not after hours of judging.
        for name in (item.ref_image, *candidates):
            existing(folder / IMAGES, f"{item.folder}/{name}")
        prompt = prompts[item.folder]
        return item.model_copy(update={"prompt": prompt.prompt, "criteria": prompt.criteria})

    return read_records(folder / RANKS, ranked, fix=FIX)


def save_ranked(items: Sequence[Ranked], folder: Path) -> list[Path]:
    """Write the lists of a folder, whose images are there already. Returns the written files."""
    prompts = {item.folder: {"idx": item.folder, "prompt": item.prompt, "criteria": item.criteria} for item in items}
    write_jsonl(folder / PROMPTS, prompts.values())
    write_jsonl(folder / RANKS, (item.model_dump(exclude={"prompt", "criteria"}) for item in items))
    return [folder / PROMPTS, folder / RANKS]
