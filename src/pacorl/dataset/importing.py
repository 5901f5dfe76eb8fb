"""Published data and rankings of one's own come into a dataset folder (`pacorl dataset import`).

Each import is a folder `imported/NAME/` with its images and either rankings.jsonl or pairs.jsonl; `export` reads
them beside the folder's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pacorl.core import questions
from pacorl.dataset.export import link_or_copy
from pacorl.dataset.folder import Answer, LabelledPair, write_records
from pacorl.dataset.label_studio import load_label_studio
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.rules import pair_key, question_suffix
from pacorl.io.documents import blamed_on, read_json, read_jsonl, read_keyed, read_text
from pacorl.io.files import digest, flush_all, inside, safe_name
from pacorl.io.images import check_readable, listed
from pacorl.records.comparisons import IMAGE_TAG, load_sharegpt, sharegpt_files, sharegpt_names
from pacorl.records.rankings import Ranking, load_rankings


class Import:
    """One source, a folder or a file beside its images, on its way into `FOLDER/imported/NAME`."""

    def __init__(self, folder: Path, source: Path, name: str) -> None:
        self.source, self.name = source, safe_name(name)
        self.root = source.parent if source.is_file() else source
        """Image paths are relative to it."""
        self.target = folder / "imported" / name
        self.images: dict[str, Path] = {}
        """Inner name → file, of every image that the records show."""
        self.inputs: list[Path] = []
        """The files that hold the records."""

    def add_input(self, path: Path) -> Path:
        """Adds a file of records to what the import was made of."""
        if not path.is_file():
            raise ValueError(f"{path} is missing; is this the right folder and kind?")
        self.inputs.append(path)
        return path

    def add_image(self, relative: str) -> str:
        """Adds an image to be brought in; returns its path relative to the dataset folder."""
        path = inside(self.root, relative)
        if not path.is_file():
            raise ValueError(f"the image {self.root / relative} is missing")
        # `inside` follows links, so the root must be without links too.
        inner = path.relative_to(self.root.resolve()).as_posix()
        self.images[inner] = path
        return f"imported/{self.name}/files/{inner}"


def import_benchmark(bundle: Import) -> Iterator[Answer]:
    """ConsistencyRank-Bench: images/FOLDER/i_j.png, prompt_data.jsonl, consistency_full_rank.jsonl."""
    prompts = read_keyed(bundle.add_input(bundle.source / "prompt_data.jsonl"), key="idx")
    path, seen = bundle.add_input(bundle.source / "consistency_full_rank.jsonl"), set()
    for number, row in enumerate(read_jsonl(path), 1):
        with blamed_on(f"{path}, record {number}"):
            group, order = str(_required(row, "folder")), _required(row, "rank_images")
            if sorted(order) != sorted(_required(row, "comp_images")):
                raise ValueError("rank_images are not an order of comp_images")
            images = []
            for name in (_required(row, "ref_image"), *order):
                # The released loader joins images/FOLDER with a bare name; some copies carry the folder in the name.
                folders = "" if name.startswith("images/") else "images/"
                folders += "" if name.startswith(("images/", f"{group}/")) else f"{group}/"
                images.append(bundle.add_image(folders + name))
            reference, *candidates = images
            if (reference, *sorted(candidates)) in seen:
                raise ValueError("the same reference and candidates as an earlier record")
        seen.add((reference, *sorted(candidates)))
        yield Answer(
            instance=f"{bundle.name}:{number}",
            annotator=bundle.name,
            group=f"{bundle.name}:{group}",
            reference=reference,
            candidates=tuple(candidates),
            theme=str(prompts.get(group, {}).get("prompt", "")),
        )


def import_sharegpt(bundle: Import) -> Iterator[LabelledPair]:
    """LLaMA-Factory's sharegpt JSON beside a dataset_info.json: PaCo-Dataset's folder, or one of our exports."""
    for path in sharegpt_files(bundle.source):
        bundle.add_input(path)
    for entry in sharegpt_names(bundle.source):
        for number, comparison in enumerate(load_sharegpt(bundle.source, entry), 1):
            with blamed_on(f"{bundle.source}:{entry}, record {number}"):
                # LLaMA-Factory's form has room for any number, the judge compares two.
                if len(comparison.images) != 2:
                    raise ValueError(f"a pair shows two images, this has {len(comparison.images)}")
                names = [path.relative_to(bundle.source).as_posix() for path in comparison.images]
                images = tuple(map(bundle.add_image, names))
            yield LabelledPair(
                key=pair_key(*images) + question_suffix(comparison.question),
                group=f"{bundle.name}:{comparison.group or Path(names[0]).parent.as_posix()}",
                images=images,
                consistent=comparison.consistent,
                question=comparison.question.replace(IMAGE_TAG, "").strip(),
                category=comparison.category,
                reasons=comparison.reasons.strip(),
            )


def import_sharegpt_4o(bundle: Import) -> Iterator[LabelledPair]:
    """ShareGPT-4o-Image's text_and_image_to_image.json: an edit keeps what it should, so the label is Yes.

    The paper took 5,695 of them after checking each by hand; `verified.txt` beside the JSON, one record number
    (from 1) a line, names those to take.
    """
    path = bundle.add_input(bundle.source / "text_and_image_to_image.json")
    verified, checked = None, bundle.source / "verified.txt"
    if checked.is_file():
        with blamed_on(f"{checked}: record numbers, one a line"):
            verified = {int(line) for line in read_text(bundle.add_input(checked)).split()}
    for number, row in enumerate(read_json(path), 1):
        if verified is not None and number not in verified:
            continue
        with blamed_on(f"{path}, record {number}"):
            shown = [_required(row, key) for key in ("input_image", "output_image")]
            sources, edits = ([name] if isinstance(name, str) else list(name) for name in shown)
            if len(sources) != 1 or len(edits) != 1:
                continue  # several sources: not a pair
            images = tuple(map(bundle.add_image, (sources[0], edits[0])))
            instruction = str(_required(row, "input_prompt"))
        yield LabelledPair(
            key=pair_key(*images) + question_suffix(instruction),
            group=f"{bundle.name}:{sources[0]}",
            images=images,
            consistent=True,
            question=questions.edit_kept(instruction),
            category="Editing",
        )


def _required(row: Any, key: str) -> Any:
    if not isinstance(row, dict) or key not in row:
        raise ValueError(f"{key!r} is missing")
    return row[key]


def import_rankings(
    bundle: Import, *, load: Callable[[Path], list[Ranking]] = load_rankings, form: str = ".csv or .jsonl"
) -> Iterator[Answer]:
    """One's own rankings: a CSV or JSONL (`records/rankings.py`), or what `load` reads.

    Rankings of one reference are a group, unless the file says what a group is. Copies of an image count as that image,
    so that no split can part them.
    """
    if not bundle.source.is_file():
        fault = "is a folder" if bundle.source.is_dir() else "is missing"
        raise ValueError(f"{bundle.source} {fault}; rankings come from a {form} file above its images: name it")
    bundle.inputs.append(bundle.source)
    rankings = load(bundle.source)
    stored = _stored_images(bundle, rankings)
    instances: dict[object, str] = {}
    lines: dict[tuple[str, str], int] = {}
    for ranking in rankings:
        location = f"{bundle.source}:{ranking.line}"
        _check_distinct(ranking, stored, location=location)
        reference, candidates = stored[ranking.reference], tuple(stored[name] for name in ranking.candidates)
        key = (ranking.group, reference, frozenset(candidates), ranking.theme, repr(ranking.criteria))
        instance = instances.setdefault(key, f"{bundle.name}:{len(instances) + 1}")
        annotator = ranking.annotator or bundle.name
        line = lines.setdefault((instance, annotator), ranking.line)
        if line != ranking.line:
            fix = "take one out, or name an 'annotator' in each if two people did"
            raise ValueError(f"{location}: ranks what {annotator} has ranked in line {line}; {fix}")
        yield Answer(
            instance=instance,
            annotator=annotator,
            group=f"{bundle.name}:{_folder_name(ranking.group or Path(ranking.reference).with_suffix('').as_posix())}",
            reference=reference,
            candidates=candidates,
            theme=ranking.theme,
            category=ranking.category,
            ranks=ranking.ranks,
            criteria=ranking.criteria,
            own_group=bool(ranking.group),
        )


def _check_distinct(ranking: Ranking, stored: Mapping[str, str], *, location: str) -> None:
    first: dict[str, str] = {}
    for name in (ranking.reference, *ranking.candidates):
        other = first.setdefault(stored[name], name)
        if other != name:
            raise ValueError(f"{location}: {other} and {name} are the same image; take one out")


def _stored_images(bundle: Import, rankings: Sequence[Ranking]) -> dict[str, str]:
    """Every image that the rankings name → its path in the dataset folder; copies of an image have one."""
    lines: dict[str, int] = {}
    for ranking in rankings:
        for name in (ranking.reference, *ranking.candidates):
            lines.setdefault(name, ranking.line)
    missing = []
    for name, line in lines.items():
        try:
            path = inside(bundle.root, name)
        except ValueError as error:
            raise ValueError(f"{bundle.source}:{line}: {error}; move the file to a folder above its images") from None
        if not path.is_file():
            tie = " (a tie is written with spaces: a.png = b.png)" if "=" in name else ""
            hint = " (write folders with /)" if "\\" in name else tie
            missing.append(f"line {line}: {name}{hint}")
    if missing:
        fault = f"{len(missing)} image(s) missing; paths are relative to {bundle.root}"
        raise ValueError(f"{bundle.source}: {fault}:{listed(missing)}")
    check_readable(bundle.root / name for name in lines)
    first: dict[str, str] = {}
    # By content: a copy under another name in another split would leak.
    originals = {name: first.setdefault(digest(bundle.root / name), name) for name in lines}
    return {name: bundle.add_image(original) for name, original in originals.items()}


def _folder_name(text: str) -> str:
    """A group's name as that of a folder. Two names that become one are kept together, which leaks nothing."""
    short = re.sub(r"[^\w.-]+", "-", text).strip("-.")
    return short if 0 < len(short) <= 80 else f"{short[:60]}-{pair_key(text, '')[:8]}"


SOURCES: dict[str, Callable[[Import], Iterator[Any]]] = {
    "consistency_rank": import_benchmark,
    "sharegpt": import_sharegpt,
    "sharegpt_4o_image": import_sharegpt_4o,
    "rankings": import_rankings,
    "label_studio": partial(import_rankings, load=load_label_studio, form=".json"),
}


def import_folder(
    folder: Path, source: Path, *, kind: str, name: str = "", dry_run: bool = False, progress: Progress = silent
) -> dict[str, int]:
    """Brings a source (of a kind of SOURCES) in as `imported/NAME`; returns how many rankings or pairs and images came.

    Raises:
        ValueError: for an unknown kind, a name that another source has, or with file and record for what is malformed
            or missing; then nothing has been written.
    """
    if kind not in SOURCES:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(SOURCES)}")
    bundle = Import(folder, source, name or (_folder_name(source.stem) if source.is_file() else source.resolve().name))
    records = list(SOURCES[kind](bundle))
    options = {"kind": kind, "source": str(source.resolve())}
    step = DatasetStep(folder, f"import-{bundle.name}", inputs=bundle.inputs, options=options)
    _check_source(step)
    rankings = [record for record in records if isinstance(record, Answer)]
    pairs, counts = without_contradictions([record for record in records if isinstance(record, LabelledPair)])
    if rankings:
        people, groups = ({getattr(answer, name) for answer in rankings} for name in ("annotator", "group"))
        counts = {"rankings": len(rankings), "groups": len(groups), "annotators": len(people)}
    counts["images"] = len(bundle.images)
    if dry_run:
        return counts
    for done, (inner, path) in enumerate(bundle.images.items(), 1):
        link_or_copy(path, bundle.target / "files" / inner)
        progress(done, len(bundle.images))
    flush_all(bundle.target)  # one wait, before a file names them
    path = bundle.target / ("rankings.jsonl" if rankings else "pairs.jsonl")
    write_records(path, rankings or pairs)
    return step.finish(outputs=[path], counts=counts)


def without_contradictions(pairs: Sequence[LabelledPair]) -> tuple[list[LabelledPair], dict[str, int]]:
    """Each pair once, without those that have both labels (dropped as ties are), and the counts of them."""
    first: dict[str, LabelledPair] = {}
    torn = {pair.key for pair in pairs if first.setdefault(pair.key, pair).consistent != pair.consistent}
    agreed = [pair for key, pair in first.items() if key not in torn]
    lost = {"repeated": len(pairs) - len(first), "contradictory": len(torn)}
    return agreed, {"pairs": len(agreed), "yes": sum(pair.consistent for pair in agreed), **lost}


def _check_source(step: DatasetStep) -> None:
    """Raises ValueError if another source has the name; the same files may come in again, from elsewhere too."""
    last, mine = step.last().get("plan"), step.plan()
    if last is None or last["options"] == mine["options"]:
        return
    same_files = sorted(last["inputs"].values()) == sorted(mine["inputs"].values())
    if not same_files or last["options"]["kind"] != mine["options"]["kind"]:
        name = step.name.removeprefix("import-")
        raise ValueError(f"{name!r} is already the import of {last['options']['source']}; give this one a --name")
