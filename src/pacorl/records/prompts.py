"""Prompts in files: T2IS records as JSONL, or plain text of one prompt a line.

    prompts = load_prompts("examples/prompts.jsonl")
    prompts[0].grid.rows, prompts[0].panels

A T2IS record has `prompt`, and may have `layout`, `theme`, `criteria`, `category`, `task_name`, `height` and `width`;
its other keys (`idx`, `from`, …) say nothing about what to generate and are left unread. Two keys are ours:
`characters`, names, and `references`, their images beside the file, for generators that take reference images. A record
of `image` and `instruction` is an edit (`records.edits`). A fault names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pacorl.core.grid import LAYOUT, panel_texts, parse_layout
from pacorl.io.documents import blamed_on, check_keys, parse_object, text_field, text_lines, write_jsonl
from pacorl.records.edits import (
    LANGUAGES,
    character_fields,
    edit_prompt,
    is_edit,
    load_gedit,
    load_sharegpt_4o,
    shown_characters,
)
from pacorl.tiny.characters import Split, character_prompts
from pacorl.types import Grid, Prompt, Size

Item = TypeVar("Item")
Record = Mapping[str, Any]

KEYS = (
    "prompt", "layout", "theme", "criteria", "category", "task_name", "height", "width", "panels", "characters",
    "references",
)  # fmt: skip
"""What is read of a T2IS record."""
SOURCES = (
    "a .jsonl of T2IS records or of {image, instruction}, a .txt of one prompt a line, GEdit-Bench's .parquet, "
    "ShareGPT-4o-Image's .json, or tiny:train|dev|test"
)
TINY = "tiny:"
TINY_COUNTS: Mapping[Split, int] = {"train": 288, "dev": 48, "test": 48}


def prompts_from(source: str, *, limit: int | None = None) -> list[Prompt]:
    """The prompts that a config names: a file, or `tiny:train|dev|test`, with a count as in `tiny:dev:12`.

    GEdit-Bench may be a folder of parquet files, and be asked for one language: `GEdit-Bench/data:en`.

    Args:
        source: the file or the split.
        limit: the most prompts to return, evenly spread.

    Raises:
        ValueError: as `load_prompts` does, and for an unknown split.
    """
    folder, _, language = source.rpartition(":")
    if source.startswith(TINY):
        prompts = character_prompts(*tiny_source(source, counts=TINY_COUNTS))
    elif folder and language in LANGUAGES:
        prompts = load_gedit(Path(folder), language=language)
    else:
        prompts = load_prompts(source)
    return evenly_spread(prompts, limit, source=source)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Every prompt of a file, its `id` the position there; blank lines are passed over. `tiny:dev` is one, too.

    The layout is the record's `layout`, else the first one in its text, else 1x1; a line of plain text is 1x1 unless
    it has panel tags. Criteria whose text is null (the published files have a few) are left out.

    Raises ValueError that names file, line, fault and fix.
    """
    if str(path).startswith(TINY):
        return prompts_from(str(path))
    path = Path(path)
    if path.suffix.lower() == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return load_gedit(path)
    if path.suffix.lower() == ".json":
        return load_sharegpt_4o(path)
    parsers: dict[str, Callable[[str, int], Prompt]] = {
        ".jsonl": partial(_parse_json, folder=path.parent),
        ".txt": text_prompt,
    }
    if path.suffix.lower() not in parsers:
        raise ValueError(f"{path}: prompts are read from {SOURCES}; the name says neither")
    parse = parsers[path.suffix.lower()]
    prompts: list[Prompt] = []
    for number, line in text_lines(path, fix=f"give {SOURCES}"):
        with blamed_on(f"{path}:{number}"):
            prompts.append(parse(line, len(prompts)))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; give {SOURCES}")
    return prompts


def save_prompts(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write prompts as T2IS records that `load_prompts` reads back, ids aside: an id is the position in the file.

    Panels that the text does not spell out behind tags go under `panels`, which is ours, and references are copied into
    a folder beside the file. The file appears whole or not at all. Raises ValueError for an edit, whose sources the
    form cannot hold, and OSError from the disk.
    """
    edits = [prompt.id for prompt in prompts if prompt.sources]
    if edits:
        raise ValueError(f"{path}: prompt {edits[0]} edits an image, and a T2IS record holds none")
    path = Path(path)
    write_jsonl(path, [_record(prompt) | character_fields(prompt, path) for prompt in prompts])


# --- one record ------------------------------------------------------------------------------------------------


def text_prompt(text: str, number: int = 0, *, grid: Grid | None = None) -> Prompt:
    """A plain text as a prompt; without a `grid` it has the layout of its text, or 1x1 if it describes no panels.

    Raises:
        ValueError: layout and panels do not fit.
    """
    # A line of prose may hold "3 x 4 cm", so its layout counts only if panels are described.
    panels = panel_texts(text)
    grid = grid or (parse_layout(text) if panels else Grid(1, 1))
    _check_fit(grid, panels)
    return Prompt(id=number, text=text, grid=grid, panels=panels)


def _parse_json(line: str, number: int, *, folder: Path) -> Prompt:
    record = parse_object(line)
    if is_edit(record):
        return edit_prompt(record, number, folder=folder)
    return record_prompt(record, number, folder=folder)


def record_prompt(record: Record, number: int = 0, *, folder: Path = Path()) -> Prompt:
    """Convert a T2IS record to a prompt, with the position `number` as its id; its images are in `folder`.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    check_keys(record, KEYS, foreign=True)
    text = text_field(record, "prompt")
    layout = text_field(record, "layout")
    if not text.strip():
        raise ValueError("'prompt' is missing or empty; give the text that the generator is to read")
    panels = record.get("panels", list(panel_texts(text)))
    if not isinstance(panels, list) or not all(isinstance(panel, str) and panel.strip() for panel in panels):
        raise ValueError(f"'panels' must be a list of texts, got {panels!r}")
    grid = parse_layout(layout or text) if layout or panels or LAYOUT.search(text) else Grid(1, 1)
    _check_fit(grid, panels)
    return Prompt(
        id=number,
        text=text,
        theme=text_field(record, "theme"),
        grid=grid,
        panels=tuple(panels),
        criteria=_criteria(record),
        size=_size(record),
        category=text_field(record, "category"),
        task=text_field(record, "task_name"),
        **shown_characters(record, folder),
    )


def _check_fit(grid: Grid, panels: Sequence[str]) -> None:
    if panels and len(panels) != grid.count:
        raise ValueError(
            f"the layout {grid} has {grid.count} panels and the prompt describes {len(panels)}; "
            "correct the layout, or the tags (each follows the end of a sentence: '… lamp. [TOP]-[LEFT]: A …')"
        )


def _criteria(record: Record) -> dict[str, dict[str, str]]:
    dimensions = record.get("criteria") or {}
    if not isinstance(dimensions, dict):
        raise ValueError(f"'criteria' must map dimensions to named texts, got {dimensions!r}")
    criteria: dict[str, dict[str, str]] = {}
    for dimension, texts in dimensions.items():
        if not isinstance(texts or {}, dict):
            raise ValueError(f"'criteria.{dimension}' must map names to texts, got {texts!r}")
        for name, text in (texts or {}).items():
            if not isinstance(text, str | None):
                raise ValueError(f"'criteria.{dimension}.{name}' must be a text or null, got {text!r}")
            if text is not None:  # three of the published 5,858 are null
                criteria.setdefault(dimension, {})[name] = text
    return criteria


def _size(record: Record) -> Size | None:
    height, width = (record.get(side) for side in ("height", "width"))
    if height is None and width is None:
        return None
    for side, pixels in (("height", height), ("width", width)):
        # By type and not isinstance: True is an int, and no size.
        if type(pixels) is not int or pixels < 1:
            raise ValueError(f"{side!r} must be a whole number of pixels, got {pixels!r}; give both sides, or neither")
    return Size(height=int(str(height)), width=int(str(width)))


def _record(prompt: Prompt) -> dict[str, Any]:
    record: dict[str, Any] = {"idx": f"{prompt.id:04d}", "prompt": prompt.text}
    if prompt.size:
        record |= {"height": prompt.size.height, "width": prompt.size.width}
    record |= {"layout": str(prompt.grid), "theme": prompt.theme}
    record |= {"category": prompt.category, "task_name": prompt.task}
    record["criteria"] = {dimension: dict(texts) for dimension, texts in prompt.criteria.items()}
    # What the text spells out is read from it again; a second copy could differ from it.
    if prompt.panels != panel_texts(prompt.text):
        record["panels"] = list(prompt.panels)
    return record


# --- what sources of prompts and of comparisons have in common ---------------------------------------------------


def evenly_spread(items: Sequence[Item], limit: int | None, *, source: object = "") -> list[Item]:
    """At most `limit` of the items, evenly spread from the first on; all without a limit.

    Raises:
        ValueError: the limit is below 1; `source` says of what.
    """
    if limit is not None and limit < 1:
        raise ValueError(
            f"a limit of {limit} leaves nothing{f' of {source}' if source else ''}; give at least 1, or none"
        )
    # Spread and not the first ones: files are often in the order of their categories.
    count = len(items) if limit is None else min(limit, len(items))
    return [items[index * len(items) // count] for index in range(count)]


def tiny_source(source: str, *, counts: Mapping[Split, int]) -> tuple[Split, int]:
    """The split and the count of `tiny:SPLIT` or `tiny:SPLIT:COUNT`.

    Args:
        source: the name as a config gives it.
        counts: how many items a split has if the source does not say.

    Raises:
        ValueError: there is no such split, or the count is not a whole number above 0.
    """
    _, name, *counted = source.split(":")
    split = next((split for split in counts if split == name), None)
    if split is None or len(counted) > 1:
        raise ValueError(
            f"{source!r} is no part of the tiny world; give tiny:train, tiny:dev or tiny:test, or one with a count, "
            "e.g. tiny:dev:12"
        )
    count = counted[0] if counted else str(counts[split])
    # isdigit alone also takes "²", which int does not.
    if not count.isascii() or not count.isdigit() or int(count) < 1:
        raise ValueError(f"{source!r}: the count {count!r} must be a whole number above 0")
    return split, int(count)
