"""Training images of a character, each fitted to the training size and with its caption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from pacorl.character_training.character_config import CharacterConfig
from pacorl.io.documents import read_text
from pacorl.io.files import digest
from pacorl.io.images import open_image
from pacorl.judge.judge import ChatJudge, Judge
from pacorl.records.characters import find_character
from pacorl.types import Chat, Prompt, Size

if TYPE_CHECKING:
    from pathlib import Path

LEAST = 3
"""Fewest images to train on."""
MOST = 200
"""Most images to train on: all are in memory as latents."""
HELD_OUT_FROM = 5
"""Fewest images of which one is held out."""
QUESTION = (
    "Caption this picture in at most 25 words: the pose and action, the place, the light and the framing. "
    "Neither name nor describe the character itself. Answer with the caption alone."
)
"""What a vision-language model is asked about a training image."""
SUBJECT = "{character}"
"""Placeholder of the trigger word and the description in a gallery's prompts."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One training image with its caption."""

    path: Path
    caption: str
    mirrored: bool = False

    @property
    def prompt(self) -> Prompt:
        """The caption as a prompt."""
        return Prompt(id=0, text=self.caption)

    def open(self, size: Size, fit: str) -> Image.Image:
        """Read the image, cropped or padded to `size`."""
        fitted = fitted_image(open_image(self.path), size, fit)
        return ImageOps.mirror(fitted) if self.mirrored else fitted


@dataclass(frozen=True, slots=True)
class PictureSet:
    """Images of a character: for training, and held out."""

    subject: str
    """Trigger word and description."""
    train: tuple[Picture, ...]
    held_out: tuple[Picture, ...]

    @property
    def identity(self) -> list[list[Any]]:
        """File name, hash, caption and use of each image, as JSON has it: a resumed run needs the same."""
        rows: list[list[Any]] = []
        for picture in (*self.train, *self.held_out):
            rows.append([picture.path.name, digest(picture.path), picture.caption, picture in self.held_out])
        return rows


def read_pictures(config: CharacterConfig) -> PictureSet:
    """Read a character's folder for training.

    Raises:
        ValueError: if there is no such character, it has too few or too many images, or one cannot be used.
    """
    if not config.character:
        raise ValueError("character is empty; name a folder with images and a card.yaml")
    character = find_character(config.character, least=LEAST, most=MOST)
    trigger = config.trigger or character.name
    subject = f"{trigger}, {character.text}"
    pictures = [Picture(path, caption_of(path, subject, trigger=trigger)) for path in character.images]

    # The last images in equal distances, so that a series of one scene is not held out whole.
    held_out = []
    if len(pictures) >= HELD_OUT_FROM and config.held_out:
        count = min(max(1, round(config.held_out * len(pictures))), len(pictures) - LEAST)
        stride = len(pictures) // count
        held_out = pictures[stride - 1 :: stride][:count]

    train = [picture for picture in pictures if picture not in held_out]
    if config.flip:
        train += [Picture(picture.path, picture.caption, mirrored=True) for picture in train]
    return PictureSet(subject, tuple(train), tuple(held_out))


def caption_of(path: Path, subject: str, *, trigger: str) -> str:
    """Read the caption from the image's .txt file; without one it is the subject.

    The subject goes before a caption without the trigger word, which would teach the character no name.

    Raises:
        ValueError: if the file is empty.
    """
    file = path.with_suffix(".txt")
    if not file.is_file():
        return subject
    caption = " ".join(read_text(file).split())
    if not caption:
        raise ValueError(f"{file} is empty; write the caption of {path.name} into it, or delete it")
    return caption if trigger.casefold() in caption.casefold() else f"{subject}, {caption}"


def uncaptioned(images: Sequence[Path]) -> list[Path]:
    """List the images without a caption."""
    return [path for path in images if not path.with_suffix(".txt").is_file()]


def describe_picture(path: Path, judge: Judge) -> str:
    """Ask a judge's vision-language model for the caption of an image.

    Raises:
        ValueError: if the judge answers Yes or No only.
        RuntimeError: if there is no answer.
    """
    if not isinstance(judge, ChatJudge):
        raise ValueError(f"{type(judge).__name__} describes no images; choose a vision-language model as the judge")
    answer = judge.reply(Chat((open_image(path), QUESTION)), max_new_tokens=80)
    caption = " ".join(answer.split()).strip('"')
    if not caption:
        raise RuntimeError(f"the judge has no caption for {path.name}; write it by hand")
    return caption


def fitted_image(image: Image.Image, size: Size, fit: str) -> Image.Image:
    """Resize an image to `size`: the middle of it for `crop`, all of it with white edges for `pad`."""
    resized = (size.width, size.height)
    if fit == "pad":
        return ImageOps.pad(image, resized, Image.Resampling.LANCZOS, color="white")
    return ImageOps.fit(image, resized, Image.Resampling.LANCZOS)


def gallery_prompts(config: CharacterConfig, subject: str) -> list[Prompt]:
    """Write the prompts of the page."""
    texts = [text.replace(SUBJECT, subject) for text in config.gallery.prompts]
    return [Prompt(id=number, text=text) for number, text in enumerate(texts)]


def small_pictures(pictures: Sequence[Picture], size: Size) -> list[Path]:
    """List the images with fewer pixels than the training size, which are enlarged."""
    small = []
    for path in dict.fromkeys(picture.path for picture in pictures):
        image = open_image(path)
        if math.prod(image.size) < size.height * size.width:
            small.append(path)
    return small
