"""Characters as folders: `characters/NAME/` with `card.yaml` and 1 to 14 images.

description: a young dentist in light-blue scrubs
keep: {face: round glasses, hair: black hair in a low bun}     # any of face, hair, outfit, palette
may_change: [pose, expression]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain, zip_longest
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pacorl.io.documents import blamed_on, dump_yaml, read_object, read_yaml, text_field, typed
from pacorl.io.files import read_bytes, write_atomic
from pacorl.io.images import images_in, open_image
from pacorl.types import Character, Prompt

FOLDER = "characters"
CARD = "card.yaml"
MAX_IMAGES = 14

Text = Annotated[str, Field(min_length=1, max_length=2000)]


class Card(BaseModel):
    """The content of card.yaml."""

    model_config = ConfigDict(extra="forbid")

    description: Text
    keep: dict[Literal["face", "hair", "outfit", "palette"], Text] = {}
    may_change: list[Text] = []


def find_character(name: str, folder: Path = Path(), *, least: int = 1, most: int = MAX_IMAGES) -> Character:
    """Read the character of a name in `folder`/characters, or of a folder, with `least` to `most` images.

    Raises:
        ValueError: if it does not exist, with the names of the existing characters, or cannot be used.
    """
    paths = list(dict.fromkeys([folder / FOLDER / name, folder / name]))  # the same one if the name is absolute
    for path in paths:
        if (path / CARD).is_file():
            return read_character(path, least=least, most=most)

    for path in paths:
        if path.is_dir():
            raise ValueError(
                f"{path} has no {CARD}, which describes the character, e.g. 'description: a red round hero'"
            )
    names = sorted(card.parent.name for card in (folder / FOLDER).glob(f"*/{CARD}"))
    fix = f"there are {', '.join(names)}" if names else f"make a folder with a {CARD} and images"
    raise ValueError(f"there is no character {name!r} at {' or '.join(map(str, paths))}; {fix}")


def read_character(folder: Path, *, least: int = 1, most: int = MAX_IMAGES) -> Character:
    """Read a character's folder with `least` to `most` images.

    Raises:
        ValueError: if its card or an image cannot be used; it names the file.
    """
    path = folder / CARD
    document = read_yaml(path)
    with blamed_on(path):
        card = typed(document, Card)
    images = images_in(folder)
    if not least <= len(images) <= most:
        purpose = "in training " if least > 1 else ""
        raise ValueError(f"{folder} has {len(images)} images; a character has {purpose}{least} to {most}")
    # Opened now: a damaged image must not stop a training hours later.
    for image in images:
        open_image(image)
    name = folder.resolve().name
    keep = {}
    for trait, looks in card.keep.items():
        keep[str(trait)] = looks
    return Character(name, card.description.strip(), images, keep, tuple(card.may_change))


def in_turn(images: Sequence[Sequence[Path]]) -> tuple[Path, ...]:
    """Order the images of some characters as references: the first of each, then the second of each."""
    rounds = chain.from_iterable(zip_longest(*images))
    return tuple(path for path in rounds if path)


def characters_of(prompt: Prompt) -> list[list[Character]]:
    """List the characters with images that each panel's text names, by name or by description.

    If no text names a character, every panel has all of them.
    """
    texts = prompt.panels or (prompt.text,) * prompt.grid.count
    casts = []
    for text in texts:
        folded = text.casefold()
        cast = []
        for character in prompt.characters:
            # Its name as whole words, or its description.
            name = re.escape(character.name.replace("_", " ").casefold())
            is_described = character.text and character.text.casefold() in folded
            if is_described or re.search(rf"(?<!\w){name}(?!\w)", folded.replace("_", " ")):
                cast.append(character)
        casts.append(cast)
    if not any(casts):
        casts = [list(prompt.characters)] * prompt.grid.count
    return [[character for character in cast if character.images] for cast in casts]


def import_vistorybench(source: Path, out: Path) -> list[Path]:
    """Copy the characters of a ViStoryBench folder, or of one of its stories, as `out`/STORY-CHARACTER.

    Raises:
        ValueError: if a story cannot be read, an image is unusable, or a folder exists already.
    """
    # One story, or a folder of stories.
    paths = [source / "story.json"]
    if not paths[0].is_file():
        paths = sorted(source.glob("*/story.json"), key=attrgetter("parent"))
    if not paths:
        raise ValueError(f"{source} has no story.json, nor has a folder in it; name ViStoryBench's folder of stories")

    folders = []
    for path in paths:
        characters = read_object(path).get("Characters")
        if not isinstance(characters, dict):
            raise ValueError(f"{path}: 'Characters' must map names to descriptions, got {characters!r}")
        story = path.parent
        for name, entry in characters.items():
            with blamed_on(f"{path}: {name}"):
                folders.append(_import_character(story, name, entry, out / f"{story.resolve().name}-{name}"))
    return folders


def _import_character(story: Path, name: str, entry: Any, folder: Path) -> Path:
    if Path(name).name != name:
        raise ValueError("the name of a character is no name of a folder")
    if not isinstance(entry, dict) or not (description := text_field(entry, "prompt_en")):
        raise ValueError("'prompt_en' is missing; give the character's description")
    if folder.exists():
        raise ValueError(f"{folder} exists; name another folder, or remove it")
    images = images_in(story / "image" / name)[:MAX_IMAGES]
    if not images:
        raise ValueError(f"there is no image in {story / 'image' / name}")
    for image in images:
        # Opened before it is written: a copied image is a usable one.
        content = read_bytes(image)
        open_image(content, name=str(image))
        write_atomic(folder / image.name, content)
    write_atomic(folder / CARD, dump_yaml({"description": description}))
    return folder
