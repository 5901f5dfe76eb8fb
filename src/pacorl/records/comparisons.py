"""Files of comparisons, the training data of a judge.

    comparisons = comparisons_from("data/PaCo-Dataset:consistency_reward_cot_train")

A source is one of
    FILE.jsonl             the project's own, one comparison a line (`pacorl dataset export`)
    FOLDER:NAME            an entry of the folder's dataset_info.json in LLaMA-Factory's sharegpt form (PaCo-Dataset)
    FILE.json              such a file by its own name, described by the folder's dataset_info.json if there is one
    tiny:train|dev|test    pairs of the tiny world, drawn on demand, with a count as in tiny:dev:40

`pacorl dataset export --rankings` turns your own rankings into the first form (docs/train-judge.md).

Questions and answers are not changed. Image paths are relative to the file and cannot leave its folder. An error names
the file and the line or record. No record is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AliasChoices, BaseModel, Field

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
# The names in PaCo-Dataset and in our exports, as LLaMA-Factory describes them.
OPENAI_FORM = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}
TURNS = (("user", "human"), ("assistant", "gpt"))
"""Roles of a question and its answer, in OpenAI's names and in LLaMA-Factory's."""


class DatasetEntry(BaseModel):
    """An entry of dataset_info.json, without the keys that only LLaMA-Factory reads."""

    file_name: str = ""
    formatting: str = ""


class Turn(BaseModel):
    """A turn of a conversation."""

    role: Annotated[str, Field(validation_alias=AliasChoices("role", "from"))]
    content: Annotated[str, Field(validation_alias=AliasChoices("content", "value"))]


class Conversation(BaseModel):
    """A record of the sharegpt form: a question about images, and its answer."""

    messages: Annotated[list[Turn], Field(validation_alias=AliasChoices("messages", "conversations"))]
    images: list[str]
    category: str | None = None
    group: str | None = None


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

    path, name = _located(source)
    if not path.is_file():
        raise ValueError(f"{source}: {path} does not exist; give {SOURCES}")
    if path.suffix.lower() == ".json":
        # Images of an entry are named from the folder that describes it.
        folder = path.parent if source.lower().endswith(".json") else _folder(source)[0]
        return load_sharegpt(path, name, folder=folder)
    return load_comparisons(path)


def missing_file(source: str) -> Path | None:
    """Return the missing file or folder of a source, images aside.

    Returns:
        None if it exists, or belongs to the tiny world, which is drawn.

    Raises:
        ValueError: if dataset_info.json is invalid or lacks the entry, or an existing file has an unknown form.
    """
    path = None if source.startswith(TINY) else _located(source)[0]
    return None if path is None or path.is_file() else path


def _located(source: str) -> tuple[Path, str]:
    """Return the file of a source, or the first missing file or folder, and the name of its entry."""
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return path, ""
    if suffix == ".json":
        is_described = path.is_file() and (path.parent / INFO).is_file()
        return _entry(path.parent, path.name) if is_described else (path, path.stem)
    if path.is_file():
        form = IMPORT_RANKINGS if suffix == ".csv" else f"it has another form; give {SOURCES}"
        raise ValueError(f"{source}: {form}")

    # An entry of a folder's dataset_info.json.
    folder, name = _folder(source)
    if not folder.is_dir() or not (folder / INFO).is_file():
        return (folder / INFO if folder.is_dir() else folder), ""
    return _entry(folder, name)


def _folder(source: str) -> tuple[Path, str]:
    """Split FOLDER:NAME; the name of FOLDER alone is empty."""
    if Path(source).is_dir():
        return Path(source), ""
    folder, _, name = source.rpartition(":")
    return Path(folder or source), name


def _entry(folder: Path, name: str) -> tuple[Path, str]:
    """Find an entry of dataset_info.json by its name or file name, or the only one; return its file and name."""
    info = read_json(folder / INFO, fix=f"give {SOURCES}")
    with blamed_on(folder / INFO):
        entries = typed(info, dict[str, DatasetEntry])
        matching = [key for key, entry in entries.items() if name in ("", key, entry.file_name)]
        if len(matching) != 1:
            fault = f"{name!r} is not in it" if name else f"it has {len(entries)} entries"
            raise ValueError(f"{fault}; name one as {folder}:NAME, of {', '.join(entries) or 'none'}")
        entry = entries[matching[0]]
        # LLaMA-Factory's default form is alpaca.
        if entry.formatting != "sharegpt":
            raise ValueError(f"{matching[0]} is not in the sharegpt form; give its 'formatting', or another entry")
        return inside(folder, entry.file_name), matching[0]


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


def load_sharegpt(path: Path, category: str, *, folder: Path) -> list[Comparison]:
    """Read a list of conversations: a user's turn and the assistant's answer, with one `<image>` per image.

    Args:
        path: the file.
        category: of records without one.
        folder: of the images.

    Raises:
        ValueError: naming file and record.
        MissingImagesError: with a list of the missing images.
    """
    records = read_json(path)
    if not isinstance(records, list):
        raise ValueError(f"{path}: a dataset is a list of records, this is a {type(records).__name__}")
    comparisons = []
    for number, record in enumerate(records, start=1):
        with blamed_on(f"{path}, record {number}"):
            comparison = _conversation(typed(record, Conversation), folder)
            comparisons.append(replace(comparison, category=comparison.category or category))
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


def _conversation(record: Conversation, folder: Path) -> Comparison:
    roles = [turn.role for turn in record.messages]
    if len(roles) != len(TURNS) or not all(role in names for role, names in zip(roles, TURNS, strict=True)):
        raise ValueError(f"its turns are {roles}, and must be ['user', 'assistant']: a question and its answer")
    question, answer = (turn.content for turn in record.messages)
    images = image_paths(record.images, folder)
    _check_tags(question, images, tags_required=True)
    _check_turns(question, answer)
    consistent, reasons = _decision(answer)
    return Comparison(
        images=images,
        # A judge's template puts images in front of the question; tags within it stay.
        question=question.removeprefix(IMAGE_TAG * len(images)),
        consistent=consistent,
        reasons=reasons,
        category=record.category or "",
        group=record.group or "",
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
