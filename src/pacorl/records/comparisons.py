"""Files of comparisons, the training data of a judge.

    comparisons = comparisons_from("data/PaCo-Dataset:consistency_reward_cot_train")

A source is one of
    FILE.jsonl             one comparison a line: {images, question, consistent}, or a conversation of the sharegpt form
    FOLDER:NAME            an entry of the folder's dataset_info.json, in LLaMA-Factory's sharegpt form (PaCo-Dataset)
    tiny:train|dev|test    pairs of the tiny world, drawn on demand, with a count as in tiny:dev:40

Questions and answers are not changed. Image paths are relative to the file, or to FOLDER, and cannot leave its folder.
An error names the file and the line or record. No record is skipped.
"""

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AliasChoices, BaseModel, Field, model_validator

from pacorl.io.documents import JsonObject, blamed_on, read_object, read_records, typed, write_json, write_jsonl
from pacorl.io.files import existing, inside, make_folder
from pacorl.io.terminal import excerpt
from pacorl.records.fields import Name, Spoken, Text, validated
from pacorl.records.prompts import TINY_PREFIX, evenly_spread, tiny_source
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


def comparisons_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[Comparison]:
    """Read the comparisons of a source, at most `limit` of them, evenly spread.

    Args:
        scratch: folder in which pairs of the tiny world are drawn.

    Raises:
        ValueError: for an unknown or empty source, a faulty record, or a missing file or image.
    """
    if source.startswith(TINY_PREFIX):
        assert scratch is not None, "pairs of the tiny world are drawn into files, which need a folder"
        split, count = tiny_source(source)
        count = count or TINY_COUNT
        folder = scratch / f"tiny-{split}-{count}"
        path = folder / "comparisons.jsonl"
        if not path.is_file():
            make_folder(folder)
            # Last: an existing file is whole.
            save_comparisons(draw_comparisons(folder, split=split, count=count), path)
    else:
        path, folder = _located(source)
    comparisons = read_records(path, partial(_comparison, folder=folder), fix=f"give {SOURCES}")
    if not comparisons:
        raise ValueError(f"{source}: holds no comparisons; give {SOURCES}")
    return evenly_spread(comparisons, limit)


def check_source(source: str) -> None:
    """Raise as `comparisons_from` does unless the file of a source exists."""
    if not source.startswith(TINY_PREFIX):
        _located(source)


class DatasetEntry(BaseModel):
    """An entry of dataset_info.json, without the keys that only LLaMA-Factory reads."""

    file_name: Name
    # LLaMA-Factory's default form is alpaca.
    formatting: Literal["sharegpt"]


def _located(source: str) -> tuple[Path, Path]:
    """Return the file of a source and the folder of its images."""
    path = Path(source)
    if path.suffix.lower() == ".jsonl":
        return _there(path), path.parent
    folder_name, _, name = source.rpartition(":")
    if not (folder_name and name):
        _there(path)
        raise ValueError(f"{source} has another form; give {SOURCES}")
    folder = Path(folder_name)
    info = _there(folder / INFO)
    entries = read_object(info)
    with blamed_on(info):
        if name not in entries:
            raise ValueError(f"{name!r} is not in it; it has {', '.join(entries)}")
        with blamed_on(name):
            file_name = typed(entries[name], DatasetEntry).file_name
        return _there(inside(folder, file_name)), folder


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give {SOURCES}")
    return path


def answer_text(comparison: Comparison) -> str:
    """Return the answer of the data, or compose it from the label and the reasons."""
    if comparison.answer:
        return comparison.answer
    label = "Yes" if comparison.consistent else "No"
    return f"{label}. {comparison.reasons}".strip()


class Turn(BaseModel):
    """A question or its answer, under OpenAI's name or LLaMA-Factory's own."""

    content: Spoken = Field(validation_alias=AliasChoices("content", "value"))


class ComparisonRecord(BaseModel):
    """A comparison, as fields or as a conversation of the sharegpt form."""

    images: Annotated[list[Name], Field(min_length=2, max_length=2)]
    messages: tuple[Turn, Turn] | None = Field(None, validation_alias=AliasChoices("messages", "conversations"))
    """A question about the images, and its answer."""
    question: Spoken = ""
    consistent: bool | None = None
    reasons: Spoken = ""
    category: Text = ""
    group: Text = ""

    @model_validator(mode="after")
    def _of_conversation(self) -> Self:
        if self.messages:
            self.question, answer = (turn.content for turn in self.messages)
            decision = DECISION.match(answer)
            if not decision:
                raise ValueError(f"the answer must begin with Yes or No, it is {excerpt(answer)}")
            self.consistent = decision[1] == "Yes"
            self.reasons = answer[decision.end() :]
        elif self.consistent is None or not self.question.strip():
            raise ValueError("'question' or 'consistent' is missing or empty; give both, or 'messages'")
        return self


def _comparison(record: JsonObject, *, folder: Path) -> Comparison:
    row = validated(record, ComparisonRecord)
    count, tags = len(row.images), row.question.count(IMAGE_TAG)
    if tags not in (0, count):
        raise ValueError(f"it has {count} images and {tags} {IMAGE_TAG} tags; there must be one for each")
    fields: dict[str, Any] = row.model_dump(exclude={"messages"}) | {
        "images": tuple(existing(folder, name, fix="; unpack the images beside the file") for name in row.images),
        # A judge's template puts images in front of the question; tags within it stay.
        "question": row.question.removeprefix(IMAGE_TAG * count),
        "answer": row.messages[1].content if row.messages else "",
    }
    return Comparison(**fields)


def save_comparisons(comparisons: Iterable[Comparison], path: Path) -> None:
    """Write comparisons in the sharegpt form; images must be below the file's folder.

    LLaMA-Factory ignores their `group` and `category`.
    """

    def row_of(comparison: Comparison) -> JsonObject:
        # LLaMA-Factory puts an image at each tag, and refuses a record whose tags and images differ in number.
        question = comparison.question
        if IMAGE_TAG not in question:
            question = IMAGE_TAG * len(comparison.images) + question
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer_text(comparison)}]
        images = [image.relative_to(path.parent).as_posix() for image in comparison.images]
        return {"messages": messages, "images": images, "category": comparison.category, "group": comparison.group}

    write_jsonl(path, map(row_of, comparisons))


def save_info(files: Iterable[Path], folder: Path) -> Path:
    """Write a folder's dataset_info.json, by which LLaMA-Factory finds its files of comparisons. Returns its path."""
    write_json(folder / INFO, {file.stem: {"file_name": file.name, **OPENAI_FORM} for file in files})
    return folder / INFO
