"""Edits in files: a JSONL of {image, instruction} in the folder of its images.

    {"image": "photos/cat.jpg", "instruction": "Give it a top hat."}

`image` is a path within the JSONL's own folder, or a list of them for a model that takes several; `category` and
`task_name` may say what kind of edit it is, `panels` (a list of one) what the edited image is to show, `characters` and
`references` whom, as in records of sets (`records.prompts`). Published collections are converted to this form once
(`dataset.convert`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pacorl.io.documents import JsonObject, check_keys, typed, write_jsonl
from pacorl.io.files import existing, kept_digest, state_of, write_atomic
from pacorl.io.images import open_image
from pacorl.records.characters import Text, in_turn
from pacorl.types import Character, Prompt

NonBlank = Annotated[str, StringConstraints(pattern=r"\S")]
Name = Annotated[str, Field(min_length=1)]


class ShownCharacter(BaseModel):
    """A character in a record, under its name."""

    model_config = ConfigDict(extra="forbid")

    description: str = ""
    images: list[str] = []


class CastRecord(BaseModel):
    """What records of sets and of edits have in common."""

    category: str | None = None
    task_name: str | None = None
    characters: dict[Text, ShownCharacter] | list[Name] | None = None
    references: list[Name] | None = None


class EditRecord(CastRecord):
    """An edit."""

    image: Name | Annotated[list[Name], Field(min_length=1)]
    instruction: NonBlank
    panels: Annotated[list[str], Field(max_length=1)] = []
    """What the edited image is to show."""


Record = TypeVar("Record", bound=BaseModel)


def validated(record: Mapping[str, Any], kind: type[Record]) -> Record:
    """Validate a record; unknown keys are ignored unless they look misspelt. Raises ValueError naming the field."""
    check_keys(record, kind.model_fields, foreign=True)
    return typed(dict(record), kind)


def is_edit(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an edit."""
    return "instruction" in record or ("image" in record and "prompt" not in record)


def edit_prompt(record: Mapping[str, Any], number: int, *, folder: Path) -> Prompt:
    """Read a record as a prompt, and open its images once to check them.

    Raises:
        ValueError: if the instruction is missing, or an image is missing, unreadable or outside of `folder`.
    """
    edit = validated(record, EditRecord)
    names = edit.image if isinstance(edit.image, list) else [edit.image]
    return Prompt(
        id=number,
        text=edit.instruction.strip(),
        panels=tuple(edit.panels),
        sources=images_beside(names, folder),
        category=edit.category or "",
        task=edit.task_name or "",
        **shown_characters(edit, folder),
    )


def shown_characters(record: CastRecord, folder: Path) -> JsonObject:
    """Read the fields `characters` and `references` of a record in `folder`. Raises ValueError for unusable images."""
    cast = record.characters or {}
    listed = record.references
    if isinstance(cast, list):
        # References without a character's name belong to the only character.
        images = (listed or []) if len(cast) == 1 else []
        cast = {name: ShownCharacter(images=images) for name in cast}

    characters = []
    for name, entry in cast.items():
        characters.append(Character(name, entry.description.strip(), images_beside(entry.images, folder)))
    # References by default, or as the record lists them.
    references = in_turn([character.images for character in characters])
    if listed is not None:
        references = images_beside(listed, folder)
    return {"characters": tuple(characters), "references": references}


def images_beside(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Resolve the images that a record in `folder` names, each file opened once.

    Raises:
        ValueError: An image is missing, unreadable or outside of `folder`.
    """
    paths = []
    for name in names:
        # Tools write absolute paths too, which may lie inside.
        path = existing(folder, os.path.relpath(name, folder) if Path(name).is_absolute() else name)
        try:
            _check_image(path, *state_of(path))
        except OSError as error:
            raise ValueError(f"image {name!r} cannot be read ({error.strerror})") from None
        paths.append(path)
    return tuple(paths)


@lru_cache(maxsize=4096)
def _check_image(path: Path, size: int, changed: int) -> None:
    """Open an image, once for each state of its file: many records may have the images of one character."""
    open_image(path)


def character_fields(prompt: Prompt, path: Path) -> JsonObject:
    """Write the fields `characters` and `references` of a record in the file `path`; absent if they follow."""
    fields: JsonObject = {}
    for character in prompt.characters:
        entry = {"description": character.text, "images": copied_images(character.images, path)}
        fields.setdefault("characters", {})[character.name] = {key: value for key, value in entry.items() if value}
    if prompt.references != in_turn([character.images for character in prompt.characters]):
        fields["references"] = copied_images(prompt.references, path)
    return fields


def copied_images(images: Sequence[Path], path: Path) -> list[str]:
    """Copy images into the folder beside the file `path`, and return their names in it."""
    folder = path.parent / f"{path.stem}_images"
    names = []
    for image in images:
        # Named by content: two images may have one name, and many records may have one image.
        copy = folder / f"{kept_digest(image)[:32]}{image.suffix}"
        if copy.is_symlink() or not copy.is_file():
            write_atomic(copy, image.read_bytes())
        names.append(f"{folder.name}/{copy.name}")
    return names


def save_edits(prompts: Sequence[Prompt], path: Path) -> None:
    """Write edits as JSONL that `load_prompts` reads back, their images copied into a folder beside it."""
    rows = []
    for prompt in prompts:
        names = copied_images(prompt.sources, path)
        row = {"image": names if len(names) > 1 else names[0], "instruction": prompt.text}
        row |= {"category": prompt.category, "task_name": prompt.task, "panels": list(prompt.panels)}
        rows.append(row | character_fields(prompt, path))
    write_jsonl(path, rows)
