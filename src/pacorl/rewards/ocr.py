"""Words in images as a reward: does each panel bear the text that its description quotes? It needs the extra `ocr`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np
from PIL.Image import Image

from pacorl.core.grid import QUOTED, split
from pacorl.io.versions import install_command
from pacorl.rewards.reward import RewardError, refuse
from pacorl.types import Prompt

Reader = Callable[["Image"], str]
"""An image → the text on it."""


class Ocr:
    """Legibility of quoted texts: 1 − edits/length per text, mean over the panels with a quotation.

    `edits` is the least number of letters to insert, delete or change so that the expected text occurs in the
    recognised text. Case, spaces, punctuation and other text are ignored. RapidOCR's models read Chinese and English.
    """

    def __init__(self) -> None:
        self._reader: Reader | None = None

    def load(self) -> Reader:
        """Open the text reader. Raises RewardError if RapidOCR is not installed."""
        if self._reader is None:
            self._reader = open_reader()
        return self._reader

    def check(self, prompts: Sequence[Prompt]) -> None:
        refuse(
            [prompt for prompt in prompts if not any(map(quoted, prompt.panels or (prompt.text,)))],
            'quotes no text that an image should bear, and ocr needs one, as in: a sign that says "Open"',
        )

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        read = self.load()
        return [self._score(prompt, image, read) for prompt, image in zip(prompts, images, strict=True)]

    def _score(self, prompt: Prompt, image: Image, read: Reader) -> float:
        # A set without texts of panels is read as one image.
        panels = split(image, prompt.grid) if prompt.panels else [image]
        shares = []
        for panel, text in zip(panels, prompt.panels or (prompt.text,), strict=True):
            words = quoted(text)
            if words:
                seen = read(panel)
                shares.append(fmean(share_read(word, seen) for word in words))
        return fmean(shares)


def quoted(text: str) -> list[str]:
    """Find the texts in quotation marks that contain a letter or digit."""
    quotations = ["".join(groups) for groups in QUOTED.findall(text)]
    return [words for words in quotations if _plain(words)]


def share_read(text: str, read: str) -> float:
    """1 − (edits to the nearest piece of `read`) / length of `text`, both reduced to letters and digits."""
    target = _plain(text)
    return 1.0 - edits_to_substring(target, _plain(read)) / len(target)


def edits_to_substring(target: str, text: str) -> int:
    """Compute the least edit distance of `target` to any substring of `text` (Sellers 1980)."""
    costs = [0] * (len(text) + 1)  # zeros: the substring may begin anywhere
    for row, letter in enumerate(target, start=1):
        diagonal, costs[0] = costs[0], row
        for column, other in enumerate(text, start=1):
            changed = diagonal + (letter != other)
            diagonal = costs[column]
            costs[column] = min(changed, costs[column] + 1, costs[column - 1] + 1)
    return min(costs)  # and end anywhere


def open_reader() -> Reader:
    """Open RapidOCR. Raises RewardError if it is not installed."""
    try:
        from rapidocr import RapidOCR  # type: ignore[import-not-found]
    except ImportError as error:
        raise RewardError(f"reward 'ocr' needs RapidOCR ({error}): `{install_command('ocr')}`") from None
    engine = RapidOCR(params={"Global.log_level": "error"})
    # The engine takes BGR.
    return lambda image: " ".join(engine(np.asarray(image.convert("RGB"))[..., ::-1]).txts or ())


def _plain(text: str) -> str:
    return "".join(letter for letter in text.casefold() if letter.isalnum())
