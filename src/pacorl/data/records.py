"""Prompts in files: T2IS records as JSONL, or plain text of one prompt a line.

    prompts = load_prompts("examples/prompts.jsonl")
    prompts[0].grid.rows, prompts[0].panels

A T2IS record has `prompt`, and may have `layout`, `theme`, `criteria`, `category`, `task_name`, `height` and `width`;
its other keys (`idx`, `from`, …) say nothing about what to generate and are left unread. A record of `image` and
`instruction` is an edit (`data.edits`). A fault names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pacorl.core.grid import LAYOUT, panel_texts, parse_layout
from pacorl.data.characters import Split, character_prompts
from pacorl.data.edits import edit_prompt, is_edit
from pacorl.data.published import LANGUAGES, load_gedit, load_sharegpt_4o
from pacorl.data.sources import TINY, evenly_spread, tiny_source
from pacorl.io.documents import blamed_on, parse_object, text_field, text_lines, write_jsonl
from pacorl.types import Grid, Prompt, Size

Record = Mapping[str, Any]

SOURCES = (
    "a .jsonl of T2IS records or of {image, instruction}, a .txt of one prompt a line, GEdit-Bench's .parquet, "
    "ShareGPT-4o-Image's .json, or tiny:train|dev|test"
)
TINY_COUNTS: dict[Split, int] = {"train": 288, "dev": 48, "test": 48}


def prompts_from(source: str, *, limit: int | None = None) -> list[Prompt]:
    """The prompts that a config names: a file, or `tiny:train|dev|test`, with a count as in `tiny:dev:12`.

    GEdit-Bench may be a folder of parquet files, and be asked for one language: `GEdit-Bench/data:en`.
    Args:
        source: the file or the split.
        limit: the most prompts to return, evenly spread.

    Raises:
        ValueError: as `load_prompts` does, and for an unknown split.
    """
    prompts = _tiny_prompts(source) if source.startswith(TINY) else _file_prompts(source)
    return evenly_spread(prompts, limit, source=source)


def _file_prompts(source: str) -> list[Prompt]:
    name, colon, language = source.rpartition(":")
    if colon and language in LANGUAGES:
        return load_gedit(Path(name), language=language)
    return load_prompts(source)


def load_prompts(path: str | Path) -> list[Prompt]:
    """Every prompt of a file, its `id` the position there; blank lines are passed over.

    The layout is the record's `layout`, else the first one in its text, else 1x1; a line of plain text is 1x1 unless
    it has panel tags. Criteria whose text is null (the published files have a few) are left out.

    Raises ValueError that names file, line, fault and fix.
    """
    path = Path(path)
    if path.suffix.lower() == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        return load_gedit(path)
    if path.suffix.lower() == ".json":
        return load_sharegpt_4o(path)
    parsers: dict[str, Callable[[str, int], Prompt]] = {
        ".jsonl": partial(_parse_json, folder=path.parent),
        ".txt": _parse_text,
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

    Panels that the text does not spell out behind tags go under `panels`, which is ours. The file appears whole or
    not at all. Raises ValueError for an edit, whose sources the form cannot hold, and OSError from the disk.
    """
    edits = [prompt.id for prompt in prompts if prompt.sources]
    if edits:
        raise ValueError(f"{path}: prompt {edits[0]} edits an image, and a T2IS record holds none")
    write_jsonl(Path(path), map(_record, prompts))


# --- one record ------------------------------------------------------------------------------------------------


def _parse_text(line: str, number: int) -> Prompt:
    panels = panel_texts(line)
    grid = parse_layout(line) if panels else Grid(1, 1)
    _check_fit(grid, panels)
    return Prompt(id=number, text=line, grid=grid, panels=panels)


def _parse_json(line: str, number: int, *, folder: Path) -> Prompt:
    record = parse_object(line)
    return edit_prompt(record, number, folder=folder) if is_edit(record) else _prompt(record, number)


def _prompt(record: Record, number: int) -> Prompt:
    text = text_field(record, "prompt")
    if not text.strip():
        raise ValueError("'prompt' is missing or empty; give the text that the generator is to read")
    panels = _panels(record, text)
    grid = _grid(record, text, panels)
    _check_fit(grid, panels)
    return Prompt(
        id=number,
        text=text,
        theme=text_field(record, "theme"),
        grid=grid,
        panels=panels,
        criteria=_criteria(record),
        size=_size(record),
        category=text_field(record, "category"),
        task=text_field(record, "task_name"),
    )


def _panels(record: Record, text: str) -> tuple[str, ...]:
    if "panels" not in record:
        return panel_texts(text)
    panels = record["panels"]
    if not isinstance(panels, list) or not all(isinstance(panel, str) and panel.strip() for panel in panels):
        raise ValueError(f"'panels' must be a list of texts, got {panels!r}")
    return tuple(panels)


def _grid(record: Record, text: str, panels: Sequence[str]) -> Grid:
    layout = text_field(record, "layout")
    if layout:
        return parse_layout(layout)
    return parse_layout(text) if panels or LAYOUT.search(text) else Grid(1, 1)


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
    criteria = {dimension: _texts_by_name(dimension, texts) for dimension, texts in dimensions.items()}
    return {dimension: texts for dimension, texts in criteria.items() if texts}


def _texts_by_name(dimension: str, value: Any) -> dict[str, str]:
    if not isinstance(value or {}, dict):
        raise ValueError(f"'criteria.{dimension}' must map names to texts, got {value!r}")
    texts = {name: text for name, text in (value or {}).items() if text is not None}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"'criteria.{dimension}.{name}' must be a text or null, got {text!r}")
    return texts


def _size(record: Record) -> Size | None:
    height, width = (record.get(side) for side in ("height", "width"))
    if height is None and width is None:
        return None
    for side, pixels in (("height", height), ("width", width)):
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
    if prompt.panels != panel_texts(prompt.text):
        record["panels"] = list(prompt.panels)
    return record


# --- sources ---------------------------------------------------------------------------------------------------


def _tiny_prompts(source: str) -> list[Prompt]:
    split, count = tiny_source(source, counts=TINY_COUNTS)
    return character_prompts(split, count)
