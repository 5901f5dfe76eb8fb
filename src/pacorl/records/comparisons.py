"""Files of comparisons, the training data of a judge.

    comparisons = comparisons_from("data/PaCo-Dataset:consistency_reward_cot_train")

A source is one of
    FILE.jsonl             the project's own, one comparison a line (`pacorl dataset export`)
    FOLDER:NAME            an entry of the folder's dataset_info.json in LLaMA-Factory's sharegpt form (PaCo-Dataset)
    tiny:train|dev|test    pairs of the tiny world, drawn on demand, with a count as in tiny:dev:40

Questions and answers are not changed. Image paths are relative to the file, or to FOLDER, and cannot leave its folder.
An error names the file and the line or record. No record is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AliasChoices, BaseModel, Field

from pacorl.io.documents import (
    JsonObject,
    blamed_on,
    read_object,
    read_records,
    typed,
    write_json,
    write_jsonl,
)
from pacorl.io.files import inside, make_folder
from pacorl.io.images import listed
from pacorl.records.fields import Name, Spoken, Text, validated
from pacorl.records.prompts import TINY, evenly_spread, tiny_source
from pacorl.tiny.comparisons import draw_comparisons
from pacorl.types import Comparison

IMAGE_TAG = "<image>"
SOURCES = (
    "a .jsonl of comparisons, FOLDER:NAME for an entry of its dataset_info.json, or tiny:train|dev|test; "
    "`pacorl dataset export SET --rankings FILE` makes comparisons of rankings"
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


class MissingDataError(ValueError):
    """The file of a source is missing, or images of it, which the message lists."""


def comparisons_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[Comparison]:
    """Read the comparisons of a source, at most `limit` of them, evenly spread.

    Args:
        scratch: folder in which pairs of the tiny world are drawn.

    Raises:
        ValueError: for an unknown or empty source, or a faulty record.
        MissingDataError: for a missing file or image.
    """
    entry = ""
    if source.startswith(TINY):
        assert scratch is not None, "pairs of the tiny world are drawn into files, which need a folder"
        split, count = tiny_source(source)
        count = count or TINY_COUNT
        folder = scratch / f"tiny-{split}-{count}"
        path = folder / "comparisons.jsonl"
        if not path.is_file():
            make_folder(folder)
            save_comparisons(
                draw_comparisons(folder, split=split, count=count), path
            )  # last: an existing file is whole
    else:
        path, folder, entry = _located(source)
    comparisons = load_comparisons(path, entry=entry, folder=folder)
    if not comparisons:
        raise ValueError(f"{source}: holds no comparisons; give {SOURCES}")
    return evenly_spread(comparisons, limit)


def check_source(source: str) -> None:
    """Raise as `comparisons_from` does unless the file of a source exists."""
    if not source.startswith(TINY):
        _located(source)


class DatasetEntry(BaseModel):
    """An entry of dataset_info.json, without the keys that only LLaMA-Factory reads."""

    file_name: Name
    # LLaMA-Factory's default form is alpaca.
    formatting: Literal["sharegpt"]


def _located(source: str) -> tuple[Path, Path, str]:
    """Return the file of a source, the folder of its images, and the name of its entry."""
    path = Path(source)
    if path.suffix.lower() == ".jsonl":
        return _there(path), path.parent, ""
    folder_name, _, name = source.rpartition(":")
    if path.exists() or not name or not folder_name:
        raise ValueError(f"{source} has another form; give {SOURCES}")
    folder = Path(folder_name)
    info = _there(folder / INFO)
    entries = read_object(info)
    with blamed_on(info):
        if name not in entries:
            raise ValueError(f"{name!r} is not in it; it has {', '.join(entries)}")
        with blamed_on(name):
            file_name = typed(entries[name], DatasetEntry).file_name
        return _there(inside(folder, file_name)), folder, name


def _there(path: Path) -> Path:
    if not path.is_file():
        raise MissingDataError(f"{path} does not exist; give {SOURCES}, or fetch data by `pacorl data paco-dataset`")
    return path


def answer_text(comparison: Comparison) -> str:
    """Return the answer of the data, or compose it from the label and the reasons."""
    if comparison.answer:
        return comparison.answer
    label = "Yes" if comparison.consistent else "No"
    return f"{label}. {comparison.reasons}".strip()


def group_of(comparison: Comparison) -> str:
    """Name the group of a comparison; by default its first image."""
    return comparison.group or str(comparison.images[0])


class ComparisonRecord(BaseModel):
    """A line of the project's own JSONL."""

    images: Annotated[list[Name], Field(min_length=1)]
    question: Annotated[Spoken, Field(pattern=r"\S")]
    consistent: bool
    reasons: Spoken = ""
    category: Text = ""
    group: Text = ""


class Turn(BaseModel):
    """A question or its answer, under OpenAI's name or LLaMA-Factory's own."""

    content: Spoken = Field(validation_alias=AliasChoices("content", "value"))


class Conversation(BaseModel):
    """A record of the sharegpt form: a question about images, and its answer."""

    messages: tuple[Turn, Turn] = Field(validation_alias=AliasChoices("messages", "conversations"))
    images: Annotated[list[Name], Field(min_length=1)]
    category: Text = ""
    group: Text = ""


def load_comparisons(path: str | Path, *, entry: str = "", folder: Path | None = None) -> list[Comparison]:
    """Read a file of `ComparisonRecord`, or of an entry's conversations.

    Args:
        path: the file.
        entry: name of the entry of dataset_info.json, and category of conversations without one.
        folder: of the images; by default the file's.

    Raises:
        ValueError: naming file, line or record, fault and fix.
        MissingDataError: with a list of the missing images.
    """
    path = Path(path)
    images = folder or path.parent

    def parse(record: JsonObject) -> Comparison:
        if entry:
            fields = _of_conversation(typed(record, Conversation), entry)
        else:
            fields = validated(record, ComparisonRecord).model_dump()
        names, tags = fields["images"], fields["question"].count(IMAGE_TAG)
        if tags not in (0, len(names)):
            raise ValueError(f"it has {len(names)} images and {tags} {IMAGE_TAG} tags; there must be one for each")
        # A judge's template puts images in front of the question; tags within it stay.
        fields["question"] = fields["question"].removeprefix(IMAGE_TAG * len(names))
        for name in names:
            inside(images, name)
        return Comparison(**fields | {"images": tuple(images / name for name in names)})

    comparisons = read_records(path, parse, fix=f"give {SOURCES}")
    # A dict keeps the order, in which the message lists them.
    paths = dict.fromkeys(chain.from_iterable(comparison.images for comparison in comparisons))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise MissingDataError(
            f"{path}: {len(missing)} image(s) missing; unpack them into its folder:{listed(missing)}"
        )
    return comparisons


def _of_conversation(row: Conversation, category: str) -> JsonObject:
    """Return the fields of a comparison."""
    question, answer = (turn.content for turn in row.messages)
    decision = DECISION.match(answer)
    if not decision:
        raise ValueError(f"the answer must begin with Yes or No, it is {answer[:40]!r}")
    return {
        "images": row.images,
        "question": question,
        "consistent": decision[1] == "Yes",
        "reasons": answer[decision.end() :],
        "answer": answer,
        "category": row.category or category,
        "group": row.group,
    }


def save_comparisons(comparisons: Iterable[Comparison], path: Path) -> None:
    """Write comparisons for `load_comparisons`; images must be below the file's folder."""

    def rows() -> Iterator[JsonObject]:
        for comparison in comparisons:
            row = {"images": [image.relative_to(path.parent).as_posix() for image in comparison.images]}
            for name in ("question", "consistent", "reasons", "category", "group"):
                row[name] = getattr(comparison, name)
            yield row

    write_jsonl(path, rows())


def save_sharegpt(datasets: Mapping[str, Iterable[Comparison]], folder: Path) -> list[Path]:
    """Write NAME.jsonl for each name and one dataset_info.json, for `load_comparisons` and LLaMA-Factory.

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
        paths.append(folder / f"{name}.jsonl")
        write_jsonl(paths[-1], map(row_of, comparisons))
        info[name] = {"file_name": paths[-1].name, **OPENAI_FORM}
    write_json(folder / INFO, info)
    return [*paths, folder / INFO]
