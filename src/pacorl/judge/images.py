"""The images of questions as a judge sees them: RGB, and each distinct one once."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from PIL.Image import Image

from pacorl.io.images import as_rgb
from pacorl.types import Question


@dataclass(frozen=True)
class DistinctImage:
    """An RGB image, compared by its size and pixels."""

    digest: bytes
    image: Image = field(compare=False)

    @classmethod
    def of(cls, image: Image, *, name: str) -> DistinctImage:
        """Convert an image to RGB and hash its pixels. Raises ImageError for an invalid image."""
        rgb = as_rgb(image, name)
        return cls(hashlib.blake2b(rgb.tobytes(), key=repr(rgb.size).encode(), digest_size=16).digest(), rgb)

    @cached_property
    def png(self) -> str:
        """Base64 of a PNG, for requests."""
        buffer = io.BytesIO()
        # Fast compression: for a nearby server, better compression takes longer than sending.
        self.image.save(buffer, format="png", compress_level=1)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def distinct_images(questions: Sequence[Question]) -> list[tuple[DistinctImage, ...]]:
    """Return the images of each question; equal images of all questions are one object.

    Raises:
        ImageError: for an invalid image.
    """
    by_id: dict[int, DistinctImage] = {}
    by_content: dict[DistinctImage, DistinctImage] = {}
    distinct_images = []
    for question in questions:
        for number, image in enumerate(question.images, 1):
            if id(image) not in by_id:
                distinct = DistinctImage.of(image, name=f"image {number} of {question.text!r}")
                by_id[id(image)] = by_content.setdefault(distinct, distinct)
        distinct_images.append(tuple(by_id[id(image)] for image in question.images))
    return distinct_images
