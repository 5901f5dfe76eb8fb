"""Bring own rankings into a dataset folder (`pacorl dataset export --rankings`).

Each import is a folder `imported/NAME/` with its images and rankings.jsonl, which `export` reads with the folder's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from pacorl.dataset.answer_log import collect_answers
from pacorl.dataset.export import IMPORTED, link_or_copy
from pacorl.dataset.folder import read_answers, write_records
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import question_of
from pacorl.io.documents import blamed_on
from pacorl.io.files import digest, flush_all, inside, kept_digest, make_folder, safe_name, twin_hint
from pacorl.io.images import check_readable, listed
from pacorl.records.rankings import Ranking, load_rankings

UNNAMED = "unnamed"
"""The person of all rankings without an annotator."""


def import_rankings(folder: Path, source: Path) -> dict[str, int]:
    """Import a CSV or JSONL of rankings (`records.rankings`) as `imported/NAME`, the name of the file, with its images.

    Rankings of one reference are a group, unless the file names its groups. Returns the number of rankings and images,
    and of `repeated` rankings, which the file or the folder has already and which are left out.

    Raises:
        ValueError: another source has the name, a person has ranked otherwise before, or a record is malformed or an
            image missing (with file and record); then no file has been written.
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
    rankings = load_rankings(source)
    files = _images(source, rankings)
    stored = {image: f"imported/{name}/files/{file}" for image, file in files.items()}
    named = _named(source, rankings, stored, name)
    path_of = {stored[image]: inside(source.parent, file) for image, file in files.items()}
    new = _without_repeated(named, path_of, folder, name)
    images = sorted({image for ranking in new for image in ranking.images})

    # Bring the images in, then write the records.
    target = folder / "imported" / name
    for image in images:
        link_or_copy(path_of[image], folder / image)
    flush_all()  # one wait for all images, before a file names them
    make_folder(target)
    write_records(target / "rankings.jsonl", new)
    counts = {"rankings": len(new), "images": len(images), "repeated": len(rankings) - len(new)}
    return step.finish(outputs=[target / "rankings.jsonl"], counts=counts)


def _named(source: Path, rankings: Sequence[Ranking], stored: dict[str, str], name: str) -> list[Ranking]:
    """Give rankings their instances, groups and annotators, and images their paths in the dataset folder."""
    # Instances are numbered in the order of the file.
    instances: dict[object, str] = {}
    ranked: dict[tuple[str, str], Ranking] = {}
    for ranking in rankings:
        reference = stored[ranking.reference]
        tiers = tuple(tuple(stored[image] for image in tier) for tier in ranking.tiers)
        candidates = frozenset(chain.from_iterable(tiers))
        # The same images and question are one instance, in any order of the lines.
        key = (ranking.group, reference, candidates, ranking.theme, repr(ranking.criteria))
        instance = instances.setdefault(key, f"{name}:{len(instances) + 1}")
        annotator = ranking.annotator or UNNAMED
        # The reference's path without its suffix, unless the file has groups.
        group = f"{name}:{ranking.group or Path(ranking.reference).with_suffix('').as_posix()}"
        named = replace(ranking, instance=instance, annotator=annotator, group=group, reference=reference, tiers=tiers)
        earlier = ranked.setdefault((instance, annotator), named)
        with blamed_on(f"{source}:{ranking.instance}"):
            if len({reference, *candidates}) <= len(ranking.candidates):
                raise ValueError("two of its images are the same; take one out")
            # Two rankings of one instance need two people, or a vote would count twice. A line may be there twice.
            if earlier is not named and not (ranking.annotator and earlier.tiers == tiers):
                raise ValueError(
                    f"ranks what {annotator} has ranked above; take one out, or name an 'annotator' in each if two "
                    "people did"
                )
    return list(ranked.values())


def _without_repeated(
    rankings: Sequence[Ranking], path_of: Mapping[str, Path], folder: Path, name: str
) -> list[Ranking]:
    """Leave out rankings that the folder has already: the same person, question, images by content, and order.

    Raises ValueError if a person's orders differ.
    """

    def answered(ranking: Ranking) -> tuple[object, list[frozenset[str]]]:
        reference, *tiers = (
            frozenset(kept_digest(path_of.get(image) or folder / image) for image in tier)
            for tier in ((ranking.reference,), *ranking.tiers)
        )
        candidates = frozenset(chain.from_iterable(tiers))
        return (ranking.annotator, question_of(ranking), reference, candidates), tiers

    others = [path for path in folder.glob(IMPORTED) if path.parent.name != name]
    known = dict(map(answered, chain(collect_answers(folder), *map(read_answers, others))))
    new = []
    for ranking in rankings:
        question, tiers = answered(ranking)
        if known.get(question, tiers) != tiers:
            raise ValueError(
                f"{path_of[ranking.reference]}: {folder} has another order of the candidates by {ranking.annotator}; "
                "take one out, or name an 'annotator' in each file if two people ranked"
            )
        if question not in known:
            new.append(ranking)
    return new


def _images(source: Path, rankings: Sequence[Ranking]) -> dict[str, str]:
    """Map every image of the rankings to its file below the source's folder; copies of an image have one file."""
    # `inside` follows links, so the root must be without links too.
    root = source.parent.resolve()
    paths: dict[str, Path] = {}
    for ranking in rankings:
        with blamed_on(f"{source}:{ranking.instance}"):
            for name in ranking.images:
                paths[name] = inside(root, name)
    missing = [f"{name}{twin_hint(root, name)}" for name, path in paths.items() if not path.is_file()]
    if missing:
        raise ValueError(f"{source}: {len(missing)} image(s) missing; paths are relative to {root}:{listed(missing)}")
    check_readable(paths.values())
    # By content: a copy under another name in another split would leak.
    first: dict[str, str] = {}
    return {name: first.setdefault(digest(path), path.relative_to(root).as_posix()) for name, path in paths.items()}
