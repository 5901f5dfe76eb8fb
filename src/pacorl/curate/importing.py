"""What others published comes into a dataset folder (`pacorl dataset import`).

Each import is a folder `imported/NAME/` with its pictures and either rankings.jsonl or pairs.jsonl; `export` reads
them beside the folder's own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pacorl.core import questions
from pacorl.curate.export import link_or_copy
from pacorl.curate.manifest import Step
from pacorl.curate.records import Answer, LabelledPair, write_answers, write_pairs
from pacorl.curate.rules import pair_key
from pacorl.data.comparisons import IMAGE_TAG, load_sharegpt, sharegpt_names
from pacorl.data.files import inside, read_jsonl, safe_name


class Import:
    """One source folder on its way into `FOLDER/imported/NAME`."""

    def __init__(self, folder: Path, source: Path, name: str, *, dry_run: bool = False) -> None:
        self.folder, self.source, self.name, self.dry_run = folder, source, safe_name(name), dry_run
        self.target = folder / "imported" / name

    def picture(self, relative: str, *, where: str) -> str:
        """Brings a picture along; returns its path relative to the dataset folder."""
        try:
            path = inside(self.source, relative)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not path.is_file():
            raise ValueError(f"{where}: the picture {self.source / relative} is missing")
        inner = path.relative_to(self.source.resolve()).as_posix()
        if not self.dry_run:
            link_or_copy(path, self.target / "files" / inner)
        return f"imported/{self.name}/files/{inner}"


def import_benchmark(bundle: Import) -> Iterator[Answer]:
    """ConsistencyRank-Bench: images/FOLDER/i_j.png, prompt_data.jsonl, consistency_full_rank.jsonl."""
    prompts = {str(row["idx"]): row for row in read_jsonl(bundle.source / "prompt_data.jsonl")}
    path = bundle.source / "consistency_full_rank.jsonl"
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        group, order = str(_key(row, "folder", where)), _key(row, "rank_images", where)
        if sorted(order) != sorted(_key(row, "comp_images", where)):
            raise ValueError(f"{where}: rank_images are not an order of comp_images")
        reference, *ranked = (_benchmark_picture(bundle, group, name, where) for name in (row["ref_image"], *order))
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


SOURCES: dict[str, Callable[[Import], Iterator[Any]]] = {
    "consistency_rank": import_benchmark,
    "sharegpt": import_sharegpt,
    "sharegpt_4o_image": import_sharegpt_4o,
}


def import_folder(folder: Path, source: Path, *, kind: str, name: str = "", dry_run: bool = False) -> dict[str, int]:
    """Brings `source` in as `imported/NAME`; returns counts.

    Raises ValueError for an unknown kind, or with file and record for what is malformed or missing. A failed import
    leaves no rankings or pairs behind.
    """
    if kind not in SOURCES:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(SOURCES)}")
    bundle = Import(folder, source, name or source.resolve().name, dry_run=dry_run)
    items = list(SOURCES[kind](bundle))
    rankings = [item for item in items if isinstance(item, Answer)]
    pairs = list({item.key: item for item in items if isinstance(item, LabelledPair)}.values())
    counts = {"rankings": len(rankings), "pairs": len(pairs), "yes": sum(pair.consistent for pair in pairs)}
    if dry_run:
        return counts
    path = bundle.target / ("rankings.jsonl" if rankings else "pairs.jsonl")
    write_answers(path, rankings) if rankings else write_pairs(path, pairs)
    step = Step(folder, f"import-{bundle.name}", options={"kind": kind, "source": str(source)})
    return step.finish(outputs=[path], counts=counts)


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
