"""A person's own images become questions (`pacorl dataset pair FOLDER --from-folder IMAGES`).

Each folder in IMAGES is a group of images that people compare with one another, and its name is their theme; IMAGES
itself is the only group if it holds no folders. Each image is a reference once, and its candidates are others of its
group, at even distances, so that all are compared equally often.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pacorl.dataset.folder import Instance, write_records
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.io.files import flush_all, read_bytes, write_atomic
from pacorl.io.images import IMAGE_TYPES, check_readable, open_image, png_bytes

MAX_CANDIDATES = 4
"""Of a question, as many as the published rankings have: each more makes a question longer by its square."""
CONVERTED = (".bmp", ".gif", ".tif", ".tiff")
"""Suffixes of images that browsers do not show, or not still."""


def pair_images(folder: Path, images: Path, *, dry_run: bool = False, progress: Progress = silent) -> dict[str, int]:
    """Copy the images into a dataset's folder, and write its instances.jsonl.

    Returns:
        How many groups, images and instances there are, and how many files are no images and were left out.

    Raises:
        ValueError: a group has too few images, an image cannot be used, or there is none at all.
    """
    groups, others = groups_of(images)
    check_readable(path for paths in groups.values() for path in paths)

    copies = {}
    for group, paths in groups.items():
        copies[group] = [_copy_of(folder, group, path) for path in paths]

    instances = [instance for group, paths in copies.items() for instance in _instances(folder, group, paths)]
    total = sum(map(len, groups.values()))
    counts = {"groups": len(groups), "images": total, "instances": len(instances), "other files": others}
    if dry_run:
        return counts
    pairs = [pair for group in groups for pair in zip(groups[group], copies[group], strict=True)]
    for done, (source, copy) in enumerate(pairs, 1):
        write_atomic(copy, read_bytes(source) if copy.suffix == source.suffix else png_bytes(open_image(source)))
        progress(done, total)
    flush_all(folder / "images")
    target = folder / "instances.jsonl"
    write_records(target, instances)
    return DatasetStep(folder, "pair", inputs=[copy for _, copy in pairs]).finish(outputs=[target], counts=counts)


def groups_of(images: Path) -> tuple[dict[str, list[Path]], int]:
    """Group → its images in the order of their names, and how many other files lie there; hidden ones do not count."""
    if not images.is_dir():
        raise ValueError(f"--from-folder {images}: there is no such folder")
    folders = sorted(path for path in images.iterdir() if path.is_dir() and not path.name.startswith("."))
    groups = {}
    others = 0
    for group in folders or [images.resolve()]:
        files = sorted(path for path in group.iterdir() if path.is_file() and not path.name.startswith("."))
        groups[group.name] = [path for path in files if path.suffix.lower() in (*IMAGE_TYPES, *CONVERTED)]
        others += len(files) - len(groups[group.name])
        if len(groups[group.name]) < 3:
            raise ValueError(
                f"{group}: {len(groups[group.name])} images give nothing to rank; a group needs a reference and two "
                "candidates, so three images or more in one folder"
            )
    return groups, others


def _copy_of(folder: Path, group: str, image: Path) -> Path:
    # A converted image keeps its whole name, so that a.gif and a.png stay two.
    name = image.name if image.suffix.lower() in IMAGE_TYPES else f"{image.name}.png"
    return folder / "images" / group / name


def _instances(folder: Path, group: str, images: Sequence[Path]) -> Iterator[Instance]:
    names = [image.relative_to(folder).as_posix() for image in images]
    count = min(MAX_CANDIDATES, len(names) - 1)

    steps = []
    for number in range(count):
        steps.append(1 + number * (len(names) - 1) // count)

    for index, name in enumerate(names):
        yield Instance(
            id=f"{group}:{index}",
            group=group,
            reference=name,
            candidates=tuple(names[(index + step) % len(names)] for step in steps),
            theme=re.sub(r"[-_\s]+", " ", group).strip(),
        )
