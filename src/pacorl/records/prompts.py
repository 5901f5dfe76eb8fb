"""Files of prompts: records as JSONL, or plain text with one prompt or sentence per line.

    prompts = load_prompts("examples/prompts.jsonl")
    prompts[0].grid.rows, prompts[0].panels

A T2IS record has `prompt`, and may have `layout`, `theme`, `criteria`, `category`, `task_name`, `height` and `width`;
its other keys (`idx`, `from`, …) do not affect the images and are ignored. Without `prompt`, a record of `theme` and
`panels` is composed to one. Two keys are ours:

    "characters": {"fox": {"description": "a red fox with a green scarf", "images": ["fox/1.png", "fox/2.png"]}}
    "references": ["fox/1.png"]

`characters` maps names to descriptions and images, both optional, or is a list of names. `references` are the images
for generators that take reference images; by default the first image of each character, then the second of each. Paths
are relative to the file. A record of `image` and `instruction` is an edit (`records.edits`).

A line of text that asks for several images is a set (`records.panels`). A fault names file and line.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, PositiveInt

from pacorl.core.grid import LAYOUT, panel_texts, parse_layout
from pacorl.io.documents import JsonObject, blamed_on, parse_object, read_jsonl, text_lines, write_jsonl
from pacorl.records.compose import check_panel_count, prompt_from, text_prompt
from pacorl.records.criteria import PublishedCriteria, written
from pacorl.records.edits import (
    CastRecord,
    NonBlank,
    character_fields,
    edit_prompt,
    is_edit,
    shown_characters,
    validated,
)
from pacorl.records.panels import read_request
from pacorl.tiny.world import Split, set_prompts
from pacorl.types import Grid, Prompt, Size

Item = TypeVar("Item")
logger = logging.getLogger(__name__)

SOURCES = (
    "a .jsonl of T2IS records, {theme, panels} or {image, instruction}, a .txt of one prompt a line, or "
    "tiny:train|dev|test"
)
CONVERT = "convert a published collection with `pacorl data FILE`"
TINY = "tiny:"
TINY_COUNTS: Mapping[Split, int] = {"train": 288, "dev": 48, "test": 48}
FOREIGN = re.compile(r"^(?:#|//).*|(?:^|(?<=\s))--[A-Za-z][\w-]*")
"""Syntax of other tools' files of prompts: a comment, or an option such as `--w 768`."""


MARKED = re.compile(r"^(?:\d{1,3}[.)]|[-*•–])\s+(?=\S)")
"""Mark of a list at the beginning of a line: a number, or a bullet."""


class SetRecord(CastRecord):
    """A T2IS record, or a theme with its panels."""

    prompt: str | None = None
    """The text for the generator."""
    layout: str | None = None
    theme: str | None = None
    panels: list[NonBlank] | None = None
    criteria: PublishedCriteria | None = None
    height: Annotated[PositiveInt | None, Field(strict=True)] = None
    width: Annotated[PositiveInt | None, Field(strict=True)] = None


def prompts_from(source: str, *, limit: int | None = None, model: str = "", beside: Path | None = None) -> list[Prompt]:
    """Read the prompts of a source: a file, or `tiny:train|dev|test`, with a count as in `tiny:dev:12`.

    Args:
        limit: maximum number of prompts, evenly spread.
        model: the generator, whose form sentences and {theme, panels} are composed in; "tiny" has one of its own.
        beside: a run's folder of prompts, for the sets that are written from a file of sentences, to be edited.

    Raises:
        ValueError: as `load_prompts` does, and for an unknown split.
    """
    prompts = load_prompts(source, model=model)
    sets = sum(prompt.grid.count > 1 for prompt in prompts)
    if beside and sets and source.lower().endswith(".txt"):
        written = beside / f"{Path(source).stem}.jsonl"
        save_prompts(prompts, written)
        logger.warning("%s: %d sentences became sets; %s has them: edit it, and name it instead", source, sets, written)
    return evenly_spread(prompts, limit, source=source)


def load_prompts(path: str | Path, *, model: str = "") -> list[Prompt]:
    """Read every prompt of a file, or of `tiny:dev`. Its `id` is the position; blank lines are skipped.

    The layout is the record's `layout`, else the first one in its text, else 1x1; a line of plain text is 1x1 unless
    it has panel tags or asks for several images. Criteria whose text is null (the published files have a few) are
    dropped.

    Args:
        model: see `prompts_from`.

    Raises:
        ValueError: naming file, line, fault and fix.
    """
    # The tiny world's prompts are generated and have no file.
    if str(path).startswith(TINY):
        return set_prompts(*tiny_source(str(path), counts=TINY_COUNTS))
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{path}: prompts are read from {SOURCES}; this name has another ending ({CONVERT})")

    # One prompt per line.
    prompts: list[Prompt] = []
    for number, line in text_lines(path, fix=f"give {SOURCES}"):
        with blamed_on(f"{path}:{number}"):
            if suffix == ".txt":
                prompt = sentence_prompt(line, len(prompts), model=model)
            else:
                record = parse_object(line)
                if is_edit(record):
                    prompt = edit_prompt(record, len(prompts), folder=path.parent)
                else:
                    prompt = record_prompt(record, len(prompts), folder=path.parent, model=model)
        prompts.append(replace(prompt, origin=f"{path}:{number}"))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; give {SOURCES}")
    return prompts


def find_record(address: str) -> Prompt:
    """Load the record of an address `FILE:ID`; the ID is its `idx`, else its line number, from 1.

    Raises:
        ValueError: if there is no such record; the message lists existing ids.
    """
    file, _, name = address.rpartition(":")
    if not file or not name:
        raise ValueError(f"{address!r} is not of the form FILE:ID, e.g. prompts.jsonl:0001")
    prompts = load_prompts(file)
    names: list[str] = []
    if Path(file).suffix.lower() == ".jsonl":  # other forms have no names
        names = [str(record.get("idx", "")) for record in read_jsonl(Path(file))]
    # Names first: an idx such as 0003 is also a line number, often of another record.
    if name in names:
        return prompts[names.index(name)]
    if name.isascii() and name.isdigit() and 1 <= int(name) <= len(prompts):
        return prompts[int(name) - 1]
    first = ", ".join(filter(None, names[:5])) or "none"
    raise ValueError(
        f"{file} has no record {name!r}; the first of its {len(prompts)} are {first} (or give a line, from 1)"
    )


def save_prompts(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write prompts as T2IS records for `load_prompts`, without their ids: an id is the position in the file.

    Panels that the text does not spell out behind tags go under `panels`, which is ours, and references are copied into
    a folder beside the file. The file appears whole or not at all. Raises ValueError for an edit, whose sources the
    form cannot hold, and OSError from the disk.
    """
    edits = [prompt.id for prompt in prompts if prompt.sources]
    if edits:
        raise ValueError(f"{path}: prompt {edits[0]} edits an image, and a T2IS record holds none")
    path = Path(path)
    write_jsonl(path, [record_of(prompt) | character_fields(prompt, path) for prompt in prompts])


def record_of(prompt: Prompt) -> JsonObject:
    """Convert a prompt to a T2IS record, without its characters and references."""
    row: JsonObject = {"idx": f"{prompt.id:04d}", "prompt": prompt.text}
    if prompt.size:
        row |= {"height": prompt.size.height, "width": prompt.size.width}
    row |= {"layout": str(prompt.grid), "theme": prompt.theme, "category": prompt.category, "task_name": prompt.task}
    row["criteria"] = {dimension: dict(texts) for dimension, texts in prompt.criteria.items()}
    # Panels in the text are parsed from it again; a second copy could differ.
    if prompt.panels != panel_texts(prompt.text):
        row["panels"] = list(prompt.panels)
    return row


# --- one record ------------------------------------------------------------------------------------------------


def sentence_prompt(text: str, number: int = 0, *, model: str = "") -> Prompt:
    """Read a line of text: a whole prompt, a sentence that asks for a set, or one image.

    Raises:
        ValueError: it has a comment or options of another tool, or its panels do not fit.
    """
    text = MARKED.sub("", text)
    if text[0] == text[-1] == '"' and text.count('"') == 2:
        text = text[1:-1].strip()
    foreign = FOREIGN.search(text)
    if foreign:
        raise ValueError(
            f"{foreign[0][:40]!r} is a comment or an option of another tool, and would be drawn; delete it, or write "
            "JSONL with its own keys, e.g. height and width"
        )
    if panel_texts(text):
        return text_prompt(text, number)
    # The words of one image are checked by the generator that draws it.
    return prompt_from(model if read_request(text) else "", theme=text, number=number)


def record_prompt(record: Mapping[str, Any], number: int = 0, *, folder: Path = Path(), model: str = "") -> Prompt:
    """Convert a record to a prompt, with the position `number` as its id; its images are in `folder`.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    given = validated(record, SetRecord)
    text = given.prompt or ""
    theme = given.theme or ""
    panels = tuple(given.panels or panel_texts(text))
    criteria = written(given.criteria)
    grid = Grid(1, 1)
    if given.layout or LAYOUT.search(text) or (panels and text):
        grid = parse_layout(given.layout or text)

    # A theme and its panels, or a whole prompt.
    if not text.strip():
        if not theme or not panels:
            raise ValueError("'prompt' is missing or empty; give the text for the generator, or 'theme' and 'panels'")
        layout = grid if given.layout else None
        prompt = prompt_from(model, theme=theme, panels=panels, grid=layout, criteria=criteria, number=number)
    else:
        check_panel_count(grid, panels)
        prompt = Prompt(number, text, theme, grid, panels, criteria)
    return replace(
        prompt,
        size=_size(given),
        category=given.category or "",
        task=given.task_name or "",
        **shown_characters(given, folder),
    )


def _size(record: SetRecord) -> Size | None:
    if record.height is None and record.width is None:
        return None
    if record.height is None or record.width is None:
        missing = "width" if record.width is None else "height"
        raise ValueError(f"{missing!r} is missing; give both sides, or neither")
    return Size(record.height, record.width)


# --- shared with sources of comparisons --------------------------------------------------------------------------


def evenly_spread(items: Sequence[Item], limit: int | None, *, source: object = "") -> list[Item]:
    """Return at most `limit` of the items, evenly spread from the first on; all without a limit.

    Raises:
        ValueError: if the limit is below 1; the message names `source`.
    """
    if limit is None:
        return list(items)
    if limit < 1:
        suffix = f" of {source}" if source else ""
        raise ValueError(f"a limit of {limit} leaves nothing{suffix}; give at least 1, or none")
    # Not the first `limit` items: files are often in the order of their categories.
    count = min(limit, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def tiny_source(source: str, *, counts: Mapping[Split, int]) -> tuple[Split, int]:
    """Parse the split and the count of `tiny:SPLIT` or `tiny:SPLIT:COUNT`.

    Args:
        counts: default count of each split.

    Raises:
        ValueError: if there is no such split, or the count is not a whole number above 0.
    """
    _, name, *counted = source.split(":")
    splits = [split for split in counts if split == name]
    if not splits or len(counted) > 1:
        raise ValueError(
            f"{source!r} is no part of the tiny world; give tiny:train, tiny:dev or tiny:test, or one with a count, "
            "e.g. tiny:dev:12"
        )
    split = splits[0]
    count = counted[0] if counted else str(counts[split])
    # isdigit alone also takes "²", which int does not.
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ValueError(f"{source!r}: the count {count!r} must be a whole number above 0")
    return split, int(count)
