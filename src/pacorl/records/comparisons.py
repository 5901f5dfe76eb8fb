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
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    write_json_list,
    write_jsonl,
)
from pacorl.io.files import inside, make_folder
from pacorl.io.images import listed
from pacorl.records.fields import Name, Spoken, Text, validated
from pacorl.records.prompts import TINY, TINY_COUNTS, evenly_spread, tiny_source
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


class MissingImagesError(ValueError):
    """Images of a source are missing; the message lists them."""


def comparisons_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[Comparison]:
    """Read the comparisons of a source, at most `limit` of them, evenly spread.

    Args:
        scratch: folder in which pairs of the tiny world are drawn.

    Raises:
        ValueError: for an unknown or empty source, a faulty record, or a missing image.
    """
    if source.startswith(TINY):
        assert scratch is not None, "pairs of the tiny world are drawn into files, which need a folder"
        split, count = tiny_source(source, counts=dict.fromkeys(TINY_COUNTS, TINY_COUNT))
        path = scratch / f"tiny-{split}-{count}" / "comparisons.jsonl"
        if not path.is_file():
            make_folder(path.parent)
            drawn = draw_comparisons(path.parent, split=split, count=count)
            save_comparisons(drawn, path)  # last: an existing file is whole
        comparisons = load_comparisons(path)
    else:
        path, folder, name = _located(source)
        if not path.is_file():
            raise ValueError(f"{source}: {path} does not exist; give {SOURCES}")
        comparisons = load_comparisons(path, entry=name, folder=folder)
    if not comparisons:
        raise ValueError(f"{source}: holds no comparisons; give {SOURCES}")
    return evenly_spread(comparisons, limit, source=source)


def missing_file(source: str) -> Path | None:
    """Return the missing file of a source, images aside; None if it exists, or belongs to the tiny world.

    Raises:
        ValueError: if dataset_info.json is invalid or lacks the entry, or the source is a file of another form.
    """
    if source.startswith(TINY):
        return None
    path = _located(source)[0]
    if path.is_file():
        return None
    return path


class DatasetEntry(BaseModel):
    """An entry of dataset_info.json, without the keys that only LLaMA-Factory reads."""

    file_name: Name
    formatting: Literal["sharegpt"]


def _located(source: str) -> tuple[Path, Path, str]:
    """Return the file of a source, the folder of its images, and the name of its entry; or a missing file alone."""
    path = Path(source)
    if path.suffix.lower() == ".jsonl":
        return path, path.parent, ""
    folder, _, name = source.rpartition(":")
    if path.exists() or not name or not folder:
        raise ValueError(f"{source} has another form; give {SOURCES}")
    info = Path(folder) / INFO
    if not info.is_file():
        return info, info.parent, ""
    entries = read_object(info)
    with blamed_on(info):
        if name not in entries:
            raise ValueError(f"{name!r} is not in it; name one as {folder}:NAME, of {', '.join(entries)}")
        # LLaMA-Factory's default form is alpaca.
        with blamed_on(name):
            entry = typed(entries[name], DatasetEntry)
        return inside(info.parent, entry.file_name), info.parent, name


def answer_text(comparison: Comparison) -> str:
    """Return the answer of the data, or compose it from the label and the reasons."""
    if comparison.answer:
        return comparison.answer
    label = "Yes" if comparison.consistent else "No"
    return f"{label}. {comparison.reasons}".strip()


def group_of(comparison: Comparison) -> str:
    """Name the group of a comparison; by default its first image."""
    return comparison.group or str(comparison.images[0])


def _decision(answer: str) -> tuple[bool, str]:
    """Split an answer into its Yes (True) or No and the text after it."""
    decision = DECISION.match(answer)
    if not decision:
        raise ValueError(f"the answer must begin with Yes or No, it is {answer[:40]!r}")
    return decision[1] == "Yes", answer[decision.end() :]


def _check_tags(question: str, images: Sequence[str]) -> None:
    count = question.count(IMAGE_TAG)
    if count != len(images):
        raise ValueError(f"it has {len(images)} images and {count} {IMAGE_TAG} tags; there must be one for each")


# --- the project's JSONL ---------------------------------------------------------------------------------------


Images = Annotated[list[Name], Field(min_length=1)]


class ComparisonRecord(BaseModel):
    """A line of the project's own JSONL."""

    images: Images
    question: Annotated[Spoken, Field(pattern=r"\S")]
    consistent: bool
    reasons: Spoken = ""
    category: Text = ""
    group: Text = ""
    answer: Spoken = ""


def load_comparisons(path: str | Path, *, entry: str = "", folder: Path | None = None) -> list[Comparison]:
    """Read a file of `ComparisonRecord`, or of an entry's conversations.

    Args:
        path: the file.
        entry: name of the entry of dataset_info.json, and category of conversations without one.
        folder: of the images; by default the file's.

    Raises:
        ValueError: naming file, line or record, fault and fix.
        MissingImagesError: with a list of the missing images.
    """
    path = Path(path)
    images = folder or path.parent

    def parse(record: JsonObject) -> Comparison:
        row = _conversation(record, entry) if entry else validated(record, ComparisonRecord)
        if row.answer and _decision(row.answer)[0] != row.consistent:
            raise ValueError(f"'consistent' is {row.consistent} and the answer begins with {row.answer[:40]!r}")
        if IMAGE_TAG in row.question:
            _check_tags(row.question, row.images)
        for name in row.images:
            inside(images, name)
        return Comparison(**row.model_dump() | {"images": tuple(images / name for name in row.images)})

    comparisons = read_records(path, parse, fix=f"give {SOURCES}")
    # A dict keeps the order, in which the message lists them.
    paths = dict.fromkeys(chain.from_iterable(comparison.images for comparison in comparisons))
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise MissingImagesError(
            f"{path}: {len(missing)} image(s) missing; unpack them into its folder:{listed(missing)}"
        )
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


# --- LLaMA-Factory's sharegpt form -----------------------------------------------------------------------------


ROLE = Field(validation_alias=AliasChoices("role", "from"))
CONTENT = Field(validation_alias=AliasChoices("content", "value"))


class UserTurn(BaseModel):
    """A question, in OpenAI's names or in LLaMA-Factory's own."""

    role: Annotated[Literal["user", "human"], ROLE]
    content: Annotated[Spoken, CONTENT]


class AssistantTurn(BaseModel):
    """Its answer."""

    role: Annotated[Literal["assistant", "gpt"], ROLE]
    content: Annotated[Spoken, CONTENT]


class Conversation(BaseModel):
    """A record of the sharegpt form: a question about images, and its answer."""

    messages: Annotated[
        tuple[UserTurn, AssistantTurn], Field(validation_alias=AliasChoices("messages", "conversations"))
    ]
    images: Images
    category: Text = ""
    group: Text = ""


def _conversation(record: JsonObject, category: str) -> ComparisonRecord:
    """Read a conversation as a record of the project's own."""
    row = typed(record, Conversation)
    question, answer = (turn.content for turn in row.messages)
    _check_tags(question, row.images)
    consistent, reasons = _decision(answer)
    # A judge's template puts images in front of the question; tags within it stay.
    question = question.removeprefix(IMAGE_TAG * len(row.images))
    fields = {"images": row.images, "question": question, "group": row.group, "category": row.category or category}
    return typed(fields | {"consistent": consistent, "reasons": reasons, "answer": answer}, ComparisonRecord)


def save_sharegpt(datasets: Mapping[str, Iterable[Comparison]], folder: Path) -> list[Path]:
    """Write NAME.json for each name and one dataset_info.json, for `load_comparisons` and LLaMA-Factory.

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
