"""Turn own images into questions (`pacorl dataset pair FOLDER --from-folder IMAGES`).

Each folder in IMAGES is a group of images to compare with one another, and its name is their theme. IMAGES itself is
the only group if it has no folders. Each image is a reference once, and its candidates are further images of its group,
at even distances, so that all are compared equally often.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from pacorl.dataset.folder import Instance, check_kind, write_records
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.io.files import flush_all, read_bytes, write_atomic
from pacorl.io.images import IMAGE_TYPES, check_readable, images_in, natural, open_image, png_bytes
from pacorl.records.prompts import evenly_spread
from pacorl.types import Size

MAX_CANDIDATES = 4
"""Candidates of a question, as many as in the published rankings: the length of a question grows by their square."""
SHEET = Size(1024, 1024)
"""Size of the image that shows a set of separate images."""


def pair_images(
    folder: Path,
    images: Path,
    *,
    sets: bool = False,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Copy the images into a dataset's folder, and write its instances.jsonl.

    Args:
        sets: whether IMAGES has a folder for each theme, and that one a folder for each set, to be ranked whole.
        limit: the number of questions at most, evenly spread over the groups.

    Returns:
        The number of groups, images and instances.

    Raises:
        ValueError: a group has too few images, an image cannot be used, or there is none at all.
    """
    check_kind(folder, sets=sets)
    # Plan the copies and the instances.
    groups = sets_of(images) if sets else groups_of(images)
    pairs: list[tuple[Path, Path]] = []
    instances: list[Instance] = []
    for group, paths in groups.items():
        copies = []
        for path in paths:
            # A converted image keeps its whole name, so that a.gif and a.png remain two files.
            name = path.name if path.suffix.lower() in IMAGE_TYPES else f"{path.name}.png"
            copies.append(folder / "images" / group / (f"{path.parent.name}-{name}" if sets else name))
        pairs += zip(paths, copies, strict=True)
        if sets:
            instances.append(_set_instance(folder, group, paths, copies))
        else:
            instances += _instances(folder, group, copies)
    instances = evenly_spread(instances, limit)
    # Before the first copy: an unusable image leaves the folder as it was.
    check_readable(source for source, _ in pairs)
    counts = {"groups": len(groups), "images": len(pairs), "instances": len(instances)}
    if dry_run:
        return counts

    # Copy the images; other formats become PNG.
    for done, (source, copy) in enumerate(pairs, 1):
        write_atomic(copy, read_bytes(source) if copy.suffix == source.suffix else png_bytes(open_image(source)))
        progress(done, len(pairs))
    if sets:
        _write_sheets(folder, instances)
    flush_all(folder / "images")
    target = folder / "instances.jsonl"
    write_records(target, instances)
    return DatasetStep(folder, "pair", inputs=[copy for _, copy in pairs]).finish(outputs=[target], counts=counts)


def groups_of(images: Path, *, least: int = 3) -> dict[str, list[Path]]:
    """Map each group to its images, `least` or more."""
    groups = {}
    for group in _folders(images) or [images.resolve()]:
        usable = list(images_in(group))
        if len(usable) < least:
            need = "a group needs a reference and two candidates, so three" if least > 2 else "a set needs two"
            raise ValueError(f"{group}: {len(usable)} images give nothing to rank; {need} images or more in one folder")
        groups[group.name] = usable
    return groups


def sets_of(images: Path) -> dict[str, list[Path]]:
    """Map each theme to the images of all its sets, which are folders of it."""
    themes = {}
    for theme in _folders(images):
        sets = groups_of(theme, least=2)
        if len(sets) < 2:
            raise ValueError(f"{theme}: there are no two sets to rank; make a folder in it for the images of each set")
        themes[theme.name] = list(chain.from_iterable(sets.values()))
    if not themes:
        raise ValueError(
            f"--from-folder {images}: there are no themes; make a folder for each, with a folder for each set"
        )
    return themes


def _folders(images: Path) -> list[Path]:
    if not images.is_dir():
        raise ValueError(f"--from-folder {images}: there is no such folder")
    folders = [path for path in images.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return sorted(folders, key=natural)


def _set_instance(folder: Path, group: str, paths: Sequence[Path], copies: Sequence[Path]) -> Instance:
    panels: dict[str, tuple[str, ...]] = {}
    for path, copy in zip(paths, copies, strict=True):
        sheet = f"sets/{group}/{path.parent.name}.png"
        panels[sheet] = (*panels.get(sheet, ()), copy.relative_to(folder).as_posix())
    return Instance(
        id=f"{group}:sets",
        group=group,
        reference="",
        candidates=tuple(panels),
        theme=_theme(group),
        panels=tuple(panels.values()),
    )


def _write_sheets(folder: Path, instances: Sequence[Instance]) -> None:
    """Write one image of each set, as people see it."""
    from pacorl.models.policies.pipeline import stitch

    for instance in instances:
        for sheet, names in zip(instance.candidates, instance.panels, strict=True):
            panels = [open_image(folder / name) for name in names]
            write_atomic(folder / sheet, png_bytes(stitch(panels, SHEET)))
    flush_all(folder / "sets")


def _theme(group: str) -> str:
    return re.sub(r"[-_\s]+", " ", group).strip()


def _instances(folder: Path, group: str, images: Sequence[Path]) -> Iterator[Instance]:
    # Even distances: each image is a candidate as often as every other.
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
            theme=_theme(group),
        )
