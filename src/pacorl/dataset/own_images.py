"""Turn own images into questions (`pacorl dataset pair FOLDER --from-folder IMAGES`).

Each folder in IMAGES is a group of images to compare with one another, and its name is their theme. IMAGES itself is
the only group if it has no folders. Each image is a reference once, and its candidates are further images of its group,
at even distances, so that all are compared equally often.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from pacorl.dataset.folder import Instance, write_records
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.files import flush_all, read_bytes, write_atomic
from pacorl.io.images import IMAGE_TYPES, check_readable, images_in, natural, open_image, png_bytes
from pacorl.io.terminal import Progress, silent
from pacorl.records.prompts import evenly_spread

MAX_CANDIDATES = 4
"""Candidates of a question, as many as in the published rankings: the length of a question grows by their square."""


def pair_images(
    folder: Path,
    images: Path,
    *,
    limit: int | None = None,
    progress: Progress = silent,
) -> dict[str, int]:
    """Copy the images into a dataset's folder, and write its instances.jsonl.

    Args:
        limit: the number of questions at most, evenly spread over the groups.

    Returns:
        The number of groups, images and instances.

    Raises:
        ValueError: a group has too few images, an image cannot be used, or there is none at all.
    """
    # Plan the copies and the instances.
    groups = groups_of(images)
    source_of: dict[str, Path] = {}
    instances: list[Instance] = []
    for group, paths in groups.items():
        names = []
        for path in paths:
            # A converted image keeps its whole name, so that a.gif and a.png remain two files.
            name = path.name if path.suffix.lower() in IMAGE_TYPES else f"{path.name}.png"
            names.append(f"images/{group}/{name}")
        source_of |= zip(names, paths, strict=True)
        instances += instances_of(group, names)
    instances = evenly_spread(instances, limit)
    # Before the first copy: an unusable image leaves the folder as it was.
    check_readable(source_of.values())
    counts = {"groups": len(groups), "images": len(source_of), "instances": len(instances)}

    # Copy the images; other formats become PNG.
    for done, (name, source) in enumerate(source_of.items(), 1):
        is_kept = name.endswith(f"/{source.name}")
        write_atomic(folder / name, read_bytes(source) if is_kept else png_bytes(open_image(source)))
        progress(done, len(source_of))
    flush_all()
    target = folder / "instances.jsonl"
    write_records(target, instances)
    step = DatasetStep(folder, "pair", inputs=[folder / name for name in source_of])
    return step.finish(outputs=[target], counts=counts)


def groups_of(images: Path) -> dict[str, list[Path]]:
    """Map each group to its images, three or more."""
    if not images.is_dir():
        raise ValueError(f"--from-folder {images}: there is no such folder")
    folders = [path for path in images.iterdir() if path.is_dir() and not path.name.startswith(".")]
    groups = {}
    for group in sorted(folders, key=natural) or [images.resolve()]:
        usable = list(images_in(group))
        if len(usable) < 3:
            raise ValueError(
                f"{group}: {len(usable)} images give nothing to rank; a group needs a reference and two candidates, so "
                "three images or more in one folder"
            )
        groups[group.name] = usable
    return groups


def instances_of(group: str, names: Sequence[str]) -> Iterator[Instance]:
    """Yield the instances of a group, one for each of its images as the reference."""
    # Even distances: each image is a candidate as often as every other.
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
