"""Images that a record names: paths within the folder of its file."""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from pacorl.io.files import existing, kept_digest, state_of, write_atomic
from pacorl.io.images import open_image


def images_beside(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Resolve the images that a record in `folder` names, each file opened once.

    Raises:
        ValueError: An image is missing, unreadable or outside of `folder`.
    """
    paths = []
    for name in names:
        # Tools write absolute paths too, which may lie inside.
        path = existing(folder, os.path.relpath(name, folder) if Path(name).is_absolute() else name)
        _check_image(path, *state_of(path))
        paths.append(path)
    return tuple(paths)


@lru_cache(maxsize=4096)
def _check_image(path: Path, size: int, changed: int) -> None:
    """Open an image, once for each state of its file: many records may have the images of one character."""
    open_image(path)


def copied_images(images: Sequence[Path], path: Path) -> list[str]:
    """Copy images into the folder `STEM_images` next to the file `path`, and return their relative names."""
    folder = path.parent / f"{path.stem}_images"
    names = []
    for image in images:
        # Named by content: two images may have one name, and many records may have one image.
        copy = folder / f"{kept_digest(image)[:32]}{image.suffix}"
        if copy.is_symlink() or not copy.is_file():
            write_atomic(copy, image.read_bytes())
        names.append(f"{folder.name}/{copy.name}")
    return names
