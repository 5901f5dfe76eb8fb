"""Write T2IS records, balanced over a taxonomy (`pacorl dataset prompts`).

A taxonomy (a YAML of categories, subcategories and the dimensions that a set must keep) yields orders. A writer turns
an order (subcategory, layout, number) into a record. `llm_writer` asks a language model. `tiny_writer` writes the
prompts of the tiny world and needs no network.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from pacorl.config.options import TEMPLATE
from pacorl.core.grid import panel_tags, panel_texts, parse_layout
from pacorl.dataset.llm import estimate, fill_journal
from pacorl.dataset.manifest import DatasetStep, Progress, silent
from pacorl.generate.compose import prompt_from
from pacorl.generate.language_writers import open_writer
from pacorl.generate.panels import PanelWriter, write_panels
from pacorl.io.documents import Journal, JsonObject, blamed_on, read_journal, read_yaml, text_lines, write_jsonl
from pacorl.io.net import is_url
from pacorl.judge.http.chat import ChatError, ChatModel
from pacorl.records.prompts import save_prompts
from pacorl.tiny.characters import character_prompts
from pacorl.types import Grid, Prompt

DIMENSIONS = ("Style", "Identity", "Logic")
PAPER = Path(__file__).with_name("taxonomy.yaml")
TINY = Path(__file__).with_name("taxonomy_tiny.yaml")


@dataclass(frozen=True, slots=True)
class Subject:
    """One subcategory of a taxonomy."""

    category: str
    name: str
    dimensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Order of one prompt."""

    key: str
    subject: Subject
    grid: Grid
    number: int
    """Its position among all orders."""


def read_taxonomy(path: Path = PAPER) -> list[Subject]:
    """Read the subjects of a taxonomy. Raises ValueError unless it is `category: {subcategory: [dimensions]}`."""
    subjects = []
    for category, entries in _checked_mapping(read_yaml(path), path).items():
        for name, dimensions in _checked_mapping(entries, f"{path}: {category}").items():
            if not isinstance(dimensions, list) or not dimensions or not all(name in DIMENSIONS for name in dimensions):
                choices = ", ".join(DIMENSIONS)
                raise ValueError(f"{path}: {category}: {name}: name some of {choices}, got {dimensions!r}")
            subjects.append(Subject(str(category), str(name), tuple(dimensions)))
    if not subjects:
        raise ValueError(f"{path}: names no subcategories")
    return subjects


def _checked_mapping(entries: Any, location: object) -> dict[Any, Any]:
    if not isinstance(entries, dict):
        raise ValueError(f"{location}: expected a mapping of names, got {entries!r}")
    return entries


def orders(subjects: Sequence[Subject], *, count: int, grids: Sequence[Grid]) -> list[PromptOrder]:
    """Plan `count` prompts: categories share equally, and subcategories within them; layouts take turns."""
    # Subjects by category, in the order of the taxonomy.
    by_category: dict[str, list[Subject]] = {}
    for subject in subjects:
        by_category.setdefault(subject.category, []).append(subject)
    categories = list(by_category.values())

    planned: list[PromptOrder] = []
    for number in range(count):
        lap, category = divmod(number, len(categories))
        turn, position = divmod(lap, len(categories[category]))
        subject = categories[category][position]
        # Shifted by the turn: with as many layouts as categories, each category would keep to one layout.
        grid = grids[(turn + number) % len(grids)]
        planned.append(PromptOrder(f"{subject.category}/{subject.name}/{turn}", subject, grid, number))
    return planned


# --- writers -----------------------------------------------------------------------------------------------------

Record = dict[str, Any]
Writer = Callable[[PromptOrder, Sequence[str]], Record]
"""(order, existing themes) → a T2IS record without its idx. Raises ChatError if there is no usable answer."""

COUNT_WORDS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
REMEMBERED_THEMES = 12
"""Number of a subcategory's latest themes in the request, which the model must not repeat."""
TOKENS_PER_RECORD = (600, 900)
"""Prompt and completion tokens of one record, for the estimate of a dry run."""

Text = Annotated[str, Field(min_length=8, max_length=2000)]


class Draft(BaseModel):
    """The answer of a language model."""

    model_config = ConfigDict(extra="forbid")

    theme: Text
    """The instruction, in a person's words."""
    shared: Text
    """The content that all panels share."""
    panels: list[Text]
    criteria: dict[str, dict[str, Text]]
    """dimension → name → the requirement over all panels."""


def compose(draft: Draft, order: PromptOrder) -> Record:
    """Turn a draft into a T2IS record. Raises ValueError if it does not fit its order or cannot be parsed back."""
    # Check the draft against its order.
    grid = order.grid
    dimensions = order.subject.dimensions
    if len(draft.panels) != grid.count:
        raise ValueError(f"a {grid} layout needs {grid.count} panels, got {len(draft.panels)}")
    if set(draft.criteria) != set(dimensions) or not all(draft.criteria.values()):
        raise ValueError(f"criteria must be given for exactly {', '.join(dimensions)}, got {sorted(draft.criteria)}")

    # Write the text in the form of the published prompts.
    panels = [sentence(panel) for panel in draft.panels]
    word = str(grid.count)
    if grid.count < len(COUNT_WORDS):
        word = COUNT_WORDS[grid.count]
    text = f"{word}-PANEL Images with a {grid} grid layout. {sentence(draft.shared)}"
    for tag, panel in zip(panel_tags(grid), panels, strict=True):
        text += f" {tag}:{panel}"

    # Readers find panels by their tags, and capitals before a colon look like a tag.
    if list(panel_texts(text)) != panels or parse_layout(text) != grid:
        raise ValueError("a text holds capitals before a colon after a sentence, which would be read as a panel's tag")
    return {
        "prompt": text,
        "height": 1024,
        "width": 1024,
        "layout": str(grid),
        "theme": draft.theme,
        "category": order.subject.category,
        "task_name": order.subject.name,
        "criteria": draft.criteria,
        "from": "Generated",
    }


def sentence(text: str) -> str:
    """Put a text on one line that ends as a sentence does."""
    line = " ".join(text.split())
    if not line.endswith((".", '"', "!", "?")):
        line += "."
    return line


def llm_writer(model: ChatModel, *, attempts: int = 3) -> Writer:
    """Writer that asks a language model for one record at a time."""
    used_themes = set[str]()
    lock = Lock()

    def write(order: PromptOrder, themes: Sequence[str]) -> Record:
        # Another thread's answer may have the same theme, so the check and its note share a lock.
        def check(draft: Draft) -> None:
            compose(draft, order)
            theme = draft.theme.casefold()
            with lock:
                if theme in used_themes | {theme.casefold() for theme in themes}:
                    raise ValueError("this theme exists already")
                used_themes.add(theme)

        messages = [{"role": "user", "content": request_text(order, themes)}]
        return compose(model.ask_json(messages, Draft, check=check, attempts=attempts), order)

    return write


def request_text(order: PromptOrder, themes: Sequence[str]) -> str:
    """Request for one record."""
    subject = order.subject
    count = order.grid.count
    dimensions = ", ".join(subject.dimensions)
    example = ", ".join(f'"{dimension}": {{"<short name>": "<what must hold>"}}' for dimension in subject.dimensions)
    request = (
        f"Write one request for a set of {count} images that belong together.\n"
        f"Kind: {subject.category}, {subject.name}. What the set must keep: {dimensions}.\n"
        "Be concrete and visual: name the subject, its looks, the style, the light. The panels must differ in what "
        "they show and agree in what they keep.\n"
        f"Answer with one JSON object and nothing else:\n"
        f'{{"theme": "<the request in one or two sentences>", "shared": "<what all images have in common>", '
        f'"panels": [<exactly {count} texts, one per image>], "criteria": {{{example}}}}}\n'
        "Two or three criteria per dimension, each a full sentence."
    )
    if themes:
        request += "\nThese exist already; write something else:"
    # Only the latest: requests would grow with every record, and cost more each time.
    for theme in themes[-REMEMBERED_THEMES:]:
        request += f"\n- {theme}"
    return request


def tiny_writer(*, count: int, seed: int = 0) -> Writer:
    """Writer of the tiny world's prompts, whose every panel the oracle can read."""
    # Draw all prompts of a layout at once: characters take turns over the list.
    prompts_of = cache(lambda grid: character_prompts("train", count, seed=seed, grid=grid))

    def write(order: PromptOrder, themes: Sequence[str]) -> Record:
        prompt = prompts_of(order.grid)[order.number]
        return {
            "prompt": prompt.text,
            "layout": str(order.grid),
            "theme": prompt.theme,
            "criteria": {dimension: dict(texts) for dimension, texts in prompt.criteria.items()},
            "from": "Tiny",
            "category": order.subject.category,
            "task_name": order.subject.name,
        }

    return write


def make_writer(name: str, *, count: int, seed: int, chat: ChatModel | None) -> Writer:
    """Writer by name: `llm`, which needs `chat`, or `tiny`."""
    if name == "tiny":
        return tiny_writer(count=count, seed=seed)
    if name != "llm":
        raise ValueError(f"unknown writer {name!r}; there are llm and tiny")
    if chat is not None and not chat.model:
        raise ValueError("no language model is named; give --model, and --endpoint unless it is the client's default")
    return llm_writer(chat or ChatModel(""))


def write_all(
    folder: Path,
    writer: Writer,
    *,
    subjects: Sequence[Subject],
    count: int,
    grids: Sequence[Grid],
    options: JsonObject,
    seed: int = 0,
    workers: int = 1,
    tokens: tuple[int, int] = TOKENS_PER_RECORD,
    price: tuple[float, float] = (0.0, 0.0),
    dry_run: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Fill prompts.jsonl with `count` records; a later call continues an interrupted one.

    Args:
        options: the writer's name and settings, for the manifest.
        tokens: prompt and completion tokens per record, for the estimate of a dry run.
        price: per million tokens, prompt and completion.

    Returns:
        The number of records, the number per category, and order → fault of the `failed` records, which the next call
        tries again.
    """
    # Stop if the step is done, or if only an estimate is asked for.
    planned = orders(subjects, count=count, grids=grids)
    plan = {"count": count, "grids": [str(grid) for grid in grids], **options}
    step = DatasetStep(folder, "prompts", options=plan, seed=seed)
    finished = step.counts_if_done()
    if finished is not None:
        return finished
    path = folder / "manifests" / "prompts.journal.jsonl"
    if dry_run:
        done = read_journal(path)
        missing = sum(order.key not in done for order in planned)
        return {"records": count, "to_write": missing, "estimate": estimate(missing, tokens, price)}

    # Write the missing records into the journal.
    journal = Journal(path)
    failed = _write_missing(writer, planned, journal, workers=workers, progress=progress)

    # List all records in the order of the plan.
    written = []
    by_category: Counter[str] = Counter()
    for order in planned:
        if order.key in journal:
            record = journal.items[order.key]["record"]
            written.append({"idx": f"{order.number:04d}", **record})
            by_category[record["category"]] += 1
    write_jsonl(folder / "prompts.jsonl", written)

    counts = {"records": len(written), "failed": failed, "by_category": dict(sorted(by_category.items()))}
    # With failed records the step is not finished, so that the next call tries again.
    if failed:
        return counts
    return step.finish(outputs=[folder / "prompts.jsonl"], counts=counts)


def write_sentences(
    folder: Path,
    source: Path,
    *,
    writer: str = TEMPLATE,
    chat: ChatModel | None = None,
    workers: int = 1,
    price: tuple[float, float] = (0.0, 0.0),
    dry_run: bool = False,
    progress: Progress = silent,
) -> JsonObject:
    """Fill prompts.jsonl with one record per line of `source`, each the request of a set of images.

    Args:
        writer: writer of the panels, see `language_writers.open_writer`.
        chat: the language model of the writer `llm`.
        workers: requests to it at a time.
        price: per million tokens, prompt and completion.

    Returns:
        The number of records, and, of a language model, line → fault of the `failed` ones, which the next call tries
        again.
    """
    # A finished step is not repeated.
    chat = chat or ChatModel("")
    step = DatasetStep(folder, "prompts", inputs=[source], options={"writer": writer, "model": chat.model})
    finished = step.counts_if_done()
    if finished is not None:
        return finished
    lines = []
    for number, text in text_lines(source, fix="name a file of sentences, one a line"):
        lines.append({"key": f"{number} {text} ({writer} {chat.model})", "number": number, "text": text})

    failed: dict[str, str] = {}
    rows: dict[Any, JsonObject] = {}
    write = partial(_write_sentence, source=source, model=chat.model, failed=failed)
    # The template asks nobody: it needs no journal, and a dry run checks every line.
    if writer == TEMPLATE:
        for line in lines:
            row = write(line, writer)
            assert row, "only a language model fails"
            rows[line["key"]] = row
        if dry_run:
            return {"records": len(rows)}
    else:
        path = folder / "manifests" / "sentences.journal.jsonl"
        done = read_journal(path)
        missing = [line for line in lines if line["key"] not in done]
        if dry_run:
            estimated = estimate(len(missing), TOKENS_PER_RECORD, price)
            return {"records": len(lines), "to_write": len(missing), "estimate": estimated}
        journal = Journal(path)
        ask = partial(write, writer=open_writer(writer, chat))
        # A model of this process answers one request at a time.
        asked = workers if writer == "llm" or is_url(writer) else 1
        fill_journal(journal, missing, ask, workers=asked, progress=progress)
        rows = journal.items

    save_prompts(
        [_sentence_prompt(rows[line["key"]]) for line in lines if line["key"] in rows], folder / "prompts.jsonl"
    )
    counts: JsonObject = {"records": len(lines) - len(failed)}
    # With failed lines the step is not finished, so that the next call tries again.
    if failed:
        return counts | {"failed": failed}
    return step.finish(outputs=[folder / "prompts.jsonl"], counts=counts)


def _write_sentence(
    line: JsonObject, writer: str | PanelWriter, *, source: Path, model: str, failed: dict[str, str]
) -> JsonObject | None:
    """Write the panels of a line; None, with its fault in `failed`, if a language model has no usable answer."""
    with blamed_on(f"{source}:{line['number']}"):
        try:
            draft = write_panels(line["text"], writer=writer, model=model)
        except ChatError as error:
            failed[f"{line['number']}: {line['text']}"] = str(error)
            return None
        row = line | {"theme": draft.theme, "panels": list(draft.panels), "criteria": draft.criteria}
        _sentence_prompt(row)
        return row


def _sentence_prompt(row: JsonObject) -> Prompt:
    parts = {"theme": row["theme"], "panels": row["panels"], "criteria": row["criteria"]}
    return prompt_from("", **parts, number=row["number"])


def _write_missing(
    writer: Writer, planned: Sequence[PromptOrder], journal: Journal, *, workers: int, progress: Progress
) -> dict[str, str]:
    """Write the records that the journal lacks; return key → fault of the failed orders."""
    # Themes so far, by subject, and the orders without a record.
    failed: dict[str, str] = {}
    themes: dict[Subject, list[str]] = {}
    missing = []
    for order in planned:
        subject_themes = themes.setdefault(order.subject, [])
        if order.key in journal:
            subject_themes.append(journal.items[order.key]["record"]["theme"])
        else:
            missing.append(order)

    # Runs in a thread of the pool; only the main thread writes the journal.
    def write(order: PromptOrder) -> JsonObject | None:
        try:
            # Read the themes when a thread is free, so that all themes so far are excluded.
            record = writer(order, tuple(themes[order.subject]))
        except ChatError as error:
            failed[order.key] = str(error)
            return None
        themes[order.subject].append(record["theme"])
        return {"key": order.key, "record": record}

    fill_journal(journal, missing, write, workers=workers, progress=progress)
    return failed
