"""JPEG size as a reward: the simplest there is, and the usual first check of a training loop (arXiv 2305.13301)."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

from PIL.Image import Image

from pacorl.types import Prompt


class JpegSize:
    """The size of the image as JPEG, in kilobytes: its negative for `prefer="small"`, itself for `"large"`."""

    def __init__(self, prefer: Literal["small", "large"] = "small", quality: int = 95) -> None:
        # Pillow's documentation: above 95 files grow without any gain, and 100 switches parts of the compression off.
        if not 1 <= quality <= 95:
            raise ValueError(f"rewards.jpeg_size.args.quality must be from 1 to 95, got {quality}")
        self.sign = -1.0 if prefer == "small" else 1.0
        self.quality = quality

    def check(self, prompts: Sequence[Prompt]) -> None: ...

    def __call__(self, prompts: Sequence[Prompt], images: Sequence[Image]) -> list[float | None]:
        scores: list[float | None] = []
        for image in images:
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "JPEG", quality=self.quality)
            scores.append(self.sign * buffer.tell() / 1000)
        return scores
