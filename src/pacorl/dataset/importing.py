"""Bring published data and own rankings into a dataset folder (`pacorl dataset import`).

Each import is a folder `imported/NAME/` with its images and either rankings.jsonl or pairs.jsonl; `export` reads
them with the folder's own records.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pacorl.dataset.export import link_or_copy
from pacorl.dataset.folder import LabelledPair, write_records
from pacorl.dataset.manifest import DatasetStep
from pacorl.dataset.rules import pair_key
from pacorl.io.documents import blamed_on
from pacorl.io.files import digest, flush_all, inside, safe_name, text_digest, twin_hint
from pacorl.io.images import check_readable, listed
from pacorl.io.terminal import Progress, silent
from pacorl.records.comparisons import IMAGE_TAG, INFO, load_sharegpt, sharegpt_files
from pacorl.records.rankings import Ranking, load_rankings


class Import:
    """Source of an import, a folder or a file above its images, on its way into `FOLDER/imported/NAME`."""

    def __init__(self, folder: Path, source: Path, name: str) -> None:
        self.source = source
        self.name = safe_name(name)
        self.root = source.parent if source.is_file() else source
        """Root of the image paths."""
        self.target = folder / "imported" / name
        self.images: dict[str, Path] = {}
        """Inner name → file, of every image in the records."""
        self.inputs: list[Path] = []
        """Files of the records."""

    def add_input(self, path: Path) -> Path:
        """Add a file of records to the import's inputs."""
        if not path.is_file():
            raise ValueError(f"{path} is missing; is this the right folder and kind?")
        self.inputs.append(path)
        return path

    def add_image(self, relative: str) -> str:
        """Add an image to the import; return its path relative to the dataset folder."""
        path = inside(self.root, relative)
        if not path.is_file():
            raise ValueError(f"the image {self.root / relative} is missing")
        # `inside` follows links, so the root must be without links too.
        inner = path.relative_to(self.root.resolve()).as_posix()
        self.images[inner] = path
        return f"imported/{self.name}/files/{inner}"


def import_sharegpt(bundle: Import) -> Iterator[LabelledPair]:
    """Read LLaMA-Factory's sharegpt JSON and its dataset_info.json: PaCo-Dataset's folder, or an export of ours."""
    files = sharegpt_files(bundle.source)
    bundle.add_input(bundle.source / INFO)
    for path in files.values():
        bundle.add_input(path)
    for entry in files:
        for number, comparison in enumerate(load_sharegpt(bundle.source, entry), 1):
            with blamed_on(f"{bundle.source}:{entry}, record {number}"):
                # LLaMA-Factory's form allows any number of images, the judge compares two.
                if len(comparison.images) != 2:
                    raise ValueError(f"a pair shows two images, this has {len(comparison.images)}")
                names = [path.relative_to(bundle.source).as_posix() for path in comparison.images]
                images = (bundle.add_image(names[0]), bundle.add_image(names[1]))
            yield LabelledPair(
                key=pair_key(*images, comparison.question),
                group=f"{bundle.name}:{comparison.group or Path(names[0]).parent.as_posix()}",
                images=images,
                consistent=comparison.consistent,
                question=comparison.question.replace(IMAGE_TAG, "").strip(),
                category=comparison.category,
                reasons=comparison.reasons.strip(),
            )


def import_rankings(bundle: Import) -> Iterator[Ranking]:
    """Read own rankings: a CSV or JSONL (`records/rankings.py`).

    Rankings of one reference are a group, unless the file names its groups. Copies of an image count as that image,
    so that no split can part them.
    """
    # Rankings come with relative paths, so the file names their root.
    if not bundle.source.is_file():
        fault = "is a folder" if bundle.source.is_dir() else "is missing"
        raise ValueError(f"{bundle.source} {fault}; rankings come from a .csv or .jsonl file above its images: name it")
    bundle.inputs.append(bundle.source)
    # Read the file and find its images, each image once.
    rankings = load_rankings(bundle.source)
    stored = _stored_images(bundle, rankings)

    # Number the instances in the order of the file.
    instances: dict[object, str] = {}
    lines: dict[tuple[str, str], str] = {}
    for ranking in rankings:
        location = f"{bundle.source}:{ranking.instance}"
        names: dict[str, str] = {}
        for name in (ranking.reference, *ranking.candidates):
            other = names.setdefault(stored[name], name)
            if other != name:
                raise ValueError(f"{location}: {other} and {name} are the same image; take one out")
        # The same images and question are one instance, in any order of the lines.
        reference = stored[ranking.reference]
        candidates = tuple(stored[name] for name in ranking.candidates)
        key = (ranking.group, reference, frozenset(candidates), ranking.theme, repr(ranking.criteria))
        instance = instances.setdefault(key, f"{bundle.name}:{len(instances) + 1}")
        # Two rankings of one instance need two people, or a vote would count twice.
        annotator = ranking.annotator or bundle.name
        line = lines.setdefault((instance, annotator), ranking.instance)
        if line != ranking.instance:
            fix = "take one out, or name an 'annotator' in each if two people did"
            raise ValueError(f"{location}: ranks what {annotator} has ranked in line {line}; {fix}")
        # The reference's path without its suffix, unless the file has groups.
        group = _folder_name(ranking.group or Path(ranking.reference).with_suffix("").as_posix())
        yield replace(
            ranking,
            instance=instance,
            annotator=annotator,
            group=f"{bundle.name}:{group}",
            reference=reference,
            candidates=candidates,
        )


def _stored_images(bundle: Import, rankings: Sequence[Ranking]) -> dict[str, str]:
    """Every image of the rankings → its path in the dataset folder; copies of an image have one path."""
    # First line of each image, for the message about a missing one.
    lines: dict[str, str] = {}
    for ranking in rankings:
        for name in (ranking.reference, *ranking.candidates):
            lines.setdefault(name, ranking.instance)
    # Collect the missing images, so that one error lists them.
    missing = []
    for name, line in lines.items():
        try:
            path = inside(bundle.root, name)
        except ValueError as error:
            raise ValueError(f"{bundle.source}:{line}: {error}; move the file to a folder above its images") from None
        if not path.is_file():
            hint = twin_hint(bundle.root, name)
            if "=" in name:
                hint = " (a tie is written with spaces: a.png = b.png)"
            missing.append(f"line {line}: {name}{hint}")
    if missing:
        fault = f"{len(missing)} image(s) missing; paths are relative to {bundle.root}"
        raise ValueError(f"{bundle.source}: {fault}:{listed(missing)}")

    # Compare by content: a copy under another name in another split would leak.
    check_readable(bundle.root / name for name in lines)
    first: dict[str, str] = {}
    stored = {}
    for name in lines:
        stored[name] = bundle.add_image(first.setdefault(digest(bundle.root / name), name))
    return stored


def _folder_name(text: str) -> str:
    """Turn a group's name into a folder name. Two groups with one folder name become one group, which is no leak."""
    short = re.sub(r"[^\w.-]+", "-", text).strip("-.")
    return short if 0 < len(short) <= 80 else f"{short[:60]}-{text_digest(text)[:8]}"


SOURCES: dict[str, Callable[[Import], Iterator[Any]]] = {
    "sharegpt": import_sharegpt,
    "rankings": import_rankings,
}


def import_folder(
    folder: Path, source: Path, *, kind: str, name: str = "", dry_run: bool = False, progress: Progress = silent
) -> dict[str, int]:
    """Import a source of a kind of SOURCES as `imported/NAME`; return the numbers of rankings or pairs and images.

    Raises:
        ValueError: the kind is unknown, another source has the name, or a record is malformed or missing (with file
            and record); then no file has been written.
    """
    if kind not in SOURCES:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(SOURCES)}")
    if not name:
        name = _folder_name(source.stem) if source.is_file() else source.resolve().name
    bundle = Import(folder, source, name)
    # The whole source is read before anything is written, so that a fault leaves no half of an import.
    records = list(SOURCES[kind](bundle))
    options = {"kind": kind, "source": str(source.resolve())}
    step = DatasetStep(folder, f"import-{bundle.name}", inputs=bundle.inputs, options=options)
    # Another source may not have the name; the same files may be imported again, even from elsewhere.
    last = step.last().get("plan")
    if last is not None and last["options"] != options:
        same_files = sorted(last["inputs"].values()) == sorted(step.plan()["inputs"].values())
        if not same_files or last["options"]["kind"] != kind:
            raise ValueError(
                f"{bundle.name!r} is already the import of {last['options']['source']}; give this one a --name"
            )

    # Count the records, which are all rankings or all pairs.
    rankings: list[Ranking] = []
    labelled: list[LabelledPair] = []
    for record in records:
        if isinstance(record, Ranking):
            rankings.append(record)
        else:
            labelled.append(record)
    pairs, counts = without_contradictions(labelled)
    if rankings:
        groups = {answer.group for answer in rankings}
        annotators = {answer.annotator for answer in rankings}
        counts = {"rankings": len(rankings), "groups": len(groups), "annotators": len(annotators)}
    counts["images"] = len(bundle.images)
    if dry_run:
        return counts

    # Bring the images in, then write the records.
    for done, (inner, path) in enumerate(bundle.images.items(), 1):
        link_or_copy(path, bundle.target / "files" / inner)
        progress(done, len(bundle.images))
    flush_all(bundle.target)  # one wait for all images, before a file names them
    path = bundle.target / ("rankings.jsonl" if rankings else "pairs.jsonl")
    write_records(path, rankings or pairs)
    return step.finish(outputs=[path], counts=counts)


def without_contradictions(pairs: Sequence[LabelledPair]) -> tuple[list[LabelledPair], dict[str, int]]:
    """Keep each pair once, drop pairs with both labels as ties, and count them."""
    first: dict[str, LabelledPair] = {}
    torn = set()
    for pair in pairs:
        if first.setdefault(pair.key, pair).consistent != pair.consistent:
            torn.add(pair.key)
    agreed = []
    for key, pair in first.items():
        if key not in torn:
            agreed.append(pair)
    counts = {"pairs": len(agreed), "yes": sum(pair.consistent for pair in agreed)}
    return agreed, counts | {"repeated": len(pairs) - len(first), "contradictory": len(torn)}
