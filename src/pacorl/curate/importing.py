"""What others published comes into a dataset folder (`pacorl dataset import`).

Each import is a folder `imported/NAME/` with its pictures and either rankings.jsonl or pairs.jsonl; `export` reads
them beside the folder's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pacorl.core import questions
from pacorl.curate.export import link_or_copy
from pacorl.curate.manifest import Progress, Step, silent
from pacorl.curate.records import Answer, LabelledPair, write_answers, write_pairs
from pacorl.curate.rules import pair_key
from pacorl.data.comparisons import IMAGE_TAG, load_sharegpt, sharegpt_files, sharegpt_names
from pacorl.data.files import inside, read_jsonl, read_keyed, safe_name


class Import:
    """One source folder on its way into `FOLDER/imported/NAME`."""

    def __init__(self, folder: Path, source: Path, name: str) -> None:
        self.folder, self.source, self.name = folder, source, safe_name(name)
        self.target = folder / "imported" / name
        self.pictures: dict[str, Path] = {}
        """Inner name → file, of every picture that the records show."""

    def picture(self, relative: str, *, where: str) -> str:
        """Notes a picture that must come along; returns its path relative to the dataset folder."""
        try:
            path = inside(self.source, relative)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not path.is_file():
            raise ValueError(f"{where}: the picture {self.source / relative} is missing")
        inner = path.relative_to(self.source.resolve()).as_posix()
        self.pictures[inner] = path
        return f"imported/{self.name}/files/{inner}"

    def bring(self, progress: Progress = silent) -> None:
        """Links or copies the pictures that were noted."""
        for done, (inner, path) in enumerate(self.pictures.items(), 1):
            link_or_copy(path, self.target / "files" / inner)
            progress(done, len(self.pictures))


def import_benchmark(bundle: Import) -> Iterator[Answer]:
    """ConsistencyRank-Bench: images/FOLDER/i_j.png, prompt_data.jsonl, consistency_full_rank.jsonl."""
    prompts = read_keyed(bundle.source / "prompt_data.jsonl", key="idx")
    path, known = bundle.source / "consistency_full_rank.jsonl", set()
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        group, order = str(_key(row, "folder", where)), _key(row, "rank_images", where)
        if sorted(order) != sorted(_key(row, "comp_images", where)):
            raise ValueError(f"{where}: rank_images are not an order of comp_images")
        reference, *ranked = (
            _benchmark_picture(bundle, group, name, where) for name in (_key(row, "ref_image", where), *order)
        )
        if (reference, *sorted(ranked)) in known:
            raise ValueError(f"{where}: the same reference and candidates as an earlier record")
        known.add((reference, *sorted(ranked)))
        yield Answer(
            instance=f"{bundle.name}:{number}",
            annotator=bundle.name,
            group=f"{bundle.name}:{group}",
            reference=reference,
            candidates=tuple(ranked),
            theme=str(prompts.get(group, {}).get("prompt", "")),
        )


def _benchmark_picture(bundle: Import, group: str, name: str, where: str) -> str:
    # The released loader joins images/FOLDER with a bare name; some copies carry the folder in the name.
    relative = (
        name if name.startswith("images/") else f"images/{name if name.startswith(f'{group}/') else f'{group}/{name}'}"
    )
    return bundle.picture(relative, where=where)


def import_sharegpt(bundle: Import) -> Iterator[LabelledPair]:
    """LLaMA-Factory's sharegpt JSON beside a dataset_info.json: PaCo-Dataset's folder, or one of our exports."""
    for name in sharegpt_names(bundle.source):
        for number, one in enumerate(load_sharegpt(bundle.source, name), 1):
            where = f"{bundle.source}:{name}, record {number}"
            if len(one.images) != 2:
                raise ValueError(f"{where}: a pair shows two pictures, this has {len(one.images)}")
            names = [path.relative_to(bundle.source).as_posix() for path in one.images]
            images = tuple(bundle.picture(picture, where=where) for picture in names)
            yield LabelledPair(
                key=pair_key(*images) + question_suffix(one.question),
                group=f"{bundle.name}:{one.group or Path(names[0]).parent.as_posix()}",
                images=images,
                consistent=one.consistent,
                question=one.question.replace(IMAGE_TAG, "").strip(),
                category=one.category,
                reasons=one.reasons.strip(),
            )


def import_sharegpt_4o(bundle: Import) -> Iterator[LabelledPair]:
    """ShareGPT-4o-Image's text_and_image_to_image.json: an edit keeps what it should, so the label is Yes.

    The paper took 5,695 of them after checking each by hand; `verified.txt` beside the JSON, one record number
    (from 1) a line, names those to take.
    """
    path = bundle.source / "text_and_image_to_image.json"
    chosen = _verified(bundle.source / "verified.txt")
    for number, row in enumerate(_json(path), 1):
        if chosen is not None and number not in chosen:
            continue
        where = f"{path}, record {number}"
        sources, results = _names(row, "input_image", where), _names(row, "output_image", where)
        if len(sources) != 1 or len(results) != 1:
            continue  # several sources: not a pair
        images = tuple(bundle.picture(name, where=where) for name in (sources[0], results[0]))
        yield LabelledPair(
            key=pair_key(*images) + question_suffix(str(_key(row, "input_prompt", where))),
            group=f"{bundle.name}:{sources[0]}",
            images=images,
            consistent=True,
            question=questions.edit_kept(str(row["input_prompt"])),
            category="Editing",
        )


def question_suffix(question: str) -> str:
    """Tells pairs of the same pictures with different questions apart."""
    return "-" + pair_key(question, "")[:8]


def _verified(path: Path) -> set[int] | None:
    return {int(line) for line in path.read_text().split()} if path.is_file() else None


def _benchmark_files(source: Path) -> list[Path]:
    return [source / "prompt_data.jsonl", source / "consistency_full_rank.jsonl"]


def _sharegpt_4o_files(source: Path) -> list[Path]:
    verified = source / "verified.txt"
    return [source / "text_and_image_to_image.json", *([verified] if verified.is_file() else [])]


SOURCES: dict[str, tuple[Callable[[Import], Iterator[Any]], Callable[[Path], list[Path]]]] = {
    "consistency_rank": (import_benchmark, _benchmark_files),
    "sharegpt": (import_sharegpt, sharegpt_files),
    "sharegpt_4o_image": (import_sharegpt_4o, _sharegpt_4o_files),
}
"""kind → its reader, and the files that hold its records."""


def import_folder(
    folder: Path,
    source: Path,
    *,
    kind: str,
    name: str = "",
    dry_run: bool = False,
    progress: Progress = silent,
) -> dict[str, int]:
    """Brings `source` in as `imported/NAME`; returns counts.

    A pair that stands there twice counts once, and one that stands there with both labels is left out. Raises
    ValueError for an unknown kind, a name that another source has, or with file and record for what is malformed or
    missing; then nothing has been written.
    """
    if kind not in SOURCES:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(SOURCES)}")
    read, files_of = SOURCES[kind]
    bundle = Import(folder, source, name or source.resolve().name)
    options = {"kind": kind, "source": str(source.resolve())}
    step = Step(folder, f"import-{bundle.name}", inputs=_existing(files_of(source)), options=options)
    _refuse_another_source(step)
    items = list(read(bundle))
    rankings = [item for item in items if isinstance(item, Answer)]
    pairs, lost = settle([item for item in items if isinstance(item, LabelledPair)])
    yes = sum(pair.consistent for pair in pairs)
    counts = {"rankings": len(rankings), "pairs": len(pairs), "yes": yes, "pictures": len(bundle.pictures), **lost}
    if dry_run:
        return counts
    bundle.bring(progress)
    path = bundle.target / ("rankings.jsonl" if rankings else "pairs.jsonl")
    write_answers(path, rankings) if rankings else write_pairs(path, pairs)
    return step.finish(outputs=[path], counts=counts)


def settle(pairs: Sequence[LabelledPair]) -> tuple[list[LabelledPair], dict[str, int]]:
    """Each pair once, but for those that have both labels, which are dropped as ties are; and how many were either."""
    first: dict[str, LabelledPair] = {}
    torn = {pair.key for pair in pairs if first.setdefault(pair.key, pair).consistent != pair.consistent}
    kept = [pair for key, pair in first.items() if key not in torn]
    return kept, {"repeated": len(pairs) - len(first), "contradictory": len(torn)}


def _existing(paths: Sequence[Path]) -> Sequence[Path]:
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing; is this the right folder and kind?")
    return paths


def _refuse_another_source(step: Step) -> None:
    """The same folder may come in again, and the same files from elsewhere; others must not replace them."""
    known, mine = step.known_plan(), step.plan()
    if known is None or known["options"] == mine["options"]:
        return
    same_files = sorted(known["inputs"].values()) == sorted(mine["inputs"].values())
    if not same_files or known["options"]["kind"] != mine["options"]["kind"]:
        taken = step.name.removeprefix("import-")
        raise ValueError(f"{taken!r} is already the import of {known['options']['source']}; give this one a --name")


def _names(row: dict[str, Any], key: str, where: str) -> list[str]:
    value = _key(row, key, where)
    return [value] if isinstance(value, str) else list(value)


def _key(row: Any, key: str, where: str) -> Any:
    if not isinstance(row, dict) or key not in row:
        raise ValueError(f"{where}: {key!r} is missing")
    return row[key]


def _json(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing; is this the right folder and kind?")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON ({error.msg})") from None
