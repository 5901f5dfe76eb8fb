"""Bring own rankings into a dataset folder (`pacorl dataset export --rankings`).

Each import is a folder `imported/NAME/` with its images and rankings.jsonl, which `export` reads with the folder's own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pacorl.dataset.answer_log import collect_answers
from pacorl.dataset.export import IMPORTED, link_or_copy, pooled
from pacorl.dataset.folder import read_answers, write_records
from pacorl.dataset.manifest import DatasetStep
from pacorl.io.documents import blamed_on
from pacorl.io.files import existing, flush_all, inside, make_folder, safe_name
from pacorl.io.images import check_readable
from pacorl.records.rankings import load_rankings

UNNAMED = "unnamed"
"""The person of all rankings without an annotator."""


def import_rankings(folder: Path, source: Path) -> dict[str, int]:
    """Import a CSV or JSONL of rankings (`records.rankings`) as `imported/NAME`, the name of the file, with its images.

    Rankings of one reference are a group, unless the file names its groups. Returns the number of rankings and images.

    Raises:
        ValueError: another source has the name, a person has ranked otherwise before, or a record is malformed or an
            image missing (with file and line); then no file has been written.
    """
    if not source.is_file():
        raise ValueError(f"{source} is no file; rankings come from a .csv or .jsonl file above its images: name it")
    name = safe_name(re.sub(r"[^A-Za-z0-9_.-]+", "-", source.stem))
    step = DatasetStep(folder, f"import-{name}", inputs=[source], options={"source": str(source.resolve())})
    # The same file may be imported again, but another one may not replace it.
    last = step.last()
    if last and last.plan["options"] != step.options:
        raise ValueError(f"{name!r} is already the import of {last.plan['options']['source']}; rename this one")

    # The whole source is read before anything is written, so that a fault leaves no half of an import.
    root = source.parent.resolve()
    stored = f"imported/{name}/files"
    rankings = []
    incoming: dict[str, Path] = {}
    for ranking in load_rankings(source):
        stored_path_of = {}
        with blamed_on(f"{source}:{ranking.instance}"):
            for image in ranking.images:
                existing(source.parent, image, fix="; paths are relative to the file of rankings")
                path = inside(source.parent, image)
                stored_path_of[image] = f"{stored}/{path.relative_to(root).as_posix()}"
                incoming[stored_path_of[image]] = path
        # The reference's path without its suffix, unless the file has groups.
        group = ranking.group or Path(ranking.reference).with_suffix("").as_posix()
        moved = replace(
            ranking,
            instance=f"{source.name}:{ranking.instance}",
            annotator=ranking.annotator or UNNAMED,
            group=f"{name}:{group}",
            reference=stored_path_of[ranking.reference],
            tiers=tuple(tuple(stored_path_of[image] for image in tier) for tier in ranking.tiers),
        )
        rankings.append(moved)
    check_readable(incoming.values())
    target = folder / "imported" / name / "rankings.jsonl"
    earlier_imports = [path for path in sorted(folder.glob(IMPORTED)) if path != target]
    imported = [*chain.from_iterable(map(read_answers, earlier_imports)), *rankings]
    pooled(folder, collect_answers(folder), imported, incoming=incoming)  # raises

    # Bring the images in, then write the records.
    for stored_path, path in incoming.items():
        link_or_copy(path, folder / stored_path)
    flush_all()  # one wait for all images, before a file names them
    make_folder(target.parent)
    write_records(target, rankings)
    return step.finish(outputs=[target], counts={"rankings": len(rankings), "images": len(incoming)})
