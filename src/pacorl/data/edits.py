"""Edits in files: a JSONL of {image, instruction}, beside the images that it names.

    {"image": "photos/cat.jpg", "instruction": "Give it a top hat."}

`image` is a path within the JSONL's own folder, or a list of them for a model that takes several; `category` and
`task_name` may say what kind of edit it is, `panels` (a list of one) what the edited image is to show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacorl.io.images import open_image
from pacorl.types import Prompt


def is_edit(record: Mapping[str, Any]) -> bool:
    """Whether a record asks for an edit."""
    return "instruction" in record or ("image" in record and "prompt" not in record)


def edit_prompt(record: Mapping[str, Any], number: int, *, folder: Path) -> Prompt:
    """A record as a prompt; its images are opened once, to know that they can be.

    Raises ValueError if the instruction is missing, or an image is missing, unreadable or outside of `folder`.
    """
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
        sources=tuple(_source(folder, name) for name in names),
        category=str(record.get("category") or ""),
        task=str(record.get("task_name") or ""),
    )


def _source(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"image {name!r} lies outside of {folder}; keep images beside the file that names them")
    try:
        open_image(path)
    except OSError as error:
        raise ValueError(f"image {name!r} cannot be read ({error.strerror})") from None
    return path
