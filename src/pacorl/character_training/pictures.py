"""Training images of a character, each fitted to the training size and with its caption."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from PIL import Image, ImageOps

from pacorl.character_training.character_config import CharacterConfig
from pacorl.core.batches import grouped
from pacorl.io.documents import dump_json
from pacorl.io.files import digest, text_digest
from pacorl.io.images import open_image
from pacorl.records.characters import find_character, read_caption
from pacorl.types import Prompt, Size

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)

LEAST, MOST = 3, 200
"""Fewest and most images to train on; all are in memory as latents."""
HELD_OUT_FROM = 5
"""Fewest images of which some are held out."""
HELD_OUT = slice(3, None, 7)
"""Held-out images: one in seven, in equal distances, so that a series of one scene is not held out whole."""
PLACEHOLDER = re.compile(r"\[(trigger|name)\]|\{trigger\}|<trigger>", re.IGNORECASE)
"""The trigger word in captions of other tools."""
SUBJECT = "{character}"
"""Placeholder of the trigger word and the description in a gallery's prompts."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One training image with its caption."""

    path: Path
    caption: str

    @property
    def prompt(self) -> Prompt:
        """The caption as a prompt."""
        return Prompt(id=0, text=self.caption)

    def open(self, size: Size) -> Image.Image:
        """Read the middle of the image, resized to `size`."""
        return ImageOps.fit(open_image(self.path), (size.width, size.height), Image.Resampling.LANCZOS)


@dataclass(frozen=True, slots=True)
class PictureSet:
    """Images of a character: for training, and held out."""

    subject: str
    """Trigger word and description."""
    train: tuple[Picture, ...]
    held_out: tuple[Picture, ...]

    @property
    def identity(self) -> str:
        """Digest of each image's file name, content, caption and use: a resumed run needs the same."""
        rows = []
        for picture in (*self.train, *self.held_out):
            rows.append([picture.path.name, digest(picture.path), picture.caption, picture in self.held_out])
        return text_digest(dump_json(rows))


def read_pictures(config: CharacterConfig) -> PictureSet:
    """Read a character's folder for training.

    Raises:
        ValueError: if there is no such character, it has too few or too many images, or one cannot be used.
    """
    character = find_character(config.character, least=LEAST, most=MOST)
    trigger = character.name
    subject = f"{trigger}, {character.text}"
    pictures = []
    without = []
    for path in character.images:
        file, text = read_caption(path)
        if file is None:
            without.append(path.name)
            pictures.append(Picture(path, subject))
            continue
        caption = PLACEHOLDER.sub(lambda match: trigger, text)
        if not caption:
            raise ValueError(f"{file} is empty; write the caption of {path.name} into it, or delete it")
        # The subject goes before a caption without the trigger word, which would teach the character no name.
        is_named = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", caption, re.IGNORECASE)
        if not is_named:
            caption = f"{subject}, {caption}"
        pictures.append(Picture(path, caption))

    if without:
        logger.warning("%s: %d have no caption; trained on as %r", ", ".join(without[:3]), len(without), subject)
    # By content: copies of an image stay on one side.
    by_content = list(grouped((digest(picture.path), picture) for picture in pictures).values())
    held_out = list(chain(*by_content[HELD_OUT])) if len(by_content) >= HELD_OUT_FROM else []
    train = [picture for picture in pictures if picture not in held_out]
    return PictureSet(subject, tuple(train), tuple(held_out))


def gallery_prompts(config: CharacterConfig, subject: str) -> list[Prompt]:
    """Write the prompts of the page."""
    prompts = []
    for number, text in enumerate(config.gallery.prompts):
        prompts.append(Prompt(id=number, text=text.replace(SUBJECT, subject)))
    return prompts
