"""Published data and rankings of one's own come into a dataset folder (`pacorl dataset import`).

Each import is a folder `imported/NAME/` with its images and either rankings.jsonl or pairs.jsonl; `export` reads
them beside the folder's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pacorl.core import questions
from pacorl.data.comparisons import IMAGE_TAG, load_sharegpt, sharegpt_files, sharegpt_names
from pacorl.data.rankings import Ranking, load_rankings
from pacorl.dataset.export import link_or_copy
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.dataset.records import Answer, LabelledPair, write_answers, write_pairs
from pacorl.dataset.rules import pair_key, question_suffix
from pacorl.io.documents import read_json, read_jsonl, read_keyed
from pacorl.io.files import digest, inside, safe_name
from pacorl.io.images import SHOWN_FAULTS, check_readable


class Import:
    """One source, a folder or a file beside its images, on its way into `FOLDER/imported/NAME`."""

    def __init__(self, folder: Path, source: Path, name: str) -> None:
        self.folder, self.source, self.name = folder, source, safe_name(name)
        self.root = source.parent if source.is_file() else source
        """Image paths are relative to it."""
        self.target = folder / "imported" / name
        self.images: dict[str, Path] = {}
        """Inner name → file, of every image that the records show."""

    def add_image(self, relative: str, *, where: str) -> str:
        """Adds an image to be brought in; returns its path relative to the dataset folder."""
        try:
            path = inside(self.root, relative)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not path.is_file():
            raise ValueError(f"{where}: the image {self.root / relative} is missing")
        inner = path.relative_to(self.root.resolve()).as_posix()
        self.images[inner] = path
        return f"imported/{self.name}/files/{inner}"

    def bring_images(self, progress: Progress = silent) -> None:
        """Links or copies the images that were added."""
        for done, (inner, path) in enumerate(self.images.items(), 1):
            link_or_copy(path, self.target / "files" / inner)
            progress(done, len(self.images))


def import_benchmark(bundle: Import) -> Iterator[Answer]:
    """ConsistencyRank-Bench: images/FOLDER/i_j.png, prompt_data.jsonl, consistency_full_rank.jsonl."""
    prompts = read_keyed(bundle.source / "prompt_data.jsonl", key="idx")
    path, seen = bundle.source / "consistency_full_rank.jsonl", set()
    for number, row in enumerate(read_jsonl(path), 1):
        where = f"{path}, record {number}"
        group, order = str(_key(row, "folder", where)), _key(row, "rank_images", where)
        if sorted(order) != sorted(_key(row, "comp_images", where)):
            raise ValueError(f"{where}: rank_images are not an order of comp_images")
        reference, *ranked = (
            _benchmark_image(bundle, group, name, where) for name in (_key(row, "ref_image", where), *order)
        )
        if (reference, *sorted(ranked)) in seen:
            raise ValueError(f"{where}: the same reference and candidates as an earlier record")
        seen.add((reference, *sorted(ranked)))
        yield Answer(
            instance=f"{bundle.name}:{number}",
            annotator=bundle.name,
            group=f"{bundle.name}:{group}",
            reference=reference,
            candidates=tuple(ranked),
            theme=str(prompts.get(group, {}).get("prompt", "")),
        )


def _benchmark_image(bundle: Import, group: str, name: str, where: str) -> str:
    # The released loader joins images/FOLDER with a bare name; some copies carry the folder in the name.
    relative = (
        name if name.startswith("images/") else f"images/{name if name.startswith(f'{group}/') else f'{group}/{name}'}"
    )
    return bundle.add_image(relative, where=where)


def import_sharegpt(bundle: Import) -> Iterator[LabelledPair]:
    """LLaMA-Factory's sharegpt JSON beside a dataset_info.json: PaCo-Dataset's folder, or one of our exports."""
    for name in sharegpt_names(bundle.source):
        for number, comparison in enumerate(load_sharegpt(bundle.source, name), 1):
            where = f"{bundle.source}:{name}, record {number}"
            if len(comparison.images) != 2:
                raise ValueError(f"{where}: a pair shows two images, this has {len(comparison.images)}")
            names = [path.relative_to(bundle.source).as_posix() for path in comparison.images]
            images = tuple(bundle.add_image(name, where=where) for name in names)
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
    path = bundle.source / "text_and_image_to_image.json"
    verified = _verified(bundle.source / "verified.txt")
    for number, row in enumerate(_json(path), 1):
        if verified is not None and number not in verified:
            continue
        where = f"{path}, record {number}"
        sources, results = _names(row, "input_image", where), _names(row, "output_image", where)
        if len(sources) != 1 or len(results) != 1:
            continue  # several sources: not a pair
        images = tuple(bundle.add_image(name, where=where) for name in (sources[0], results[0]))
        yield LabelledPair(
            key=pair_key(*images) + question_suffix(str(_key(row, "input_prompt", where))),
            group=f"{bundle.name}:{sources[0]}",
            images=images,
            consistent=True,
            question=questions.edit_kept(str(row["input_prompt"])),
            category="Editing",
        )


def import_rankings(bundle: Import) -> Iterator[Answer]:
    """A CSV or JSONL of one's own rankings (`data/rankings.py`).

    Rankings of one reference are a group, unless the file says what a group is. Copies of an image count as that image,
    so that no split can part them.
    """
    rankings = load_rankings(bundle.source)
    stored = _stored_images(bundle, rankings)
    instances: dict[object, str] = {}
    lines: dict[tuple[str, str], int] = {}
    for ranking in rankings:
        where = f"{bundle.source}:{ranking.line}"
        _check_copies(ranking, stored, where)
        reference, candidates = stored[ranking.reference], tuple(stored[name] for name in ranking.candidates)
        key = (ranking.group, reference, frozenset(candidates), ranking.theme, repr(ranking.criteria))
        instance = instances.setdefault(key, f"{bundle.name}:{len(instances) + 1}")
        annotator = ranking.annotator or bundle.name
        line = lines.setdefault((instance, annotator), ranking.line)
        if line != ranking.line:
            raise ValueError(
                f"{where}: ranks what {annotator} has ranked in line {line}; take one out, or name an 'annotator' in "
                "each if two people did"
            )
        yield Answer(
            instance=instance,
            annotator=annotator,
            group=f"{bundle.name}:{_folder_name(ranking.group or Path(ranking.reference).with_suffix('').as_posix())}",
            reference=reference,
            candidates=candidates,
            theme=ranking.theme,
            category=ranking.category,
            ranks=_ranks(ranking.tiers),
            criteria=ranking.criteria,
            own_group=bool(ranking.group),
        )


def _stored_images(bundle: Import, rankings: Sequence[Ranking]) -> dict[str, str]:
    """Every image that the rankings name → its path in the dataset folder; copies of an image have one.

    Raises ValueError that lists, by line, the images that are missing, and those that cannot be opened.
    """
    lines: dict[str, int] = {}
    for ranking in rankings:
        for name in (ranking.reference, *ranking.candidates):
            lines.setdefault(name, ranking.line)
    missing = [name for name in lines if not _is_file(bundle, name, line=lines[name])]
    if missing:
        shown = "".join(f"\n  line {lines[name]}: {name}{_hint(name)}" for name in missing[:SHOWN_FAULTS])
        more = f"\n  and {len(missing) - SHOWN_FAULTS} more" if len(missing) > SHOWN_FAULTS else ""
        raise ValueError(
            f"{bundle.source}: {len(missing)} image(s) missing; paths are relative to {bundle.root}:{shown}{more}"
        )
    check_readable(bundle.root / name for name in lines)
    first: dict[str, str] = {}
    # By content: a copy under another name in another split would leak.
    originals = {name: first.setdefault(digest(bundle.root / name), name) for name in lines}
    return {name: bundle.add_image(original, where=str(bundle.source)) for name, original in originals.items()}


def _is_file(bundle: Import, name: str, *, line: int) -> bool:
    try:
        return inside(bundle.root, name).is_file()
    except ValueError as error:
        raise ValueError(f"{bundle.source}:{line}: {error}; move the file to a folder above its images") from None


def _hint(name: str) -> str:
    """A guess at what is wrong with a name that is no file's."""
    if "\\" in name:
        return " (write folders with /)"
    return " (a tie is written with spaces: a.png = b.png)" if "=" in name else ""


def _check_copies(ranking: Ranking, stored: Mapping[str, str], where: str) -> None:
    """Raises ValueError if two images of a ranking are the same file, or copies of one."""
    first: dict[str, str] = {}
    for name in (ranking.reference, *ranking.candidates):
        other = first.setdefault(stored[name], name)
        if other != name:
            raise ValueError(f"{where}: {other} and {name} are the same image; take one out")


def _ranks(tiers: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """(("a",), ("b", "c"), ("d",)) → (1, 2, 2, 4); nothing if there is no tie."""
    if all(len(tier) == 1 for tier in tiers):
        return ()
    counts = [len(tier) for tier in tiers]
    return tuple(1 + sum(counts[:index]) for index, count in enumerate(counts) for _ in range(count))


def _folder_name(text: str) -> str:
    """A group's name as that of a folder. Two names that become one are kept together, which leaks nothing."""
    short = re.sub(r"[^\w.-]+", "-", text).strip("-.")
    return short if 0 < len(short) <= 80 else f"{short[:60]}-{pair_key(text, '')[:8]}"


def _verified(path: Path) -> set[int] | None:
    return {int(line) for line in path.read_text().split()} if path.is_file() else None


def _rankings_file(source: Path) -> list[Path]:
    if not source.is_file():
        fault = "is a folder" if source.is_dir() else "is missing"
        raise ValueError(f"{source} {fault}; rankings come from a .csv or .jsonl file above its images: name it")
    return [source]


def _benchmark_files(source: Path) -> list[Path]:
    return [source / "prompt_data.jsonl", source / "consistency_full_rank.jsonl"]


def _sharegpt_4o_files(source: Path) -> list[Path]:
    verified = source / "verified.txt"
    return [source / "text_and_image_to_image.json", *([verified] if verified.is_file() else [])]


SOURCES: dict[str, tuple[Callable[[Import], Iterator[Any]], Callable[[Path], list[Path]]]] = {
    "consistency_rank": (import_benchmark, _benchmark_files),
    "sharegpt": (import_sharegpt, sharegpt_files),
    "sharegpt_4o_image": (import_sharegpt_4o, _sharegpt_4o_files),
    "rankings": (import_rankings, _rankings_file),
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
    """Brings a source in as `imported/NAME`.

    A pair that the source has twice counts once, and one that it has with both labels is left out.

    Args:
        source: a folder or, for rankings, a file.
        kind: of SOURCES.
        name: the source's own unless named.

    Returns:
        How many rankings or pairs and images came in.

    Raises:
        ValueError: for an unknown kind, a name that another source has, or with file and record for what is malformed
            or missing; then nothing has been written.
    """
    if kind not in SOURCES:
        raise ValueError(f"unknown kind {kind!r}; there are {', '.join(SOURCES)}")
    read, files_of = SOURCES[kind]
    bundle = Import(folder, source, name or (_folder_name(source.stem) if source.is_file() else source.resolve().name))
    options = {"kind": kind, "source": str(source.resolve())}
    step = DatasetStep(folder, f"import-{bundle.name}", inputs=_existing(files_of(source)), options=options)
    _check_source(step)
    # Everything is read and checked before the first file is brought in: a fault leaves the folder as it was.
    items = list(read(bundle))
    rankings = [item for item in items if isinstance(item, Answer)]
    pairs, lost = without_contradictions([item for item in items if isinstance(item, LabelledPair)])
    if rankings:
        counts = {
            "rankings": len(rankings),
            "groups": len({answer.group for answer in rankings}),
            "annotators": len({answer.annotator for answer in rankings}),
        }
    else:
        counts = {"pairs": len(pairs), "yes": sum(pair.consistent for pair in pairs), **lost}
    counts["images"] = len(bundle.images)
    if dry_run:
        return counts
    bundle.bring_images(progress)
    path = bundle.target / ("rankings.jsonl" if rankings else "pairs.jsonl")
    write_answers(path, rankings) if rankings else write_pairs(path, pairs)
    return step.finish(outputs=[path], counts=counts)


def without_contradictions(pairs: Sequence[LabelledPair]) -> tuple[list[LabelledPair], dict[str, int]]:
    """Each pair once, without those that have both labels (dropped as ties are); and how many were either."""
    first: dict[str, LabelledPair] = {}
    torn = {pair.key for pair in pairs if first.setdefault(pair.key, pair).consistent != pair.consistent}
    agreed = [pair for key, pair in first.items() if key not in torn]
    return agreed, {"repeated": len(pairs) - len(first), "contradictory": len(torn)}


def _existing(paths: Sequence[Path]) -> Sequence[Path]:
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is missing; is this the right folder and kind?")
    return paths


def _check_source(step: DatasetStep) -> None:
    """Raises ValueError if another source has the name; the same files may come in again, from elsewhere too."""
    last, mine = step.last_plan(), step.plan()
    if last is None or last["options"] == mine["options"]:
        return
    same_files = sorted(last["inputs"].values()) == sorted(mine["inputs"].values())
    if not same_files or last["options"]["kind"] != mine["options"]["kind"]:
        name = step.name.removeprefix("import-")
        raise ValueError(f"{name!r} is already the import of {last['options']['source']}; give this one a --name")


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
    return read_json(path)
