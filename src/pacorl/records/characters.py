"""Characters as folders: `characters/NAME/` with `card.yaml` and 1 to 14 images.

description: a young dentist in light-blue scrubs
keep: {face: round glasses, hair: black hair in a low bun}     # any of face, hair, outfit, palette
"""

import re
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from pacorl.io.documents import blamed_on, read_text, read_yaml, typed
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


def find_character(name: str, folder: Path = Path(), *, least: int = 1, most: int = MAX_IMAGES) -> Character:
    """Read the character of a name in `folder`/characters, or of a folder, with `least` to `most` images.

    Raises:
        ValueError: if it does not exist, with the names of the existing characters, or cannot be used.
    """
    for path in (folder / FOLDER / name, folder / name):
        if path.is_dir():
            return read_character(path, least=least, most=most)
    names = sorted(card.parent.name for card in (folder / FOLDER).glob(f"*/{CARD}"))
    raise ValueError(
        f"there is no character {name!r}: {folder / FOLDER} has {', '.join(names) or 'none'}; a character is a folder "
        f"with a {CARD} and images, named by its path or, in {FOLDER}/, by its name"
    )


def read_character(folder: Path, *, least: int = 1, most: int = MAX_IMAGES) -> Character:
    """Read a character's folder with `least` to `most` images.

    Raises:
        ValueError: if its card or an image cannot be used; it names the file.
    """
    path = folder / CARD
    if not path.is_file():
        raise ValueError(f"{folder} has no {CARD}; write `description: ` and what the character is into it")
    document = read_yaml(path)
    with blamed_on(path):
        card = typed(document, Card)
    images = images_in(folder)
    if not least <= len(images) <= most:
        raise ValueError(f"{folder} has {len(images)} images; {least} to {most} are needed")
    # Opened now: a damaged image must not stop a training hours later.
    for image in images:
        open_image(image)
    keep = {str(trait): looks for trait, looks in card.keep.items()}
    return Character(folder.resolve().name, card.description.strip(), images, keep)


def read_caption(image: Path) -> tuple[Path | None, str]:
    """Read an image's caption from its .txt file: the path (None if it is missing) and the text."""
    file = image.with_suffix(".txt")
    if not file.is_file():
        return None, ""
    return file, " ".join(read_text(file).split())


def in_turn(characters: Sequence[Character]) -> tuple[Path, ...]:
    """Order the images of some characters as references: the first of each, then the second of each."""
    images = [character.images for character in characters]
    rounds = chain.from_iterable(zip_longest(*images))
    return tuple(path for path in rounds if path)


def characters_of(prompt: Prompt) -> list[list[Character]]:
    """List the characters with images that each panel's text names, by name or by description.

    If no text names a character, every panel has all of them.
    """
    casts = []
    for text in prompt.panels or (prompt.text,) * prompt.grid.count:
        folded = text.casefold()
        cast = []
        for character in prompt.characters:
            # Named by its name, as whole words, or by its description.
            name = re.escape(character.name.replace("_", " ").casefold())
            is_named = re.search(rf"(?<!\w){name}(?!\w)", folded.replace("_", " "))
            if is_named or (character.text and character.text.casefold() in folded):
                cast.append(character)
        casts.append(cast)
    if not any(casts):
        casts = [list(prompt.characters)] * prompt.grid.count
    return [[character for character in cast if character.images] for cast in casts]
