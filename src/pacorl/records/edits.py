"""Edits in files, in three forms.

A JSONL of {image, instruction} in the folder of its images:

    {"image": "photos/cat.jpg", "instruction": "Give it a top hat."}

`image` is a path within the JSONL's own folder, or a list of them for a model that takes several; `category` and
`task_name` may say what kind of edit it is, `panels` (a list of one) what the edited image is to show, `characters` and
`references` whom, as in records of sets (`records.prompts`). And two collections as they are published:

    load_gedit(Path("GEdit-Bench/data"))                       a file, or a folder of them; language="en" for one half
    load_sharegpt_4o(Path("text_and_image_to_image.json"))     images in its folder, as its archives unpack

The images of GEdit-Bench are inside the parquet. They are written once into a folder next to it. Only the needed
columns are read. An error names file and row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pacorl.io.documents import JsonObject, blamed_on, check_keys, read_json, typed, write_jsonl
from pacorl.io.files import inside, kept_digest, state_of, write_atomic
from pacorl.io.images import open_image
from pacorl.io.tables import parquet_file
from pacorl.records.characters import Text, in_turn
from pacorl.types import Character, Prompt

KEYS = ("image", "instruction", "category", "task_name", "panels", "characters", "references")
"""Keys of an edit's record."""
LANGUAGES = ("en", "cn")
COLUMNS = {"instruction": ("instruction", "prompt"), "image": ("input_image", "image")}
"""Our name → GEdit-Bench's column, and the column that the released preprocessing writes."""
MORE_COLUMNS = ("instruction_language", "task_type")
ROWS_PER_BATCH = 64
"""Rows in memory at a time, images included."""
SUFFIX_OF = {b"\x89PNG": ".png", b"\xff\xd8\xff": ".jpg", b"RIFF": ".webp"}


# --- JSONL -----------------------------------------------------------------------------------------------------


def is_edit(record: Mapping[str, Any]) -> bool:
    """Return whether a record is an edit."""
    return "instruction" in record or ("image" in record and "prompt" not in record)


def edit_prompt(record: Mapping[str, Any], number: int, *, folder: Path) -> Prompt:
    """Read a record as a prompt, and open its images once to check them.

    Raises:
        ValueError: if the instruction is missing, or an image is missing, unreadable or outside of `folder`.
    """
    check_keys(record, KEYS, foreign=True)
    # What to change, in which images, and what the edited image is to show.
    instruction = record.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError(f"'instruction' must be the text of an edit, got {instruction!r}")
    images = record.get("image")
    names: list[Any] = images if isinstance(images, list) else [images]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"'image' must be an image's path or a list of paths, got {images!r}")
    panels = record.get("panels", [])
    if not isinstance(panels, list) or len(panels) > 1 or not all(isinstance(panel, str) for panel in panels):
        raise ValueError(f"'panels' of an edit is a list of one text, what the image is to show; got {panels!r}")
    return Prompt(
        id=number,
        text=instruction.strip(),
        panels=tuple(panels),
        sources=images_beside(names, folder),
        category=str(record.get("category") or ""),
        task=str(record.get("task_name") or ""),
        **shown_characters(record, folder),
    )


class ShownCharacter(BaseModel):
    """A character in a record, under its name."""

    model_config = ConfigDict(extra="forbid")

    description: str = ""
    images: list[str] = []


def shown_characters(record: Mapping[str, Any], folder: Path) -> JsonObject:
    """Read the fields `characters` and `references` of a record in `folder`.

    Raises:
        ValueError: A field has another form, or an image cannot be used.
    """
    cast = record.get("characters", [])
    if isinstance(cast, dict):
        with blamed_on("'characters'"):
            entries = typed(cast, dict[Text, ShownCharacter])
    else:
        entries = {name: ShownCharacter() for name in _texts(record, "characters")}
        # References without a character's name belong to the only character.
        if len(entries) == 1:
            entries = {name: ShownCharacter(images=_texts(record, "references")) for name in entries}

    characters = []
    for name, entry in entries.items():
        characters.append(Character(name, entry.description.strip(), images_beside(entry.images, folder)))
    # References by default, or as the record lists them.
    references = in_turn([character.images for character in characters])
    if "references" in record:
        references = images_beside(_texts(record, "references"), folder)
    return {"characters": tuple(characters), "references": references}


def _texts(record: Mapping[str, Any], key: str) -> list[str]:
    value = record.get(key, [])
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ValueError(f"{key!r} must be a list of texts, got {value!r}")
    return value


def images_beside(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Resolve the images that a record in `folder` names, each file opened once.

    Raises:
        ValueError: An image is missing, unreadable or outside of `folder`.
    """
    for name in names:
        source = folder / name
        # Links are resolved too: a file from elsewhere must not send any image of this machine to a remote judge.
        if not source.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"image {name!r} is outside of {folder}; keep images in the folder of the JSONL")
        try:
            _check_image(source, *state_of(source))
        except OSError as error:
            raise ValueError(f"image {name!r} cannot be read ({error.strerror})") from None
    return tuple(folder / name for name in names)


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


# --- GEdit-Bench -----------------------------------------------------------------------------------------------


def load_gedit(path: Path, *, language: str = "") -> list[Prompt]:
    """Read the edits of one language, or of both; `id` is the index in the returned list.

    The input images are written to `<name>_images` next to the file, named by the hash of their bytes.

    Raises:
        ValueError: naming file and row, or the package to install.
    """
    if language not in ("", *LANGUAGES):
        raise ValueError(f"{path}: language {language!r} is none of {', '.join(LANGUAGES)}")
    # By name, the order of the hub's shards: an id is a position.
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path}: holds no .parquet files")
    # The images of all files go into one folder, named by content.
    folder = path.parent / f"{path.stem}_images"
    prompts: list[Prompt] = []
    for file in files:
        for number, row in enumerate(_rows(file), start=1):
            if language in ("", row.get("instruction_language")):
                prompts.append(_gedit_prompt(row, len(prompts), location=f"{file}, row {number}", folder=folder))
    if not prompts:
        suffix = f" in {language}" if language else ""
        raise ValueError(f"{path}: holds no edits{suffix}")
    return prompts


def _rows(path: Path) -> Iterator[JsonObject]:
    """Yield the rows with the columns renamed to ours."""
    with parquet_file(path) as file:
        names = file.schema_arrow.names
        columns = {name: name for name in MORE_COLUMNS if name in names}
        for ours, choices in COLUMNS.items():
            present = [name for name in choices if name in names]
            if not present:
                raise ValueError(f"{path}: has no column {' or '.join(choices)}; it has {', '.join(names)}")
            columns[present[0]] = ours
        # A few rows at a time: each holds images of megabytes.
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=list(columns)):
            for row in batch.to_pylist():
                yield {columns[name]: value for name, value in row.items()}


def _gedit_prompt(row: JsonObject, number: int, *, location: str, folder: Path) -> Prompt:
    # The row's text and image. The file is downloaded, so their types are checked.
    text = row["instruction"]
    image = row["image"]
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{location}: the instruction is missing or empty")
    if not isinstance(image, Mapping) or not image.get("bytes"):
        raise ValueError(f"{location}: the image has no bytes")
    data = image["bytes"]

    # Named by content: the two languages of an edit share one image, and `records.leaks` compares the bytes. The
    # dataset has no file names, so the suffix follows from the first bytes.
    suffix = ".img"
    for magic, file_type in SUFFIX_OF.items():
        if data.startswith(magic):
            suffix = file_type
    source = folder / f"{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
    if not source.exists():
        open_image(data, name=f"{location}, its image")  # raises
        write_atomic(source, data)
    return Prompt(
        id=number,
        text=text.strip(),
        sources=(source,),
        category=row.get("task_type") or "",
        task=row.get("instruction_language") or "",
    )


# --- ShareGPT-4o-Image -----------------------------------------------------------------------------------------


def load_sharegpt_4o(path: Path) -> list[Prompt]:
    """Read the records of `text_and_image_to_image.json`, or of `text_to_image.json`, which has no input images.

    `id` is the record's index.

    Raises:
        ValueError: naming file and record.
    """
    records = read_json(path)
    if not isinstance(records, list) or not records:
        raise ValueError(f"{path}: ShareGPT-4o-Image is a JSON list of records, this is none, or empty")
    prompts = []
    for number, record in enumerate(records):
        with blamed_on(f"{path}, record {number + 1}"):
            text = record.get("input_prompt") if isinstance(record, dict) else None
            if not isinstance(text, str) or not text.strip():
                raise ValueError("'input_prompt' is missing or empty")
            names = record.get("input_image") or []
            if isinstance(names, str):
                names = [names]
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"'input_image' must be a path or a list of paths, got {names!r}")
            sources = tuple(inside(path.parent, name) for name in names)
            for source in sources:
                # Not opened: there are 46,000.
                if not source.is_file():
                    fix = f"unpack the collection's archives into the folder of {path.name}"
                    raise ValueError(f"{source} is missing; {fix}")
        prompts.append(Prompt(id=number, text=text.strip(), sources=sources))
    return prompts
