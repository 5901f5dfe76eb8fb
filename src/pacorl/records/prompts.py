"""Files of prompts: records as JSONL, or plain text with one prompt or sentence per line.

    prompts = load_prompts("examples/prompts.jsonl")
    prompts[0].grid.rows, prompts[0].panels

A line of a JSONL is a `PromptLine`: a T2IS record, `{theme, panels}`, or an edit `{image, instruction}`; other keys
(`idx`, `from`, …) are ignored. Paths are relative to the file. A line of text that asks for several images is a set
(`records.panels`). A fault names file and line.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from pacorl.core.grid import LAYOUT, panel_texts, parse_layout
from pacorl.io.documents import JsonObject, blamed_on, numbered_lines, parse_object, read_text, write_jsonl
from pacorl.records.characters import in_turn
from pacorl.records.compose import check_panel_count, in_tiny_words, prompt_from
from pacorl.records.fields import Criteria, Listed, Name, NonBlank, Text, validated
from pacorl.records.images import copied_images, images_beside
from pacorl.records.panels import numbered_items, read_request
from pacorl.tiny.world import Split, set_prompts
from pacorl.types import TINY, Character, Grid, Prompt, Size, places

Item = TypeVar("Item")

SOURCES = (
    "a .jsonl of T2IS records, {theme, panels} or {image, instruction}, a .txt of one prompt a line, or "
    "tiny:train|dev|test"
)
TINY_PREFIX = f"{TINY}:"
TINY_SOURCE = re.compile(r"tiny:(train|dev|test)(?::([1-9][0-9]*))?")
TINY_COUNTS: Mapping[Split, int] = {"train": 288, "dev": 48, "test": 48}
FOREIGN = re.compile(r"^(?:#|//).*|(?:^|(?<=\s))--[A-Za-z][\w-]*")
"""Syntax of other tools' files of prompts: a comment, or an option such as `--w 768`."""
MARKED = re.compile(r"^(?:\d{1,3}[.)]|[-*•–])\s+(?=\S)")
"""Mark of a list at the beginning of a line: a number, or a bullet."""
ONE_IMAGE = "as one image"
SHOWN = 3
"""Prompts of a kind that a plan shows."""
ALL_QUOTED = re.compile(r"^[\"“]([^\"“”]+)[\"”]$")
"""A line in quotation marks, as tables write it."""


class ShownCharacter(BaseModel):
    """A character of a record, under its name."""

    model_config = ConfigDict(extra="forbid")

    description: str = ""
    images: list[str] = []


class PromptLine(BaseModel):
    """A set, a single image, or an edit."""

    prompt: Text = ""
    """The text for the generator; composed of `theme` and `panels` if it is empty."""
    layout: Text = ""
    theme: Text = ""
    panels: list[NonBlank] | None = None
    """One text per panel; of an edit, one text at most, which the edited image is to show."""
    criteria: Criteria = {}
    height: Annotated[PositiveInt | None, Field(strict=True)] = None
    width: Annotated[PositiveInt | None, Field(strict=True)] = None
    category: Text = ""
    image: Listed = []
    """Images to edit, a path or a list of them."""
    instruction: Text = ""
    characters: dict[Name, ShownCharacter] | None = None
    """Characters by name."""
    references: list[Name] | None = None
    """Images for generators that take some; by default the first of each character, then the second of each."""


def load_prompts(path: str | Path, *, limit: int | None = None, model: str = "") -> list[Prompt]:
    """Read the prompts of a file, or of `tiny:train|dev|test`, which takes a count as in `tiny:dev:12`.

    The layout is the record's `layout`, else the first one in its text, else 1x1; a line of plain text is 1x1 unless
    it has panel tags or asks for several images. A prompt's `id` is its position; blank lines are skipped.

    Args:
        limit: maximum number of prompts, evenly spread.
        model: the generator, whose form sentences and {theme, panels} are composed in; "tiny" has one of its own.

    Raises:
        ValueError: naming file, line, fault and fix; or for an unknown split.
    """
    # The tiny world's prompts are generated and have no file.
    if str(path).startswith(TINY_PREFIX):
        split, count = tiny_source(str(path))
        return evenly_spread(set_prompts(split, count or TINY_COUNTS[split]), limit)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".jsonl", ".txt"):
        raise ValueError(f"{path}: give {SOURCES}; `pacorl data FILE` converts published collections in parquet")

    # One prompt per line.
    prompts: list[Prompt] = []
    for number, line in numbered_lines(read_text(path, fix=f"give {SOURCES}")):
        origin = f"{path}:{number}"
        with blamed_on(origin):
            if suffix == ".txt":
                prompt = sentence_prompt(line, model=model)
            else:
                prompt = record_prompt(parse_object(line), folder=path.parent, model=model)
        prompts.append(replace(prompt, id=len(prompts), origin=origin))
    if not prompts:
        raise ValueError(f"{path}: holds no prompts; give {SOURCES}")
    return evenly_spread(prompts, limit)


def sentence_prompt(text: str, *, model: str = "") -> Prompt:
    """Read a line of text: a whole prompt, a request for a set in one sentence, or one image.

    Raises:
        ValueError: it has a comment or an option of another tool, its list is on further lines, or its panels do not
            fit.
    """
    foreign = FOREIGN.search(text)
    if foreign:
        raise ValueError(f"{foreign[0][:40]!r} is a comment or option of another tool, and would be drawn; delete it")
    if text.endswith(":"):
        raise ValueError(f"{text[-40:]!r} begins a list; write it on the same line: four images of a cat: asleep, …")
    if not numbered_items(text)[1]:
        text = MARKED.sub("", text)
    text = ALL_QUOTED.sub(r"\1", text)
    # The words of one image are checked by the generator that draws it.
    return prompt_from(model if read_request(text) else "", theme=text)


def record_prompt(record: Mapping[str, Any], *, folder: Path, model: str = "") -> Prompt:
    """Convert a record to a prompt; its images are in `folder`.

    Raises:
        ValueError: a field is missing or of another type, or an image cannot be used; the message names it.
    """
    line = validated(record, PromptLine)
    if line.instruction.strip() and line.image:
        panels = tuple(line.panels or ())
        check_panel_count(Grid(1, 1), panels)
        prompt = Prompt(0, line.instruction.strip(), panels=panels, sources=images_beside(line.image, folder))
    elif line.instruction or (line.image and not line.prompt):
        raise ValueError("'image' or 'instruction' is missing or empty; an edit has both")
    else:
        prompt = _set_of(line, model)

    # Its characters; by default their images are the references.
    characters = []
    for name, shown in (line.characters or {}).items():
        characters.append(Character(name, shown.description.strip(), images_beside(shown.images, folder)))
    references = in_turn(characters)
    if line.references is not None:
        references = images_beside(line.references, folder)
    return replace(prompt, category=line.category, characters=tuple(characters), references=references)


def _set_of(line: PromptLine, model: str) -> Prompt:
    panels = tuple(line.panels or panel_texts(line.prompt))
    if line.prompt.strip():
        has_layout = line.layout or LAYOUT.search(line.prompt) or panels
        grid = parse_layout(line.layout or line.prompt) if has_layout else Grid(1, 1)
        check_panel_count(grid, panels)
        prompt = Prompt(0, line.prompt, line.theme, grid, panels, line.criteria)
        # Other words are warned of later.
        prompt = in_tiny_words(prompt) if model == TINY else prompt
    elif line.theme and panels:
        layout = parse_layout(line.layout) if line.layout else None
        prompt = prompt_from(model, theme=line.theme, panels=panels, grid=layout, criteria=line.criteria)
    else:
        raise ValueError("'prompt' is missing or empty; give the text for the generator, or 'theme' and 'panels'")

    if not (line.height or line.width):
        return prompt
    if not (line.height and line.width):
        raise ValueError("'height' or 'width' is missing; give both sides, or neither")
    return replace(prompt, size=Size(line.height, line.width))


def kinds_of(prompts: Sequence[Prompt]) -> str:
    """Count prompts by how they were read, with a line for some of each kind: sets by their panels, images, edits."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kind = ONE_IMAGE
        if prompt.sources:
            kind = "as edits"
        elif prompt.grid.count > 1:
            kind = f"as sets of {prompt.grid.count} panels"
        kinds.setdefault(kind, []).append(prompt)
    lines = []
    for kind, of_kind in kinds.items():
        shown = evenly_spread(of_kind, SHOWN)
        lines.append(f"{len(of_kind)} {kind}{', such as' if len(shown) < len(of_kind) else ''}")
        for prompt in shown:
            # A panel repeats the theme, for generators of separate images.
            panels = [panel.removeprefix(f"{prompt.theme}, ") for panel in prompt.panels]
            text = shorten(" | ".join([prompt.theme or prompt.text, *panels]), 200, placeholder=" …")
            lines.append(f"  {prompt.place} {text!r}")
    # A set whose number was not understood would train as one image, if its reward takes single images too.
    if ONE_IMAGE in kinds:
        lines.append(
            f"if a set is meant ({places(kinds[ONE_IMAGE])}), begin with its number of pictures in English (four "
            "pictures of a fox: it runs, it sleeps, …), or give a record of 'theme' and 'panels'"
        )
    return "\n  ".join(lines)


def save_prompts(prompts: Sequence[Prompt], path: str | Path) -> None:
    """Write prompts as records for `load_prompts`, without their ids: an id is the position in the file.

    Images are copied into a folder next to the file, so that both can be moved together. The file appears whole or
    not at all. Raises OSError.
    """
    path = Path(path)
    rows = []
    for prompt in prompts:
        characters = {}
        for character in prompt.characters:
            images = copied_images(character.images, path)
            characters[character.name] = {"description": character.text, "images": images}
        row = record_of(prompt) | {"image": copied_images(prompt.sources, path), "characters": characters}
        if prompt.references != in_turn(prompt.characters):
            row["references"] = copied_images(prompt.references, path)
        rows.append({name: value for name, value in row.items() if value or name == "references"})
    write_jsonl(path, rows)


def record_of(prompt: Prompt) -> JsonObject:
    """Convert a prompt to a record, without its images and characters."""
    row: JsonObject = {"idx": f"{prompt.id:04d}", "instruction" if prompt.sources else "prompt": prompt.text}
    row |= {"layout": str(prompt.grid), "theme": prompt.theme, "category": prompt.category}
    row["criteria"] = prompt.criteria
    if prompt.size:
        row |= {"height": prompt.size.height, "width": prompt.size.width}
    # Panels in the text are parsed from it again; a second copy could differ.
    if prompt.panels != panel_texts(prompt.text):
        row["panels"] = list(prompt.panels)
    return row


def evenly_spread(items: Sequence[Item], limit: int | None) -> list[Item]:
    """Return at most `limit` of the items, evenly spread from the first on; all without a limit."""
    # Not the first `limit` items: files are often in the order of their categories.
    count = len(items)
    if limit is not None:
        count = min(limit, count)
    return [items[index * len(items) // count] for index in range(count)]


def tiny_source(source: str) -> tuple[Split, int]:
    """Parse the split and the count, by default 0, of `tiny:SPLIT` or `tiny:SPLIT:COUNT`.

    Raises:
        ValueError: if there is no such split, or the count is not a whole number above 0.
    """
    match = TINY_SOURCE.fullmatch(source)
    if not match:
        raise ValueError(f"{source!r}: give tiny:train, tiny:dev or tiny:test, or one with a count, as in tiny:dev:12")
    split: Split = match[1]  # type: ignore[assignment]
    return split, int(match[2] or 0)
