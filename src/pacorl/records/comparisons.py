"""Files of comparisons, the training data of a judge.

    comparisons = comparisons_from("data/PaCo-Dataset:consistency_reward_cot_train")

A source is one of
    FILE.jsonl             the project's own, one comparison a line (`pacorl dataset export`)
    FOLDER:NAME            an entry of the folder's dataset_info.json in LLaMA-Factory's sharegpt form (PaCo-Dataset)
    FILE.json              such a file by its own name, described by the folder's dataset_info.json if there is one
    tiny:train|dev|test    pairs of the tiny world, drawn on demand, with a count as in tiny:dev:40

`pacorl dataset export --rankings` turns your own rankings into the first form (docs/your-domain.md).

Questions and answers are not changed. Image paths are relative to the file and cannot leave its folder. An error names
the file and the line or record. No record is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from pacorl.core.questions import text_fault
from pacorl.io.documents import (
    JsonObject,
    blamed_on,
    check_keys,
    read_json,
    read_records,
    typed,
    write_json,
    write_json_list,
    write_jsonl,
)
from pacorl.io.files import inside, make_folder
from pacorl.io.images import listed
from pacorl.records.prompts import TINY, TINY_COUNTS, evenly_spread, tiny_source
from pacorl.tiny.comparisons import draw_comparisons
from pacorl.types import Comparison

IMAGE_TAG = "<image>"
SOURCES = "a .jsonl of comparisons, FOLDER:NAME for an entry of its dataset_info.json, a .json, or tiny:train|dev|test"
IMPORT_RANKINGS = (
    "rankings are no comparisons yet; make them some with `pacorl dataset export SET --rankings FILE`, and name "
    "SET/export/comparisons_train.jsonl"
)
DECISION = re.compile(r"(Yes|No)\b[.,:;!]*\s*")
TINY_COUNT = 200
"""Default number of pairs of a split of the tiny world."""

INFO = "dataset_info.json"
# LLaMA-Factory's defaults for an entry of dataset_info.json.
COLUMNS = {"messages": "conversations", "images": "images"}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
# The names in PaCo-Dataset and in our exports, for a file without a description.
OPENAI_FORM = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


class DatasetEntry(BaseModel):
    """An entry of dataset_info.json, without the keys that only LLaMA-Factory reads."""

    file_name: str = ""
    formatting: str = ""
    columns: dict[str, str] = {}
    tags: dict[str, str] = {}


class MissingImagesError(ValueError):
    """Images of a source are missing; the message lists them."""


def comparisons_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[Comparison]:
    """Read the comparisons of a source, at most `limit` of them, evenly spread.

    Args:
        scratch: folder in which pairs of the tiny world are drawn.

    Raises:
        ValueError: for an unknown or empty source, and as `load_comparisons` and `load_sharegpt` do.
    """
    comparisons = _comparisons(source, scratch)
    if not comparisons:
        raise ValueError(f"{source}: holds no comparisons; give {SOURCES}")
    return evenly_spread(comparisons, limit, source=source)


def _comparisons(source: str, scratch: Path | None) -> list[Comparison]:
    if source.startswith(TINY):
        split, count = tiny_source(source, counts=dict.fromkeys(TINY_COUNTS, TINY_COUNT))
        assert scratch is not None, "pairs of the tiny world are drawn into files, which need a folder"
        path = scratch / f"tiny-{split}-{count}" / "comparisons.jsonl"
        if not path.is_file():
            make_folder(path.parent)
            drawn = draw_comparisons(path.parent, split=split, count=count)
            save_comparisons(drawn, path)  # last: an existing file is whole
        return load_comparisons(path)

    # A file.
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return load_comparisons(path)
    if suffix == ".json":
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give {SOURCES}")
        return load_sharegpt(path.parent, path.name)

    # An entry of a folder's dataset_info.json.
    folder_entry = _folder_entry(source)
    if folder_entry is None:
        raise _unreadable(source)
    return load_sharegpt(*folder_entry)


def _unreadable(source: str) -> ValueError:
    """Build the error for a source of an unknown form."""
    if Path(source).suffix.lower() == ".csv":
        return ValueError(f"{source}: {IMPORT_RANKINGS}")
    return ValueError(f"{source}: no such source; give {SOURCES}")


def _folder_entry(source: str) -> tuple[Path, str] | None:
    """Split FOLDER:NAME; the name of FOLDER alone is empty. None if the folder does not exist."""
    if Path(source).is_dir():
        return Path(source), ""
    folder, _, name = source.rpartition(":")
    if folder and Path(folder).is_dir():
        return Path(folder), name
    return None


def missing_file(source: str) -> Path | None:
    """Return the missing file or folder of a source, images aside.

    Returns:
        None if it exists, or belongs to the tiny world, which is drawn.

    Raises:
        ValueError: if dataset_info.json is invalid or lacks the entry, or an existing file has an unknown form.
    """
    if source.startswith(TINY):
        return None

    needed = Path(source)
    if needed.suffix.lower() not in (".jsonl", ".json"):
        folder_entry = _folder_entry(source)
        if folder_entry is None:
            if needed.is_file():
                raise _unreadable(source)
            return Path(source.rpartition(":")[0] or source)
        needed = folder_entry[0] / INFO
        if needed.is_file():
            _, entry = _entry(*folder_entry)
            with blamed_on(needed):
                needed = inside(folder_entry[0], entry.file_name)
    return None if needed.is_file() else needed


def check_images(comparisons: Sequence[Comparison], *, source: str) -> None:
    """Check that every image exists.

    Raises:
        MissingImagesError: with a list of the missing images.
    """
    # A dict keeps the order, in which the message lists them.
    paths: dict[Path, None] = {}
    for comparison in comparisons:
        paths |= dict.fromkeys(comparison.images)
    missing = []
    for path in paths:
        if not path.is_file():
            missing.append(path)
    if missing:
        raise MissingImagesError(
            f"{source}: {len(missing)} image(s) missing; unpack them into its folder:{listed(missing)}"
        )


def answer_text(comparison: Comparison) -> str:
    """Return the answer of the data, or compose it from the label and the reasons."""
    if comparison.answer:
        return comparison.answer
    label = "Yes" if comparison.consistent else "No"
    return f"{label}. {comparison.reasons}".strip()


# --- the project's JSONL ---------------------------------------------------------------------------------------


def load_comparisons(path: str | Path) -> list[Comparison]:
    """Read a JSONL file of records with `images`, `question`, `consistent`; `reasons`, `category`, `group` if given.

    Raises:
        ValueError: naming file, line, fault and fix.
        MissingImagesError: with a list of the missing images.
    """
    path = Path(path)
    parse = partial(_comparison, folder=path.parent)
    comparisons = read_records(path, parse, kind="comparison", fix=f"give {SOURCES}")
    check_images(comparisons, source=str(path))
    return comparisons


def save_comparisons(comparisons: Iterable[Comparison], path: Path) -> None:
    """Write comparisons for `load_comparisons`; images must be below the file's folder."""

    def rows() -> Iterator[JsonObject]:
        for comparison in comparisons:
            row = {"images": [image.relative_to(path.parent).as_posix() for image in comparison.images]}
            for name in ("question", "consistent", "reasons", "category", "group"):
                row[name] = getattr(comparison, name)
            yield row | ({"answer": comparison.answer} if comparison.answer else {})

    write_jsonl(path, rows())


class ComparisonRecord(BaseModel):
    """A line of the project's own JSONL."""

    images: list[str]
    question: Annotated[str, Field(pattern=r"\S")]
    consistent: bool
    reasons: str | None = None
    category: str | None = None
    group: str | None = None
    answer: str | None = None


def _comparison(record: JsonObject, folder: Path) -> Comparison:
    # A ranking would pass as a pair with unknown keys.
    if "candidates" in record and "consistent" not in record:
        raise ValueError(IMPORT_RANKINGS)
    check_keys(record, ComparisonRecord.model_fields)
    given = typed(record, ComparisonRecord)
    answer = given.answer or ""
    if answer and _decision(answer)[0] != given.consistent:
        raise ValueError(f"'consistent' is {str(given.consistent).lower()} and the answer begins with {answer[:40]!r}")
    images = image_paths(given.images, folder)
    _check_tags(given.question, images, tags_required=False)
    _check_turns(given.question, answer, given.reasons or "")
    return Comparison(
        images=images,
        question=given.question,
        consistent=given.consistent,
        reasons=given.reasons or "",
        category=given.category or "",
        group=given.group or "",
        answer=answer,
    )


# --- LLaMA-Factory's sharegpt form -----------------------------------------------------------------------------


def load_sharegpt(folder: str | Path, name: str = "") -> list[Comparison]:
    """Read an entry of a folder's dataset_info.json by its name or file name; the only entry if `name` is empty.

    A record is a user's turn and the assistant's answer, with one `<image>` per image. Its `category` defaults to the
    entry's name.

    Raises:
        ValueError: naming file and record.
        MissingImagesError: with a list of the missing images.
    """
    folder = Path(folder)
    key, entry = _entry(folder, name)
    # LLaMA-Factory's default form is alpaca.
    if entry.formatting != "sharegpt":
        raise ValueError(f"{folder / INFO}: {key} is not in the sharegpt form; give its 'formatting', or another entry")

    path = inside(folder, entry.file_name)
    records = read_json(path, fix=f"give {SOURCES}")
    if not isinstance(records, list):
        raise ValueError(f"{path}: a dataset is a list of records, this is a {type(records).__name__}")

    # The entry's names of columns and roles, over LLaMA-Factory's.
    columns = COLUMNS | entry.columns
    tags = TAGS | entry.tags
    comparisons = []
    for number, record in enumerate(records, start=1):
        with blamed_on(f"{path}, record {number}"):
            comparison = _turns(record, folder, columns, tags)
            comparisons.append(replace(comparison, category=comparison.category or key))
    check_images(comparisons, source=str(path))
    return comparisons


def save_sharegpt(datasets: Mapping[str, Iterable[Comparison]], folder: Path) -> list[Path]:
    """Write NAME.json for each name and one dataset_info.json, for `load_sharegpt` and LLaMA-Factory.

    Images must be below `folder`. LLaMA-Factory ignores the keys `group` and `category`.

    Returns:
        The written files.
    """

    def row_of(comparison: Comparison) -> JsonObject:
        # LLaMA-Factory puts an image at each tag, and refuses a record whose tags and images differ in number.
        question = comparison.question
        if IMAGE_TAG not in question:
            question = IMAGE_TAG * len(comparison.images) + question
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer_text(comparison)},
        ]
        images = [image.relative_to(folder).as_posix() for image in comparison.images]
        return {"messages": messages, "images": images, "category": comparison.category, "group": comparison.group}

    paths = []
    info = {}
    for name, comparisons in datasets.items():
        path = folder / f"{name}.json"
        write_json_list(path, map(row_of, comparisons))
        paths.append(path)
        info[name] = {"file_name": path.name, **OPENAI_FORM}
    write_json(folder / INFO, info)
    return [*paths, folder / INFO]


def _info(folder: Path) -> dict[str, DatasetEntry]:
    info = read_json(folder / INFO, fix=f"give {SOURCES}")
    with blamed_on(f"{folder / INFO}: it must map names to entries"):
        return typed(info, dict[str, DatasetEntry])


def _entry(folder: Path, name: str) -> tuple[str, DatasetEntry]:
    """Find an entry by its name or file name; without a dataset_info.json, a file has the form of PaCo-Dataset."""
    if not (folder / INFO).is_file() and name.endswith(".json"):
        return Path(name).stem, DatasetEntry.model_validate({"file_name": name, **OPENAI_FORM})
    info = _info(folder)

    # By name, by file name, or the only one.
    matching = {}
    for key, entry in info.items():
        if name in ("", key, entry.file_name):
            matching[key] = entry

    if len(matching) != 1:
        fault = f"{name!r} is not in it" if name else f"it has {len(info)} entries"
        raise ValueError(f"{folder / INFO}: {fault}; name one as {folder}:NAME, of {', '.join(info) or 'none'}")
    return next(iter(matching.items()))


def _turns(record: Any, folder: Path, columns: Mapping[str, str], tags: Mapping[str, str]) -> Comparison:
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, this is a {type(record).__name__}")

    # A question and its answer.
    with blamed_on(columns["messages"]):
        messages = typed(record.get(columns["messages"]), list[dict[str, str]])
    roles = [message.get(tags["role_tag"]) for message in messages]
    turns = [tags["user_tag"], tags["assistant_tag"]]
    if roles != turns:
        raise ValueError(f"its turns are {roles}, and must be {turns}: a question and its answer")
    question, answer = (message.get(tags["content_tag"], "") for message in messages)

    # Images and tags: each tag in the question is an image in the list.
    with blamed_on(columns["images"]):
        images = image_paths(typed(record.get(columns["images"]), list[str]), folder)
    _check_tags(question, images, tags_required=True)
    _check_turns(question, answer)
    consistent, reasons = _decision(answer)
    return Comparison(
        images=images,
        # A judge's template puts images in front of the question; tags within it stay.
        question=question.removeprefix(IMAGE_TAG * len(images)),
        consistent=consistent,
        reasons=reasons,
        category=str(record.get("category") or ""),
        group=str(record.get("group") or ""),
        answer=answer,
    )


def _decision(answer: str) -> tuple[bool, str]:
    """Split an answer into its Yes (True) or No and the text after it."""
    decision = DECISION.match(answer)
    if not decision:
        raise ValueError(f"the answer must begin with Yes or No, it is {answer[:40]!r}")
    return decision[1] == "Yes", answer[decision.end() :]


def _check_tags(question: str, images: Sequence[Path], *, tags_required: bool) -> None:
    count = question.count(IMAGE_TAG)
    if count != len(images) and (count or tags_required):
        raise ValueError(f"it has {len(images)} images and {count} {IMAGE_TAG} tags; there must be one for each")


def image_paths(names: Sequence[str], folder: Path) -> tuple[Path, ...]:
    """Resolve the paths of a record's images. Raises ValueError for none, and for paths out of the folder."""
    if not all(names) or not names:
        raise ValueError(f"'images' must be a list of paths, got {names!r}")
    paths = []
    for name in names:
        inside(folder, name)
        paths.append(folder / name)
    return tuple(paths)


def _check_turns(*texts: str) -> None:
    for text in texts:
        fault = text_fault(text)
        if fault:
            raise ValueError(fault)


def group_of(comparison: Comparison) -> str:
    """Name the group of a comparison; by default its first image."""
    return comparison.group or str(comparison.images[0])
