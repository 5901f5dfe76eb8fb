"""JPEG size as a reward: the simplest there is, and the usual first check of a training loop (arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pacorl.types import Prompt

if TYPE_CHECKING:
    from PIL.Image import Image


class JpegSize:
    """The size of the image as JPEG, in kilobytes: its negative for `prefer="small"`, itself for `"large"`."""

    def __init__(self, prefer: Literal["small", "large"] = "small", quality: int = 95) -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"rewards.jpeg_size.args.quality must be from 1 to 95, got {quality}")
        self.sign = -1.0 if prefer == "small" else 1.0
        self.quality = quality

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        return [self.sign * _jpeg_bytes(image, self.quality) / 1000 for image in images]


def _jpeg_bytes(image: Image, quality: int) -> int:
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality)
    return buffer.tell()
