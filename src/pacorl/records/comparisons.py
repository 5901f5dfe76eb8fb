"""Comparisons in files: what a judge learns from.

    comparisons = comparisons_from("data/PaCo-Dataset:consistency_reward_cot_train")

A source is one of
    FILE.jsonl             the project's own, one comparison a line (`pacorl dataset export`)
    FOLDER:NAME            an entry of the folder's dataset_info.json in LLaMA-Factory's sharegpt form (PaCo-Dataset)
    FILE.json              such a file by its own name; a dataset_info.json beside it describes it, if there is one
    tiny:train|dev|test    pairs of the tiny world, drawn on demand, with a count as in tiny:dev:40

Rankings of one's own become the first of these by `pacorl dataset import` and `export` (docs/your-domain.md).

Questions and answers are taken as they are. Image paths are relative to the file and cannot leave its folder. A fault
names file, and line or record; nothing is skipped.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pacorl.core.questions import meets_criterion, text_fault
from pacorl.io.documents import (
    blamed_on,
    check_keys,
    read_json,
    read_records,
    text_field,
    typed,
    write_json,
    write_jsonl,
)
from pacorl.io.files import inside, make_folder, write_atomic
from pacorl.io.images import listed, png_bytes
from pacorl.records.prompts import TINY, TINY_COUNTS, evenly_spread, tiny_source
from pacorl.tiny import characters
from pacorl.tiny.characters import IDENTITY, Split, with_another
from pacorl.types import Comparison

IMAGE_TAG = "<image>"
SOURCES = "a .jsonl of comparisons, FOLDER:NAME for an entry of its dataset_info.json, a .json, or tiny:train|dev|test"
IMPORT_RANKINGS = (
    "rankings are no comparisons yet; make them some with `pacorl dataset import SET FILE --kind rankings` and "
    "`pacorl dataset export SET`, and name SET/export/comparisons_train.jsonl"
)
KEYS = ("images", "question", "consistent", "reasons", "category", "group", "answer")
"""Of the project's own records."""
DECISION = re.compile(r"(Yes|No)\b[.,:;!]*\s*")
TINY_COUNT = 200
"""Pairs of a split of the tiny world if a source gives no count."""
TINY_SIDE = 64
"""Pixels of a drawn panel."""
ONE_HERO = "The hero is the same in all images, whatever the palette."

INFO = "dataset_info.json"
# LLaMA-Factory's own defaults for entries of dataset_info.json that do not say otherwise.
COLUMNS = {"messages": "conversations", "images": "images"}
TAGS = {"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt"}
# How PaCo-Dataset and our exports name them: for a file that nothing describes.
OPENAI_FORM = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
}


class DatasetEntry(BaseModel):
    """What is read of an entry of dataset_info.json."""

    file_name: str = ""
    formatting: str = ""
    columns: dict[str, str] = {}
    tags: dict[str, str] = {}


class MissingImagesError(ValueError):
    """Images of a source are not where it says; the message lists them."""


def comparisons_from(source: str, *, limit: int | None = None, scratch: Path | None = None) -> list[Comparison]:
    """The comparisons of a source; at most `limit` of them, evenly spread.

    `scratch` is the folder in which pairs of the tiny world are drawn. Raises ValueError for an unknown source, for
    what `load_comparisons` and `load_sharegpt` refuse, and for missing images.
    """
    comparisons = _comparisons(source, scratch)
    if not comparisons:
        raise ValueError(f"{source}: holds no comparisons; give {SOURCES}")
    return evenly_spread(comparisons, limit, source=source)


def _comparisons(source: str, scratch: Path | None) -> list[Comparison]:
    path = Path(source)
    suffix = Path(source).suffix.lower()
    if source.startswith(TINY):
        return _tiny_comparisons(source, scratch)
    if suffix == ".jsonl":
        return load_comparisons(path)
    if suffix == ".json":
        if not path.is_file():
            raise ValueError(f"{path}: no such file; give {SOURCES}")
        return load_sharegpt(path.parent, path.name)
    if folder_entry := _folder_entry(source):
        return load_sharegpt(*folder_entry)
    raise _unreadable(source)


def _unreadable(source: str) -> ValueError:
    """The error of a source that is none of the readable forms."""
    if Path(source).suffix.lower() == ".csv":
        return ValueError(f"{source}: {IMPORT_RANKINGS}")
    return ValueError(f"{source}: no such source; give {SOURCES}")


def _folder_entry(source: str) -> tuple[Path, str] | None:
    """The folder and the name of FOLDER or FOLDER:NAME; None if there is no such folder."""
    folder, _, name = source.rpartition(":")
    if Path(source).is_dir():
        return Path(source), ""
    return (Path(folder), name) if folder and Path(folder).is_dir() else None


def missing_file(source: str) -> Path | None:
    """The file or folder that a source needs and that is not there, its images aside.

    Returns:
        None if it is all there, or is of the tiny world, which is drawn.

    Raises:
        ValueError: A dataset_info.json is no such file, or has no such entry, or an existing file has another form.
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
    """Raises MissingImagesError that lists the images that are not there."""
    paths = dict.fromkeys(path for comparison in comparisons for path in comparison.images)
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise MissingImagesError(f"{source}: {len(missing)} image(s) missing; unpack them beside it:{listed(missing)}")


def answer_text(comparison: Comparison) -> str:
    """The whole answer: word for word if the data gives it, else the label and the reasons."""
    return comparison.answer or f"{'Yes' if comparison.consistent else 'No'}. {comparison.reasons}".strip()


# --- the project's JSONL ---------------------------------------------------------------------------------------


def load_comparisons(path: str | Path) -> list[Comparison]:
    """Every comparison of a JSONL file: `images`, `question`, `consistent`, and perhaps `reasons`, `category`, `group`.

    Raises ValueError that names file, line, fault and fix, and one that lists missing images.
    """
    path = Path(path)
    parse = partial(_comparison, folder=path.parent)
    comparisons = read_records(path, parse, kind="comparison", fix=f"give {SOURCES}")
    check_images(comparisons, source=str(path))
    return comparisons


def save_comparisons(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write comparisons that `load_comparisons` reads back; images must lie below the file's folder."""
    rows = []
    for comparison in comparisons:
        row: dict[str, Any] = {"images": [image.relative_to(path.parent).as_posix() for image in comparison.images]}
        names = ("question", "consistent", "reasons", "category", "group", *(["answer"] if comparison.answer else []))
        rows.append(row | {name: getattr(comparison, name) for name in names})
    write_jsonl(path, rows)


def _comparison(record: Mapping[str, Any], folder: Path) -> Comparison:
    if "candidates" in record and "consistent" not in record:
        raise ValueError(IMPORT_RANKINGS)
    check_keys(record, KEYS)
    consistent = record.get("consistent")
    answer = text_field(record, "answer")
    if not isinstance(consistent, bool):
        raise ValueError(f"'consistent' must be true or false, got {consistent!r}")
    if answer and _decision(answer)[0] != consistent:
        raise ValueError(f"'consistent' is {str(consistent).lower()} and the answer says {answer[:40]!r}")
    images = _images(record.get("images"), folder)
    question = text_field(record, "question")
    if not question.strip():
        raise ValueError("'question' is missing or empty; give what the judge is to be asked")
    _check_tags(question, images, tags_required=False)
    texts = {name: text_field(record, name) for name in ("reasons", "category", "group")}
    _check_turns(question, answer, texts["reasons"])
    return Comparison(images=images, question=question, consistent=consistent, answer=answer, **texts)


# --- LLaMA-Factory's sharegpt form -----------------------------------------------------------------------------


def load_sharegpt(folder: str | Path, name: str = "") -> list[Comparison]:
    """An entry of a folder's dataset_info.json, by its name or file name; the only one if `name` is empty.

    A record is a user's turn and the assistant's answer, with one `<image>` for each image. Its `category`, if it has
    none of its own, is the entry's name. Raises ValueError that names file and record, and one that lists missing
    images.
    """
    folder = Path(folder)
    key, entry = _entry(folder, name)
    if entry.formatting != "sharegpt":  # LLaMA-Factory takes an entry that does not say for alpaca's
        raise ValueError(f"{folder / INFO}: {key} is not in the sharegpt form, which is what is read")
    path = inside(folder, entry.file_name)
    columns = COLUMNS | entry.columns
    tags = TAGS | entry.tags
    records = read_json(path, fix=f"give {SOURCES}")
    if not isinstance(records, list):
        raise ValueError(f"{path}: a dataset is a list of records, this is a {type(records).__name__}")
    comparisons = []
    for number, record in enumerate(records, start=1):
        with blamed_on(f"{path}, record {number}"):
            comparison = _turns(record, folder, columns, tags)
            comparisons.append(replace(comparison, category=comparison.category or key))
    check_images(comparisons, source=str(path))
    return comparisons


def save_sharegpt(datasets: Mapping[str, Sequence[Comparison]], folder: Path) -> list[Path]:
    """Write NAME.json for each name and one dataset_info.json, which `load_sharegpt` and LLaMA-Factory read.

    Images must lie below `folder`. Group and category go along under keys that LLaMA-Factory does not look at.
    Returns the files.
    """
    paths = [folder / f"{name}.json" for name in datasets]
    for path, comparisons in zip(paths, datasets.values(), strict=True):
        write_json(path, [_sharegpt_row(comparison, folder) for comparison in comparisons], indent=1)
    write_json(folder / INFO, {path.stem: {"file_name": path.name, **OPENAI_FORM} for path in paths})
    return [*paths, folder / INFO]


def _sharegpt_row(comparison: Comparison, folder: Path) -> dict[str, Any]:
    # LLaMA-Factory puts an image at each tag, and refuses a record whose tags and images differ in number.
    leading = "" if IMAGE_TAG in comparison.question else IMAGE_TAG * len(comparison.images)
    return {
        "messages": [
            {"role": "user", "content": leading + comparison.question},
            {"role": "assistant", "content": answer_text(comparison)},
        ],
        "images": [image.relative_to(folder).as_posix() for image in comparison.images],
        "category": comparison.category,
        "group": comparison.group,
    }


def sharegpt_names(folder: Path) -> list[str]:
    """The entries of a folder's dataset_info.json that are in the sharegpt form."""
    return [name for name, entry in _info(folder).items() if entry.formatting == "sharegpt"]


def sharegpt_files(folder: Path) -> list[Path]:
    """dataset_info.json and the files of its entries in the sharegpt form."""
    entries = _info(folder)
    return [folder / INFO, *(inside(folder, entries[name].file_name) for name in sharegpt_names(folder))]


def _info(folder: Path) -> dict[str, DatasetEntry]:
    info = read_json(folder / INFO, fix=f"give {SOURCES}")
    with blamed_on(f"{folder / INFO}: it must map names to entries"):
        return typed(info, dict[str, DatasetEntry])


def _entry(folder: Path, name: str) -> tuple[str, DatasetEntry]:
    """An entry and its name, by the name or by its file's; a file that nothing describes is read as PaCo-Dataset's."""
    if not (folder / INFO).is_file() and name.endswith(".json"):
        return Path(name).stem, DatasetEntry.model_validate({"file_name": name, **OPENAI_FORM})
    info = _info(folder)

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
    messages = record.get(columns["messages"])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{columns['messages']!r} must be a list of messages, got {str(messages)[:60]!r}")
    roles = [message.get(tags["role_tag"]) for message in messages]
    turns = [tags["user_tag"], tags["assistant_tag"]]
    if roles != turns:
        raise ValueError(f"its turns are {roles}, and must be {turns}: a question and its answer")
    question, answer = (text_field(message, tags["content_tag"]) for message in messages)
    images = _images(record.get(columns["images"]), folder)
    _check_tags(question, images, tags_required=True)
    _check_turns(question, answer)
    consistent, reasons = _decision(answer)
    return Comparison(
        images=images,
        # Tags in front are the form's, and a judge's template puts images there anyway; within a text they stay.
        question=question.removeprefix(IMAGE_TAG * len(images)),
        consistent=consistent,
        reasons=reasons,
        category=text_field(record, "category"),
        group=text_field(record, "group"),
        answer=answer,
    )


def _decision(answer: str) -> tuple[bool, str]:
    """Whether an answer says Yes, and what follows."""
    decision = DECISION.match(answer)
    if not decision:
        raise ValueError(f"the answer must begin with Yes or No, it is {answer[:40]!r}")
    return decision[1] == "Yes", answer[decision.end() :]


def _check_tags(question: str, images: Sequence[Path], *, tags_required: bool) -> None:
    count = question.count(IMAGE_TAG)
    if count != len(images) and (count or tags_required):
        raise ValueError(f"it has {len(images)} images and {count} {IMAGE_TAG} tags; there must be one for each")


def _images(names: Any, folder: Path) -> tuple[Path, ...]:
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"'images' must be a list of paths, got {names!r}")
    for name in names:
        inside(folder, name)
    return tuple(folder / name for name in names)


# --- the tiny world --------------------------------------------------------------------------------------------


def _tiny_comparisons(source: str, scratch: Path | None) -> list[Comparison]:
    split, count = tiny_source(source, counts=dict.fromkeys(TINY_COUNTS, TINY_COUNT))
    assert scratch is not None, "pairs of the tiny world are drawn into files, which need a folder"
    path = scratch / f"tiny-{split}-{count}" / "comparisons.jsonl"
    if not path.is_file():
        make_folder(path.parent)
        drawn = draw_comparisons(path.parent, split=split, count=count)
        save_comparisons(drawn, path)  # last: a file that is there is whole
    return load_comparisons(path)


def draw_comparisons(folder: Path, *, split: Split, count: int, seed: int = 0) -> list[Comparison]:
    """Draw pairs of panels into `folder` and ask whether they show one hero; half of the answers are Yes.

    The palette is drawn anew for each panel and must be overlooked, which the committed judge has not learned. The
    category is the attribute in question, the reasons say what is seen.
    """
    rng = random.Random(f"{split}-{seed}")
    pool = characters.panels_of(split)
    drawn = []
    # Attributes and answers take turns: an even count has as many Yes as No.
    for number, (name, consistent) in zip(range(count), cycle(product(IDENTITY, (True, False))), strict=False):
        first = rng.choice(pool)
        second = replace(rng.choice(pool), **{attribute: getattr(first, attribute) for attribute in IDENTITY})
        if not consistent:
            second = with_another(second, name, rng)
        paths = tuple(folder / f"{number:05d}-{letter}.png" for letter in "ab")
        for path, panel in zip(paths, (first, second), strict=True):
            # On the disk before the file that names them: a power cut must not leave pairs without images.
            write_atomic(path, png_bytes(characters.draw(panel, TINY_SIDE)))
        differs = f"The {name} differs: {getattr(first, name)} and {getattr(second, name)}."
        drawn.append(
            Comparison(
                images=paths,
                question=meets_criterion(ONE_HERO),
                consistent=consistent,
                reasons=f"Both show {first.colour} {first.shape} hero, {first.hat}." if consistent else differs,
                category=name,
                group=f"{first.subject} / {second.subject}",
            )
        )
    return drawn


def _check_turns(*texts: str) -> None:
    for fault in filter(None, map(text_fault, texts)):
        raise ValueError(fault)
