"""Files of prompts: T2IS records as JSONL, or plain text with one prompt per line.

    prompts = load_prompts("examples/prompts.jsonl")
    prompts[0].grid.rows, prompts[0].panels

A T2IS record has `prompt`, and may have `layout`, `theme`, `criteria`, `category`, `task_name`, `height` and `width`;
its other keys (`idx`, `from`, …) do not affect the images and are ignored. Two keys are ours:

    "characters": {"fox": {"description": "a red fox with a green scarf", "images": ["fox/1.png", "fox/2.png"]}}
    "references": ["fox/1.png"]

`characters` maps names to descriptions and images, both optional, or is a list of names. `references` are the images
for generators that take reference images; by default the first image of each character, then the second of each. Paths
are relative to the file. A record of `image` and `instruction` is an edit (`records.edits`). A fault names file and
line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pacorl.core.grid import LAYOUT, panel_texts, parse_layout
from pacorl.io.documents import JsonObject, blamed_on, check_keys, parse_object, text_field, text_lines, write_jsonl
from pacorl.io.files import SHARED
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
"""Keys of a T2IS record."""
SOURCES = (
    "a .jsonl of T2IS records or of {image, instruction}, a .txt of one prompt a line, GEdit-Bench's .parquet, "
    "ShareGPT-4o-Image's .json, or tiny:train|dev|test"
)
TINY = "tiny:"
TINY_COUNTS: Mapping[Split, int] = {"train": 288, "dev": 48, "test": 48}


def prompts_from(source: str, *, limit: int | None = None) -> list[Prompt]:
    """Read the prompts of a source: a file, or `tiny:train|dev|test`, with a count as in `tiny:dev:12`.

    GEdit-Bench may be a folder of parquet files, limited to one language by a suffix: `GEdit-Bench/data:en`.

    Args:
        limit: maximum number of prompts, evenly spread.

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
    """Read every prompt of a file, or of `tiny:dev`. Its `id` is the position; blank lines are skipped.

    The layout is the record's `layout`, else the first one in its text, else 1x1; a line of plain text is 1x1 unless
    it has panel tags. Criteria whose text is null (the published files have a few) are dropped.

    Raises:
        ValueError: naming file, line, fault and fix.
    """
    # The tiny world's prompts are generated and have no file.
    if str(path).startswith(TINY):
        return prompts_from(str(path))

    # Published collections.
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return load_gedit(path)
    if suffix == ".json":
        return load_sharegpt_4o(path)
    if suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{path}: prompts are read from {SOURCES}; this name has another ending")

    # One prompt per line.
    prompts: list[Prompt] = []
    for number, line in text_lines(path, fix=f"give {SOURCES}"):
        with blamed_on(f"{path}:{number}"):
            if suffix == ".txt":
                prompts.append(text_prompt(line, len(prompts)))
                continue
            record = parse_object(line)
            parse = edit_prompt if is_edit(record) else record_prompt
            prompts.append(parse(record, len(prompts), folder=path.parent))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; give {SOURCES}")
    return prompts


def save_prompts(prompts: Sequence[Prompt], path: str | Path, *, mode: int = SHARED) -> None:
    """Write prompts as T2IS records for `load_prompts`, without their ids: an id is the position in the file.

    Panels that the text does not spell out behind tags go under `panels`, which is ours, and references are copied into
    a folder beside the file. The file appears whole or not at all. Raises ValueError for an edit, whose sources the
    form cannot hold, and OSError from the disk.
    """
    edits = [prompt.id for prompt in prompts if prompt.sources]
    if edits:
        raise ValueError(f"{path}: prompt {edits[0]} edits an image, and a T2IS record holds none")
    path = Path(path)
    rows = []
    for prompt in prompts:
        row: JsonObject = {"idx": f"{prompt.id:04d}", "prompt": prompt.text}
        if prompt.size:
            row |= {"height": prompt.size.height, "width": prompt.size.width}
        row |= {"layout": str(prompt.grid), "theme": prompt.theme, "category": prompt.category}
        row["task_name"] = prompt.task
        row["criteria"] = {dimension: dict(texts) for dimension, texts in prompt.criteria.items()}
        # Panels in the text are parsed from it again; a second copy could differ.
        if prompt.panels != panel_texts(prompt.text):
            row["panels"] = list(prompt.panels)
        rows.append(row | character_fields(prompt, path))
    write_jsonl(path, rows, mode=mode)


# --- one record ------------------------------------------------------------------------------------------------


def text_prompt(text: str, number: int = 0, *, grid: Grid | None = None) -> Prompt:
    """Parse a plain text; `grid` defaults to the layout of its text, or 1x1 if it describes no panels.

    Raises:
        ValueError: layout and panels do not fit.
    """
    # A line of prose may hold "3 x 4 cm", so its layout counts only if panels are described.
    panels = panel_texts(text)
    if grid is None:
        grid = parse_layout(text) if panels else Grid(1, 1)
    _check_fit(grid, panels)
    return Prompt(id=number, text=text, grid=grid, panels=panels)


def record_prompt(record: Record, number: int = 0, *, folder: Path = Path()) -> Prompt:
    """Convert a T2IS record to a prompt, with the position `number` as its id; its images are in `folder`.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    check_keys(record, KEYS, foreign=True)
    text = text_field(record, "prompt")
    layout = text_field(record, "layout")
    if not text.strip():
        raise ValueError("'prompt' is missing or empty; give the text for the generator")
    # Panels: listed under their key, or behind tags in the text.
    panels = record.get("panels", list(panel_texts(text)))
    if not isinstance(panels, list) or not all(isinstance(panel, str) and panel.strip() for panel in panels):
        raise ValueError(f"'panels' must be a list of texts, got {panels!r}")

    # The layout, if there is one or if there are panels to lay out.
    grid = Grid(1, 1)
    if layout or panels or LAYOUT.search(text):
        grid = parse_layout(layout or text)
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
    # Dimension → name → text.
    criteria: dict[str, dict[str, str]] = {}
    for dimension, named_texts in dimensions.items():
        texts = named_texts or {}
        if not isinstance(texts, dict):
            raise ValueError(f"'criteria.{dimension}' must map names to texts, got {texts!r}")
        for name, text in texts.items():
            if not isinstance(text, str | None):
                raise ValueError(f"'criteria.{dimension}.{name}' must be a text or null, got {text!r}")
            if text is not None:  # three of the published 5,858 are null
                criteria.setdefault(dimension, {})[name] = text
    return criteria


def _size(record: Record) -> Size | None:
    height = record.get("height")
    width = record.get("width")
    if height is None and width is None:
        return None
    for side, pixels in (("height", height), ("width", width)):
        # By type and not isinstance: True is an int, and no size.
        if type(pixels) is not int or pixels < 1:
            raise ValueError(f"{side!r} must be a whole number of pixels, got {pixels!r}; give both sides, or neither")
    return Size(height=int(str(height)), width=int(str(width)))


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
